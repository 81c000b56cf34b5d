"""A replica without examples repeats what replica 0 computes, so that nothing in it fails.

Its slice is replica 0's first row. But where the replica function is given more than a batch (the number of its first row,
say), or meets others in a gather, that row does not go with what else belongs to this replica: its label would be a row that
nobody has. So whatever is computed from the batch is computed with replica 0's id and arguments. What is not is computed with
the replica's own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lockstep.engine.origins import Again, Flow
from lockstep.engine.tf_private import update_input


def repeat_first(trace: Any) -> None:
    """Gives what is computed from the batch, at the end of a trace, the placeholders in ``trace.repeated``.

    Those stand for the replica's own id and arguments, or, where it has no example, for replica 0's. Only traces in which it
    can matter are changed.
    """
    own = [(position, x) for position, x in trace.arguments if x.name not in trace.batch | trace.common]
    own = [(position, x) for position, x in own if x.dtype not in (tf.resource, tf.variant)]
    if not own and not trace.replica_id.consumers():
        return
    positions = {x.name: position for position, x in [(None, trace.replica_id), *own]}

    def other(x: tf.Tensor) -> tf.Tensor | None:
        if x.name not in positions:
            return None
        placeholder = tf.raw_ops.Placeholder(dtype=x.dtype, shape=x.shape)
        trace.repeated.append((positions[x.name], placeholder))
        return placeholder

    repeats = Again(trace, Flow(trace, set(positions)), other)
    for op in trace.graph.get_operations():
        inputs = list(op.inputs)
        if any(map(trace.origins.is_from_batch, inputs)):
            for i, x in enumerate(inputs):
                repeated = x if trace.origins.is_from_batch(x) else repeats.of(x)
                if repeated is not None and repeated is not x:
                    update_input(op, i, repeated)
