"""The tf.functions that a replica function calls: when they are traced as a part of it instead of being called.

A nested function with an exchange in it (an optimizer step in a ``@tf.function``, say) becomes part of the traced graph, so
that it can be cut like the rest. One with jit_compile=True stays a call, which XLA compiles on each device, unless replicas
meet in it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lockstep.engine.context import NeedsInlining
from lockstep.engine.tf_private import Function, clone_function, converted, default_graph, ops

if TYPE_CHECKING:
    from lockstep.engine.trace import Trace


class Inlining:
    """How nested functions become part of a trace; kept from one try to the next.

    Args:
      all_compiled: whether XLA compiles the whole trace, so that nested functions need not be compiled for themselves.

    Attributes:
      opened: the functions with jit_compile=True in which replicas meet, as far as seen. They are inlined like others.
    """

    def __init__(self, all_compiled: bool):
        self._all_compiled = all_compiled
        self.opened: set[Any] = set()

    @contextlib.contextmanager
    def within(self, trace: Trace) -> Iterator[None]:
        """While ``trace`` is made."""
        call = Function.__call__
        clones: dict[Any, Any] = {}

        def call_compiled(function: Any, *args: Any, **kwargs: Any) -> Any:
            # A clone, for this trace alone: it may capture what only exists here, such as the replica's weight.
            if function not in clones:
                clones[function] = clone_function(function, function.python_function, jit_compile=True)
            before, trace.in_own_function = trace.in_own_function, True
            try:
                return call(clones[function], *args, **kwargs)
            except NeedsInlining:
                self.opened.add(function)
                raise
            finally:
                trace.in_own_function = before

        def inlined_call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not trace.belongs(default_graph()):
                return call(function, *args, **kwargs)
            if function._jit_compile and not self._all_compiled and function not in self.opened:
                return call_compiled(function, *args, **kwargs)
            with ops.name_scope(_scope_of(function)):
                return converted(function.python_function)(*args, **kwargs)

        Function.__call__ = inlined_call
        try:
            yield
        finally:
            Function.__call__ = call


def _scope_of(function: Any) -> str:
    """The function's name, as far as it may name a scope ("<lambda>" may not)."""
    return re.sub(r"[^A-Za-z0-9_.]", "", function._name or "").lstrip("_") or "function"
