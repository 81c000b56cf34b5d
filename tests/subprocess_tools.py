"""Run Python in a fresh process, for tests about start-up, command lines and whole scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Finished:
    """What a process left behind."""

    returncode: int
    stdout: str
    stderr: str

    def check(self) -> Finished:
        """This result, if the process ended well; otherwise an assertion error that shows what it printed."""
        assert self.returncode == 0, f"exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        return self


def run_python(
    arguments: list[str], *, timeout_s: float = 120, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Finished:
    """Run ``python *arguments`` in a new process; ``env`` adds to the environment of this one."""
    process = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=cwd or REPOSITORY,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **(env or {})},
        check=False,
    )
    return Finished(process.returncode, process.stdout, process.stderr)


def run_snippet(code: str, *, timeout_s: float = 120, env: Mapping[str, str] | None = None) -> Finished:
    """Run ``code`` (it may be indented) in a new process."""
    return run_python(["-c", textwrap.dedent(code)], timeout_s=timeout_s, env=env)


def run_lockstep(*arguments: str, timeout_s: float = 120, cwd: Path | None = None) -> Finished:
    """Run the ``lockstep`` command in a new process."""
    return run_python(["-m", "lockstep", *arguments], timeout_s=timeout_s, cwd=cwd)
