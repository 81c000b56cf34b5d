"""lockstep: synchronous data-parallel training for TensorFlow and Keras 3.

Names load on first use, so that ``import lockstep`` and ``lockstep --help`` do not start TensorFlow: a strategy has to
set up devices and threads before TensorFlow starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep import errors
    from lockstep.strategy import MirroredStrategy

__version__ = "0.1.0"

__all__ = ["MirroredStrategy", "__version__", "errors"]

# Public name → (module, name in it); no name means the module itself.
_LAZY: dict[str, tuple[str, str | None]] = {
    "MirroredStrategy": ("lockstep.strategy", "MirroredStrategy"),
    "errors": ("lockstep.errors", None),
}


def __getattr__(name: str) -> Any:
    """Load a public name on its first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}. It offers: {', '.join(sorted(__all__))}.")
    module_name, attribute = _LAZY[name]
    module = import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
