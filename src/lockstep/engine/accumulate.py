"""Gradient accumulation inside one step: a replica's slice is worked through in micro-batches, and their results are summed.

Only one micro-batch's activations are in memory at a time. Losses weigh each micro-batch by its part of the global batch, so
the sum is what the whole slice at once would give, whatever the sizes. What a loss must know about the whole batch in advance
(how many steps are not masked, the sum of the sample weights) is computed first, from a trace of the whole slice of which
nothing else is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lockstep.engine import feed
from lockstep.engine.context import MicroBatch, Replica, current, sum_over_replicas
from lockstep.engine.stages import READS
from lockstep.engine.tf_private import BranchGraph, CompositeTensor, converted, default_graph, nest
from lockstep.errors import BatchError, UnsupportedError

_UNKNOWN: Any = None


def check_count(micro_batches: Any) -> int:
    """``micro_batches`` if it is a positive integer.

    Raises:
      ValueError: it is not.
    """
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
        raise ValueError(
            f"A slice is accumulated over a positive number of micro-batches. Received: micro_batches={micro_batches!r}. "
            "Allowed: 1 (no accumulation), 2, 3, ..."
        )
    return micro_batches


def accumulate(fn: Callable, args: tuple, micro_batches: int) -> Any:
    """``fn`` over the micro-batches of this replica's slice; see `lockstep.MirroredStrategy.accumulate`."""
    check_count(micro_batches)
    replica = current()
    if replica is None:
        raise UnsupportedError(
            "Micro-batches are accumulated by each replica. Received: accumulate() outside of a replica. "
            "Call it in the function that you pass to strategy.run."
        )
    args = nest.map_structure(feed.as_tensor, args)
    leaves = [leaf for leaf in nest.flatten(args) if leaf is not None]
    if not leaves:
        raise BatchError("There is nothing to cut into micro-batches. Received: accumulate() with no tensor in args.")
    feed.check_leaves([(path, feed.spec_of(leaf)) for path, leaf in feed.named_leaves(args)])
    if micro_batches == 1:
        return fn(*args)
    slices = _MicroBatches(args, feed.batch_size(leaves[0]), micro_batches)
    if tf.executing_eagerly():
        return _one_by_one(replica, fn, slices)
    return _in_a_loop(replica, converted(fn), slices)


class _MicroBatches:
    """The micro-batches of one slice: at most as many as it has examples, with sizes that differ by at most one."""

    def __init__(self, args: tuple, size: Any, most: int):
        self._args = args
        size = tf.convert_to_tensor(size)
        self.count = tf.clip_by_value(size, 1, most)
        self._size = size

    @property
    def whole(self) -> tuple:
        return self._args

    def __getitem__(self, i: Any) -> tuple[tuple, tf.Tensor]:
        """(arguments, part of the slice) of micro-batch ``i``."""
        each, rest = self._size // self.count, self._size % self.count
        start = i * each + tf.minimum(i, rest)
        stop = start + each + tf.cast(i < rest, each.dtype)
        part = tf.cast(stop - start, tf.float32) / tf.cast(tf.maximum(self._size, 1), tf.float32)
        return nest.map_structure(lambda leaf: None if leaf is None else feed.rows(leaf, start, stop), self._args), part


def _one_by_one(replica: Replica, fn: Callable, slices: _MicroBatches) -> Any:
    plan, totals, loss = None, [], tf.constant(0.0)
    for i in range(int(slices.count)):
        args, part = slices[i]
        result, loss_here = _computed(replica, fn, args, MicroBatch(part))
        if plan is None:
            plan = _planned(result)
            totals = plan.zeros()
        totals, loss = plan.added(totals, result), loss + loss_here
    assert plan is not None, "there is at least one micro-batch"
    replica.losses.append(loss)
    return plan.packed(totals)


