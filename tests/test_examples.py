"""Each example, as a user runs it."""

from __future__ import annotations

import re

import pytest

from subprocess_tools import REPOSITORY, run_python

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains_two_replicas_to_97_percent(path) -> None:
    # An example shows how a thing is done right; a warning would be a reason to doubt it.
    result = run_python(["-W", "error::UserWarning:lockstep", str(path)], timeout_s=300).check()
    last = result.stdout.splitlines()[-1]
    assert last.startswith("2 replicas:")
    accuracy = re.search(r"test accuracy (\d\.\d+)", last)
    assert accuracy is not None and float(accuracy[1]) >= 0.97, last
