"""An exchange inside a ``tf.cond`` branch: there the graph cannot be cut, so TensorFlow's collective op runs."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from lockstep.engine.tf_private import FuncGraph, ReduceOp, WhileGraph
from lockstep.errors import UnsupportedError

_instance_keys = itertools.count(1_000_000)
_GROUP_KEY_BASE = 7_000
TIMEOUT_S = 120.0


def all_reduce_in_branch(op: ReduceOp, x: Any, replicas: int, graph: Any) -> tf.Tensor:
    """All-reduces ``x`` with a collective op, all replicas meeting in the same branch.

    Raises:
      UnsupportedError: the exchange stands in a loop, where collectives of different turns could meet.
    """
    while isinstance(graph, FuncGraph):
        if isinstance(graph, WhileGraph):
            raise UnsupportedError(
                "An all-reduce inside a tf.while_loop of a replica function is not possible. "
                f"Received: all_reduce of a tensor of shape {getattr(x, 'shape', None)} in a loop body. "
                "Allowed: outside of loops, or in a tf.cond. Collect the values in the loop and reduce them after it, "
                "or put the loop around strategy.run."
            )
        graph = graph.outer_graph
    return tf.raw_ops.CollectiveReduce(
        input=tf.convert_to_tensor(x),
        group_size=replicas,
        group_key=_GROUP_KEY_BASE + replicas,
        instance_key=next(_instance_keys),
        merge_op="Add",
        final_op="Div" if op == ReduceOp.MEAN else "Id",
        subdiv_offsets=[0],
        communication_hint="auto",
        timeout_seconds=TIMEOUT_S,
    )