def _in_a_loop(replica: Replica, fn: Callable, slices: _MicroBatches) -> Any:
    scratch = BranchGraph("lockstep_whole_slice")
    collected: list[list[tf.Tensor]] = []
    with scratch.as_default():
        result, _ = _computed(replica, fn, slices.whole, MicroBatch(tf.constant(1.0), collected=collected))
    # Of the scratch graph only shapes and dtypes are used, and what the sums are computed from.
    plan, sums = _planned(result), _taken_out(scratch, collected)

    def body(i: tf.Tensor, loss: tf.Tensor, *totals: tf.Tensor) -> tuple:
        args, part = slices[i]
        result, loss_here = _computed(replica, fn, args, MicroBatch(part, sums=iter(sums)))
        return (i + 1, loss + loss_here, *plan.added(list(totals), result))

    start = [tf.zeros_like(slices.count), tf.constant(0.0), *plan.zeros()]
    _, loss, *totals = tf.while_loop(
        lambda i, *_: i < slices.count,
        body,
        start,
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([]), *plan.shapes()],
        parallel_iterations=1,
        swap_memory=False,
    )
    replica.losses.append(loss)
    return plan.packed(totals)


def _computed(replica: Replica, fn: Callable, args: tuple, micro_batch: MicroBatch) -> tuple[Any, tf.Tensor]:
    """What ``fn`` gives for one micro-batch, and the sum of the losses that Keras has computed in it, for check_finite."""
    with replica.in_micro_batch(micro_batch) as losses:
        result = fn(*args)
    noted = [tf.cast(tf.stop_gradient(x), tf.float32) for x in losses]
    return result, tf.add_n(noted) if noted else tf.constant(0.0)


@dataclass(frozen=True)
class _Plan:
    """How the results of micro-batches are summed: like one of them, ``structure``, whose flat ``leaves`` say of what kind."""

    structure: Any
    leaves: list[Any]

    def zeros(self) -> list[tf.Tensor]:
        """What the sums start from; 16-bit floats are summed in float32."""
        start: list[tf.Tensor] = []
        for leaf in self.leaves:
            if isinstance(leaf, tf.IndexedSlices):
                start.append(tf.zeros([0, *leaf.values.shape[1:]], _wide(leaf.dtype)))
                start.append(tf.zeros([0], leaf.indices.dtype))
            elif tf.is_tensor(leaf):
                # Without a static shape: a scalar zero, which takes on the shape of the first that is added.
                start.append(tf.zeros(leaf.shape if leaf.shape.is_fully_defined() else [], _wide(leaf.dtype)))
        return start

    def shapes(self) -> list[tf.TensorShape]:
        found = []
        for leaf in self.leaves:
            if isinstance(leaf, tf.IndexedSlices):
                found += [tf.TensorShape([None, *leaf.values.shape[1:]]), tf.TensorShape([None])]
            elif tf.is_tensor(leaf):
                found.append(leaf.shape if leaf.shape.is_fully_defined() else tf.TensorShape(_UNKNOWN))
        return found

    def added(self, carried: list[tf.Tensor], result: Any) -> list[tf.Tensor]:
        """``carried`` and what one micro-batch gave."""
        rest, after = iter(carried), []
        for leaf in nest.flatten(result):
            if isinstance(leaf, tf.IndexedSlices):
                values = tf.concat([next(rest), tf.cast(leaf.values, _wide(leaf.dtype))], 0)
                after += [values, tf.concat([next(rest), leaf.indices], 0)]
            elif tf.is_tensor(leaf):
                after.append(next(rest) + tf.cast(leaf, _wide(leaf.dtype)))
        return after

    def packed(self, totals: list[tf.Tensor]) -> Any:
        rest, flat = iter(totals), []
        for leaf in self.leaves:
            if isinstance(leaf, tf.IndexedSlices):
                dense: Any = leaf.dense_shape
                shape = tf.constant(tf.get_static_value(dense), dense.dtype)
                flat.append(tf.IndexedSlices(tf.cast(next(rest), leaf.dtype), next(rest), shape))
            else:
                flat.append(tf.ensure_shape(tf.cast(next(rest), leaf.dtype), leaf.shape) if tf.is_tensor(leaf) else leaf)
        return nest.pack_sequence_as(self.structure, flat)


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _planned(result: Any) -> _Plan:
    flat = nest.flatten(result)
    for (path, _), leaf in zip(feed.named_leaves(result), flat, strict=True):
        _check_summable(path, leaf)
    return _Plan(result, flat)


