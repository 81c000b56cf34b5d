"""Environments of the peers, made on demand: what only a comparison needs is no dependency of the project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

# The versions that reports compare with. A CPU build of PyTorch is enough, wherever pip is set up to find one
# (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu).
PEERS = {
    "bench-torch": ("torch==2.13.0", "numpy==2.4.6"),
    "bench-jax": ("jax==0.10.2", "jaxlib==0.10.2", "keras==3.15.1", "numpy==2.4.6"),
}


class EnvironmentFailed(Exception):
    """An environment could not be made."""


def interpreter(name: str | None) -> Path:
    """The Python of an environment, which is made if need be; None is this process's own.

    Raises:
      EnvironmentFailed: pip could not install what it needs.
    """
    if name is None:
        return Path(sys.executable)
    folder = REPOSITORY / ".venvs" / name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(PEERS[name])
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        print(f"making {folder.relative_to(REPOSITORY)}: {', '.join(PEERS[name])}", flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEERS[name]])
        stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise EnvironmentFailed(f"{' '.join(command[:4])} failed: {lines[-1]}")
