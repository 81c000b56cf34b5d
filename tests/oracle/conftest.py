"""Leaves out the full tables, which take hours, unless they are asked for: ``pytest -m slow tests/oracle``."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what is slow here where ``-m`` does not say what to run."""
    if config.option.markexpr:
        return
    slow = [item for item in items if item.path.is_relative_to(HERE) and item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]
