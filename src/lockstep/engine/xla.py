"""jit_compile: which parts of a step XLA can compile, and what to say about those that it cannot.

An XLA program runs on one device, so what is compiled is a replica's stage, between two exchanges. Where that is not possible
either, the step runs as if nothing had been asked for, with the same results, and a warning says why.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from lockstep.engine.tf_private import OptionalXlaContext, xla_kernels
from lockstep.errors import UnsupportedError

HAS_MERGE_CALL = "it cannot be traced once for all replicas (a merge_call, or Python arguments that differ between replicas)"
HAS_TAPE_AROUND = "a tf.GradientTape outside of strategy.run records it"
# These stand for a stage's arguments, or for what an exchange gives, as long as it is a graph.
_ARGUMENTS = frozenset({"Placeholder", "PlaceholderWithDefault"})


def described(fn: Callable) -> str:
    """The function's name and where it is written."""
    function = inspect.unwrap(getattr(fn, "python_function", fn))
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", repr(function))
    return f"{name}, {code.co_filename}:{code.co_firstlineno}" if code else name


def built_for(fn: Callable) -> Callable:
    """``fn``, whose graph is built as XLA needs it: the gradient of a loop, for one, is another there."""

    def built(*args: Any, **kwargs: Any) -> Any:
        with OptionalXlaContext(True):
            return fn(*args, **kwargs)

    return built


def refuse_around(fn: Callable, replicas: int) -> None:
    """Raises UnsupportedError: ``fn`` is to run on several replicas inside of a function that is compiled as a whole."""
    raise UnsupportedError(
        "A step of several replicas cannot be compiled as a whole: an XLA program runs on one device. "
        f"Received: strategy.run({described(fn)}) with {replicas} replicas, inside of a tf.function(jit_compile=True). "
        "Leave jit_compile out there, and compile what each replica runs: "
        "strategy.run(tf.function(replica_step, jit_compile=True), args=...)."
    )


def warn_not_compiled(extended: Any, fn: Callable, reason: str) -> None:
    """Says, once, that ``fn`` runs without XLA."""
    _once(
        extended,
        f"lockstep: jit_compile=True has no effect on {described(fn)}: {reason}. "
        "It runs without XLA, with the same results. Leave jit_compile out, or change what is in its way.",
    )


def warn_opened(extended: Any, functions: Iterable[Any]) -> None:
    """Says, once, that compiled functions in a replica function meet other replicas, so that they became part of it."""
    for function in functions:
        _once(
            extended,
            f"lockstep: jit_compile=True has no effect on {described(function)}: replicas meet in it (an all_reduce or an "
            "optimizer's apply), and an XLA program runs on one device. It runs without XLA, with the same results. "
            "Put jit_compile on a function around what comes before the exchange, or on the whole replica function: "
            "strategy.run(tf.function(replica_step, jit_compile=True), args=...) compiles what is before and after it.",
        )


def _once(extended: Any, text: str) -> None:
    if text not in extended.notices:
        extended.notices.add(text)
        warnings.warn(text, UserWarning, stacklevel=2)


def can_compile(extended: Any, fn: Callable, graph: Any) -> bool:
    """Whether XLA knows every op in ``graph``; otherwise it is said that ``fn`` runs without.

    Args:
      extended: the strategy's engine.
      fn: what the graph was traced from.
      graph: that of a complete trace.
    """
    unknown = _unknown_ops(graph, extended.devices[0])
    if unknown:
        warn_not_compiled(extended, fn, f"XLA has no {', '.join(sorted(unknown))}, which {_is_one(unknown)} in it")
    return not unknown


def _is_one(names: set[str]) -> str:
    return "is an op" if len(names) == 1 else "are ops"


def _unknown_ops(graph: Any, device: str) -> set[str]:
    """The types of ops in ``graph``, and in the functions that it calls, that XLA cannot compile for ``device``."""
    graph_def = graph.as_graph_def()
    bodies = {function.signature.name: function for function in graph_def.library.function}
    waiting = list(graph_def.node)
    found, seen = set(), set()
    while waiting:
        node = waiting.pop()
        found.add(node.op)
        called = {attr.func.name for attr in node.attr.values()} | {f.name for a in node.attr.values() for f in a.list.func}
        called = {name for name in called | {node.op} if name in bodies} - seen
        found -= called
        seen |= called
        waiting += [inner for name in called for inner in bodies[name].node_def]
    return found - xla_kernels(device) - _ARGUMENTS


def explained(function: Callable) -> Callable:
    """``function``, which runs compiled steps of a Keras model, with XLA's refusals turned into a readable error."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if "tf2xla conversion failed" not in str(error):
                raise
            raise UnsupportedError(
                f"XLA cannot compile this model. Received: jit_compile=True, and of XLA: {_first_reason(str(error))!r} "
                "Compile the model with jit_compile=False, or change what is named there."
            ) from error

    return call


def _first_reason(text: str) -> str:
    """The first line of XLA's text that says what is wrong (lines before are about where the model was called)."""
    lines = text.split("tf2xla conversion failed")[0].splitlines()
    told = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("File", "Detected at", "Stack"))]
    return next((line for line in told if "XLA" in line or "compile" in line), told[-1] if told else text[:200])
