"""Print the versions a test run is about to use, on one line."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def _version(*names: str) -> str:
    """The installed version of the first distribution in ``names`` that is there."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


if __name__ == "__main__":
    print(
        f"Python {platform.python_version()}, TensorFlow {_version('tensorflow-cpu', 'tensorflow')}, "
        f"Keras {_version('keras')}, NumPy {_version('numpy')}"
    )
