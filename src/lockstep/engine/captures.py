"""Checks the variables that a traced replica function uses: they must belong to the strategy, or at least not be written."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from lockstep.engine.tf_private import called_writes
from lockstep.engine.trace import Trace
from lockstep.engine.variables import variable_of
from lockstep.errors import StrategyMismatchError

# What TensorFlow says where one strategy's variable is used under another.
_MIXED = re.compile(r"Mixing different tf\.distribute\.Strategy objects: (<.*?>) is not (<.*?>)")
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")


def check(trace: Trace, strategy: tf.distribute.Strategy) -> None:
    """Raises StrategyMismatchError if the trace uses a variable of another strategy, or writes one that has no copies.

    A variable made outside of any scope has one copy. Read, it is a constant to all replicas; written, it would be updated
    N times a step, in any order.
    """
    plain: dict[str, tf.Tensor] = {}
    for outer, inner in trace.graph.captures:
        if inner.dtype != tf.resource:
            continue
        variable = variable_of(outer)
        if variable is None:
            plain[inner.op.name] = outer
        elif getattr(variable, "distribute_strategy", None) is not strategy:
            raise StrategyMismatchError(_foreign(strategy, _described(variable)))
    for op in trace.graph.get_operations():
        for handle in _written_handles(op):
            if handle.op.name in plain:
                raise StrategyMismatchError(_written(op, _name_of(plain[handle.op.name]), strategy.num_replicas_in_sync))


def _described(variable: Any) -> str:
    owner = getattr(variable, "distribute_strategy", None)
    made = f"made in the scope of {owner!r}" if owner is not None else f"a {type(variable).__name__}"
    return f"{variable.name!r}, {made}"


def _written_handles(op: tf.Operation) -> list[tf.Tensor]:
    """The variables that ``op`` may write: itself, or in a branch, loop or function that it calls."""
    if op.type.startswith(_WRITES):
        return [op.inputs[0]]
    return called_writes(op)


@contextlib.contextmanager
def mismatch_explained(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Turns TensorFlow's "Mixing different tf.distribute.Strategy objects" into an error that says what to do."""
    try:
        yield
    except RuntimeError as error:
        mixed = _MIXED.search(str(error))
        if mixed is None or isinstance(error, StrategyMismatchError):
            raise
        owner = next((name for name in mixed.groups() if name != repr(strategy)), "another strategy")
        raise StrategyMismatchError(_foreign(strategy, f"a variable made in the scope of {owner}")) from error


def _foreign(strategy: tf.distribute.Strategy, what: str) -> str:
    return (
        f"A replica function can only use variables of its own strategy. Received: in a run of {strategy!r}, {what}. "
        "Make the model, optimizer and metrics in the scope of the strategy that trains them."
    )


def _name_of(handle: tf.Tensor) -> str:
    """The name of the variable that ``handle`` belongs to, which a handle does not know; for an error, since it takes long."""
    owners = (each for each in gc.get_objects() if issubclass(type(each), tf.Variable))
    return next((owner.name for owner in owners if vars(owner).get("_handle") is handle), "")


def _written(op: tf.Operation, variable: str, replicas: int) -> str:
    if op.type.startswith(_WRITES):
        what = f"{op.type} ({op.name!r}) of a value of shape {op.inputs[1].shape if len(op.inputs) > 1 else 'unknown'}"
    else:
        what = f"a write in {op.type} ({op.name!r})"
    return (
        f"A variable that replicas write must be created in the strategy's scope. Received: {what} "
        f"to a variable{f' {variable!r}' if variable else ''} with one copy, which {replicas} replicas would each write. "
        "Create the model, optimizer, metric or tf.Variable inside `with strategy.scope():`."
    )
