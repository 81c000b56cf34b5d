"""A replica without examples repeats what replica 0 computes, so that nothing in it fails.

Its slice is replica 0's first row. But where the replica function is given more than a batch (the number of its first row,
say), or meets others in a gather, that row does not go with what else belongs to this replica: its label would be a row that
nobody has. So whatever is computed from the batch is computed with replica 0's id and arguments. What is not is computed with
the replica's own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lockstep.engine.origins import Flow, computed_again
from lockstep.engine.tf_private import update_input


def repeat_first(trace: Any) -> None:
    """Gives what is computed from the batch, at the end of a trace, the placeholders in ``trace.repeated``.

    Those stand for the replica's own id and arguments, or, where it has no example, for replica 0's. Only traces in which it
    can matter are changed.
    """
    own = [(position, x) for position, x in trace.arguments if x.name not in trace.batch | trace.common]
    own = [(position, x) for position, x in own if x.dtype not in (tf.resource, tf.variant)]
    if not own and not any(mark.kind == "gather" for mark in trace.marks_in[trace.graph]):
        return
    ops = trace.graph.get_operations()
    repeats = _Repeats(trace, [(None, trace.replica_id), *own])
    for op in ops:
        inputs = list(op.inputs)
        if any(map(trace.origins.is_from_batch, inputs)):
            for i, x in enumerate(inputs):
                if not trace.origins.is_from_batch(x) and (other := repeats.of(x)) is not x:
                    update_input(op, i, other)


class _Repeats:
    """The tensors of a trace, computed again from other placeholders in place of ``sources``."""

    def __init__(self, trace: Any, sources: list[tuple[int | None, tf.Tensor]]):
        self._trace = trace
        self._source = {x.name: position for position, x in sources}
        self._flow = Flow(trace, set(self._source))
        self._made: dict[str, tf.Tensor] = {}

    def of(self, x: tf.Tensor) -> tf.Tensor:
        """``x`` itself, where it does not depend on the sources, or cannot be computed a second time."""
        if x.name in self._made or not self._flow.reaches(x):
            return self._made.get(x.name, x)
        op = x.op
        if x.name in self._source:
            placeholder = tf.raw_ops.Placeholder(dtype=x.dtype, shape=x.shape)
            self._trace.repeated.append((self._source[x.name], placeholder))
            outputs = [placeholder]
        elif op.op_def.is_stateful or any(value.HasField("func") for value in op.node_def.attr.values()):
            return x
        else:
            outputs = computed_again(op, [self.of(y) for y in op.inputs])
        self._made |= {y.name: other for y, other in zip(op.outputs, outputs, strict=True)}
        return self._made[x.name]