def _check_summable(path: str, leaf: Any) -> None:
    if isinstance(leaf, tf.IndexedSlices):
        if tf.get_static_value(leaf.dense_shape) is None:
            raise UnsupportedError(f"A sparse gradient of unknown shape cannot be accumulated. Received: {path}, {leaf}.")
    elif isinstance(leaf, CompositeTensor) or (tf.is_tensor(leaf) and not (leaf.dtype.is_floating or leaf.dtype.is_integer)):
        raise UnsupportedError(
            "The results of micro-batches are summed. "
            f"Received: {path}, a {type(leaf).__name__} of dtype {leaf.dtype.name}. Allowed: losses, gradients, counts. "
            "Update metrics in the function instead of returning what belongs to single examples."
        )


def _taken_out(scratch: Any, collected: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
    """The sums over all replicas of what was collected in ``scratch``, computed in the current graph and from nothing else."""
    if not collected:
        return []
    wanted = [x for values in collected for x in values]
    ops = _computed_by([x.op for x in wanted])
    effects = [op for op in ops.values() if op.op_def.is_stateful and op.type not in READS]
    if effects:
        raise UnsupportedError(
            "A mask or a sample weight must be known before the first micro-batch. Received: one that depends on "
            f"{effects[0].type} ({effects[0].name!r}), which cannot be computed twice. Use micro_batches=1."
        )
    inputs = {inner.name: default_graph().capture(outer) for outer, inner in scratch.captures if inner.op.name in ops}
    found = tf.graph_util.import_graph_def(_graph_def(scratch, ops), inputs, [x.name for x in wanted], name="lockstep_sums")
    sums = iter(sum_over_replicas(list(found)))
    return [[next(sums) for _ in values] for values in collected]


def _computed_by(ops: list[tf.Operation]) -> dict[str, tf.Operation]:
    """``ops`` and all ops whose outputs they are computed from, by name."""
    found: dict[str, tf.Operation] = {}
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found[op.name] = op
            waiting.extend(x.op for x in op.inputs)
    return found


def _graph_def(graph: Any, ops: dict[str, tf.Operation]) -> Any:
    """The GraphDef of those of ``graph``'s ops, without control dependencies."""
    graph_def = graph.as_graph_def()
    kept = [node for node in graph_def.node if node.name in ops]
    del graph_def.node[:]
    for node in kept:
        inputs = [name for name in node.input if not name.startswith("^")]
        del node.input[:]
        node.input.extend(inputs)
    graph_def.node.extend(kept)
    return graph_def


def sum_over_batch(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """The sums of ``values`` over the global batch: over all replicas, and over all micro-batches of each."""
    replica = current()
    assert replica is not None
    micro = replica.micro_batch
    if micro is None:
        return sum_over_replicas(values)
    if micro.collected is not None:
        micro.collected.append(values)
        return values
    if micro.sums is None:
        raise UnsupportedError(
            "Masked or weighted means cannot be accumulated in eager mode: their divisor must be known before the first "
            "micro-batch. Put the step into a tf.function (compile with run_eagerly=False), or use micro_batches=1."
        )
    return next(micro.sums)


@contextlib.contextmanager
def held_updates() -> Iterator[list[Any]]:
    """In this block an optimizer's ``apply`` updates nothing: (optimizer, gradients, variables) is appended to the list."""
    replica = current()
    assert replica is not None
    before, replica.held = replica.held, []
    try:
        yield replica.held
    finally:
        replica.held = before
