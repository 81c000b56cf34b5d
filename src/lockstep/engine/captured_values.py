"""Per-replica values that a replica function uses without having been given them: found in a closure, a global, an object.

A trace stands for all replicas, so there such a value cannot become a tensor of one of them. Where it is met the function
is traced once per replica instead, and each finds its own. (Arguments of the replica function are taken apart before.)
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from lockstep.engine.context import FallBack, TracedContext, current
from lockstep.engine.tf_private import PerReplica, default_graph
from lockstep.errors import StrategyMismatchError, UnsupportedError


def _to_tensor(value: Any, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> Any:
    del dtype, name, as_ref
    context = tf.distribute.get_replica_context()
    if current() is not None and len(value.values) != context.num_replicas_in_sync:
        raise StrategyMismatchError(
            "A per-replica value can only be used with as many replicas as it has values. "
            f"Received: {len(value.values)} values, in one of {context.num_replicas_in_sync} replicas. "
            "Make it with the strategy that uses it."
        )
    if not isinstance(context, TracedContext):
        return NotImplemented  # TensorFlow's own conversion knows which replica this is
    if context.trace.belongs(default_graph()):
        raise FallBack
    raise UnsupportedError(
        "A tf.function inside of a replica function is traced once for all replicas, so it cannot hold the value of one of "
        f"them. Received: a per-replica value of {len(value.values)} replicas that {default_graph().name!r} takes in. "
        "Pass it as an argument: strategy.run(replica_fn, args=(value,)), and from there to the tf.function."
    )


@functools.cache
def install() -> None:
    """Has TensorFlow ask us first when a per-replica value is to become a tensor; once per process."""
    tf.register_tensor_conversion_function(PerReplica, _to_tensor, priority=0)
