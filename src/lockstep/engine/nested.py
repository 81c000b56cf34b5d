"""The tf.functions that a replica function calls: when they are traced as a part of it instead of being called.

A nested function with an exchange in it (an optimizer step in a ``@tf.function``, say) becomes part of the traced graph, so
that it can be cut like the rest. One with jit_compile=True stays a call, which XLA compiles on each device, unless replicas
meet in it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lockstep.engine.context import NeedsInlining
from lockstep.engine.tf_private import Function, clone_function, converted, default_graph, ops

if TYPE_CHECKING:
    from lockstep.engine.trace import Trace


# How a nested function is called in the trace that this thread is making: (function, args, kwargs) -> result.
_Call = Callable[[Any, tuple, dict], Any]


class _Here(threading.local):
    call: _Call | None = None


_here = _Here()


@functools.cache
def _original_call() -> Callable:
    """TensorFlow's call of a tf.function, after putting ours in front of it, for good.

    Ours differs only in a thread that is making a trace. (Put in place and taken away by each trace, it would be met by
    other threads, and two traces that overlap would leave it behind.)
    """
    original = Function.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inlined = _here.call
        return original(self, *args, **kwargs) if inlined is None else inlined(self, args, kwargs)

    Function.__call__ = call
    return original


_installing = threading.Lock()


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
        """While ``trace`` is made, in this thread."""
        with _installing:
            call = _original_call()
        clones: dict[Any, Any] = {}

        def call_compiled(function: Any, args: tuple, kwargs: dict) -> Any:
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

        def inlined_call(function: Any, args: tuple, kwargs: dict) -> Any:
            if not trace.belongs(default_graph()):
                return call(function, *args, **kwargs)
            if function._jit_compile and not self._all_compiled and function not in self.opened:
                return call_compiled(function, args, kwargs)
            with ops.name_scope(_scope_of(function)):
                return converted(function.python_function)(*args, **kwargs)

        before, _here.call = _here.call, inlined_call
        try:
            yield
        finally:
            _here.call = before


def _scope_of(function: Any) -> str:
    """The function's name, as far as it may name a scope ("<lambda>" may not)."""
    return re.sub(r"[^A-Za-z0-9_.]", "", function._name or "").lstrip("_") or "function"
