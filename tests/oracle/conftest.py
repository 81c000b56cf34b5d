"""Leaves out the tables that take minutes (``make oracle``) and those that take hours (``pytest -m slow tests/oracle``)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the long tables where ``-m`` does not say what to run."""
    if config.option.markexpr:
        return
    here = [item for item in items if item.path.is_relative_to(HERE)]
    long = {item for item in here if item.get_closest_marker("slow") or item.get_closest_marker("oracle")}
    config.hook.pytest_deselected(items=[item for item in items if item in long])
    items[:] = [item for item in items if item not in long]
