"""What a replica function sees of its replica: its id, its weight, and the exchange with the others.

`current()` answers "which lockstep replica am I in?" for the rest of the engine and for the Keras seams. There are three
kinds of replica: traced once for all (`TracedContext`), alone (`SoleContext`, N = 1), and one Python thread each
(TensorFlow's own context, to which `ThreadReplica` adds what we need).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from lockstep.engine.borrowed import cut, cut_rows, masked
from lockstep.engine.exchange import as_dense, as_value, check_gather, reduce_op_of
from lockstep.engine.tf_options import check_communication_options
from lockstep.engine.tf_private import ReduceOp, ReplicaContext, default_graph, may_record_gradients, nest
from lockstep.errors import UnsupportedError

if TYPE_CHECKING:
    from lockstep.engine.shards import ShardLayout
    from lockstep.engine.trace import Trace
    from lockstep.engine.weights import Weights


class FallBack(BaseException):
    """This replica function cannot be traced once; trace or run it once per replica instead."""


class NeedsInlining(BaseException):
    """A nested tf.function holds an exchange or asks for its replica: trace again with nested functions inlined."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a replica's slice that is computed on its own (see `accumulate`).

    Attributes:
      part: its size as a part of the slice's, a float32 scalar.
      sums: the sums over the global batch that losses will ask for, in order; None where they are not known.
      collected: where to note of what sums are asked for, when it stands for the whole slice.
    """

    part: tf.Tensor
    sums: Iterator[list[tf.Tensor]] | None = None
    collected: list[list[tf.Tensor]] | None = None


class Replica:
    """The engine's view of the replica that is being run or traced."""

    def __init__(self, replicas: int):
        self.replicas = replicas
        # The losses that Keras has computed in this replica so far, for check_finite.
        self.losses: list[Any] = []
        # What an update has to wait for, so that nothing is half applied.
        self.checks: list[Any] = []
        # Tensors that add up over replicas (see `shares`), by id.
        self.shares: dict[int, Any] = {}
        # The micro-batch that is being computed, and the updates held back until all of them are.
        self.micro_batch: MicroBatch | None = None
        self.held: list[Any] | None = None
        # Whether the gradients at hand are shards (see `equal_writes`).
        self.scattered = False
        self._exact_depth = 0
        self._own_depth = 0

    @property
    def fraction(self) -> Any:
        """The share of the global batch that is being computed: a float, or a float32 scalar tensor."""
        of_slice = self._fraction_of_slice
        return of_slice if self.micro_batch is None else of_slice * self.micro_batch.part

    @property
    def is_whole(self) -> bool:
        """Whether the global batch is computed at once, so that nothing has to be weighed."""
        return self.replicas == 1 and self.micro_batch is None

    @property
    def _fraction_of_slice(self) -> Any:
        return 1.0 / self.replicas

    @contextlib.contextmanager
    def in_micro_batch(self, micro_batch: MicroBatch) -> Iterator[list[Any]]:
        """Within this block ``micro_batch`` is computed. The losses noted in it are yielded; they stay in its graph."""
        before, self.micro_batch = self.micro_batch, micro_batch
        losses, self.losses = self.losses, []
        try:
            yield self.losses
        finally:
            self.micro_batch, self.losses = before, losses

    @property
    def active(self) -> Any | None:
        """Whether this replica has any example (bool scalar tensor); None where it always has."""
        return None

    def own(self, x: tf.Tensor, otherwise: Callable[[], tf.Tensor] | None = None) -> tf.Tensor:
        """``x``; on a replica without examples, ``otherwise()`` (default zeros) for what was computed from a borrowed row."""
        del otherwise
        return x

    def record_share(self, x: Any) -> Any:
        """Notes that ``x`` is this replica's share of a global value, and returns it."""
        self.shares[id(x)] = x
        return x

    def record_write(self, variable: Any, added: bool = False) -> None:
        """Notes that the replica function wrote ``variable`` locally: the copies are made equal at the end of the step.

        Args:
          variable: a mirrored variable.
          added: whether it was written by adding to it.
        """

    @property
    def writes_are_equal(self) -> bool:
        """Whether values written now are the same on all replicas by construction (gradients are reduced already)."""
        return self._exact_depth > 0

    @property
    def writes_are_own(self) -> bool:
        """Whether values written now belong to this replica's examples, so that the copies are meant to differ."""
        return self._own_depth > 0

    @contextlib.contextmanager
    def own_writes(self) -> Iterator[None]:
        """Within this block each replica writes what belongs to its own examples, and copies stay as they are written."""
        self._own_depth += 1
        try:
            yield
        finally:
            self._own_depth -= 1

    @contextlib.contextmanager
    def equal_writes(self, scattered: bool = False) -> Iterator[None]:
        """Within this block every replica computes the same values, so copies need not be made equal afterwards.

        Args:
          scattered: whether the gradients at hand are this replica's shards where the update is shared out (see `update`).
        """
        self._exact_depth += 1
        before, self.scattered = self.scattered, scattered
        try:
            yield
        finally:
            self._exact_depth -= 1
            self.scattered = before


# The variables that a step has written locally, by id, and whether by adding to them.
Written = dict[int, tuple[Any, bool]]


def _record(written: Written, variable: Any, added: bool) -> None:
    _, before = written.get(id(variable), (variable, False))
    written[id(variable)] = variable, added or before


class ThreadReplica(Replica):
    """One replica among N that run in a Python thread each (eager mode, or a function with merge_call)."""

    def __init__(self, replicas: int, replica: int, weights: Weights | None, written: Written):
        super().__init__(replicas)
        self._replica, self._weights, self._written = replica, weights, written

    @property
    def _fraction_of_slice(self) -> Any:
        return self._weights.fractions[self._replica] if self._weights else 1.0 / self.replicas

    @property
    def active(self) -> Any | None:
        return self._weights.active[self._replica] if self._weights else None

    def own(self, x: tf.Tensor, otherwise: Callable[[], tf.Tensor] | None = None) -> tf.Tensor:
        return x if self._weights is None else self._weights.own(self._replica, x, otherwise)

    def record_write(self, variable: Any, added: bool = False) -> None:
        _record(self._written, variable, added)


class SoleContext(ReplicaContext):
    """The replica context where there is one replica: every exchange is the identity."""

    def __init__(self, strategy: Any):
        super().__init__(strategy, 0)
        self.lockstep = Replica(1)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        check_communication_options(options)
        reduce_op_of(reduce_op)
        return nest.map_structure(as_value, value)


class TracedContext(ReplicaContext):
    """The replica context while one trace is made for all replicas: the replica id is a tensor, exchanges are marks."""

    def __init__(self, strategy: Any, trace: Trace):
        super().__init__(strategy, 0)
        self.lockstep = TracedReplica(trace)
        self.trace = trace

    @property
    def replica_id_in_sync_group(self) -> Any:
        return self.trace.visible(self.trace.replica_id)

    def _merge_call(self, merge_fn: Callable, args: Any, kwargs: Any) -> Any:
        raise FallBack

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        check_communication_options(options)
        op = reduce_op_of(reduce_op)
        flat = nest.flatten(value)
        # As TensorFlow does: what all replicas are handed from outside is one value, which counts once.
        outside = [self.trace.origins.is_outside(v) for v in flat]
        if any(isinstance(v, tf.IndexedSlices) for v in flat) or not may_record_gradients():
            return nest.pack_sequence_as(value, self._exchange(op, flat, outside))

        @tf.custom_gradient
        def reduced(*xs: tf.Tensor) -> Any:
            # The gradient of an all-reduced sum is the all-reduced gradient (mean likewise).
            return self._exchange(op, list(xs), outside), lambda *dys: self.all_reduce(op, list(dys))

        return nest.pack_sequence_as(value, nest.flatten(reduced(*(tf.convert_to_tensor(v) for v in flat))))

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        check_communication_options(options)
        return nest.map_structure(lambda v: self._gathered(v, axis), value)

    def _gathered(self, value: Any, axis: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            raise UnsupportedError(
                f"all_gather does not support IndexedSlices. Received: {value!r}. "
                "Gather its values and its indices, or all-reduce it, which joins the rows of all replicas."
            )
        if isinstance(value, tf.RaggedTensor) and check_gather([value], axis) == 0:
            rows = self._gathered(value.values, axis), self._gathered(value.row_lengths(), axis)
            return tf.RaggedTensor.from_row_lengths(*rows)
        if self.trace.origins.is_outside(value):
            return tf.identity(value)
        x = as_dense(value)
        axis = check_gather([x], axis)

        @tf.custom_gradient
        def gathered(x: tf.Tensor) -> Any:
            whole = self.trace.mark_gather(x, axis)
            if x.shape.rank is not None:
                whole.set_shape([None if i == axis % x.shape.rank else n for i, n in enumerate(x.shape)])

            def gradient(dy: tf.Tensor) -> tf.Tensor:
                sizes = self.trace.mark_gather(tf.shape(x)[axis : axis + 1] if axis >= 0 else tf.shape(x)[axis][None], 0)
                start = tf.reduce_sum(sizes[: self.trace.replica_id])
                summed = self.all_reduce(ReduceOp.SUM, dy)
                return tf.gather(summed, start + tf.range(tf.shape(x)[axis]), axis=axis)

            return whole, gradient

        self._check_can_meet("all_gather", [x])
        return gathered(self.lockstep.own_rows(x, axis))

    def scatter(self, xs: list[tf.Tensor], layouts: list[ShardLayout]) -> list[tf.Tensor]:
        """This replica's shard of the sum of each tensor over all replicas."""
        outside = [self.trace.origins.is_outside(x) for x in xs]
        handed_in = iter(self.lockstep.handed_in([x for x, once in zip(xs, outside, strict=True) if not once]))
        return [
            layout.own(x, self.replica_id_in_sync_group) if once else self.trace.mark_scatter(next(handed_in), layout)
            for x, once, layout in zip(xs, outside, layouts, strict=True)
        ]

    def _exchange(self, op: ReduceOp, xs: list[Any], outside: list[bool]) -> list[Any]:
        exchanged = iter(self._exchanged(op, [as_value(x) for x, once in zip(xs, outside, strict=True) if not once]))
        return [_same_for_all(x) if once else next(exchanged) for x, once in zip(xs, outside, strict=True)]

    def _exchanged(self, op: ReduceOp, xs: list[Any]) -> list[Any]:
        if not xs:
            return []
        self._check_can_meet("all_reduce", xs)
        handed_in = self.lockstep.handed_in(xs)
        # For tf.gradients, which sees no tape.
        with default_graph().gradient_override_map({"Identity": _GRADIENT_OF[op]}):
            return [self.trace.mark_reduce(op, _as_averaged(x) if op == ReduceOp.MEAN else x) for x in handed_in]

    def _check_can_meet(self, what: str, xs: list[Any]) -> None:
        graph = default_graph()
        if self.trace.can_exchange_in(graph):
            return
        if not self.trace.inside_control_flow(graph):
            raise NeedsInlining
        raise UnsupportedError(
            "Replicas cannot meet inside a tf.while_loop of a replica function: they could go round a different "
            f"number of times. Received: {what} of {len(xs)} tensor(s), the first of shape {xs[0].shape}. "
            f"Allowed: outside of loops, also in a tf.cond. Call {what} after the loop, or put the loop around strategy.run."
        )


_GRADIENT_OF = {op: f"Lockstep{op.value.title()}" for op in ReduceOp}
for _op, _name in _GRADIENT_OF.items():

    @tf.RegisterGradient(_name)
    def _gradient_of_reduced(op: tf.Operation, dy: tf.Tensor, reduce_op: ReduceOp = _op) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce(reduce_op, dy)


def _as_averaged(x: Any) -> Any:
    """Whole numbers as what their mean is: as everywhere in TensorFlow, their quotient is a float64."""
    return tf.cast(x, tf.float64) if isinstance(x, tf.Tensor) and x.dtype.is_integer else x


def _same_for_all(x: Any) -> Any:
    """A value from outside of the trace, as one of the trace."""
    return nest.map_structure(tf.identity, x, expand_composites=True)


class TracedReplica(Replica):
    """The replica that stands for all N in a trace."""

    def __init__(self, trace: Trace):
        super().__init__(trace.replicas)
        self._trace = trace

    @property
    def _fraction_of_slice(self) -> Any:
        return self._trace.visible(self._trace.fraction) if self._trace.weighted else 1.0 / self.replicas

    @property
    def active(self) -> Any | None:
        return self._trace.visible(self._trace.active) if self._trace.weighted else None

    def record_write(self, variable: Any, added: bool = False) -> None:
        _record(self._trace.written, variable, added)

    def own(self, x: tf.Tensor, otherwise: Callable[[], tf.Tensor] | None = None) -> tf.Tensor:
        if otherwise is None:
            return self.handed_in([x])[0]
        active = self.active
        if active is None or not self._trace.origins.is_from_batch(x):
            return x
        return tf.where(active, x, otherwise())

    def own_rows(self, x: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """``x``; without examples, nothing along ``axis`` (of a size, 0) of what was computed from a borrowed row."""
        active = self.active
        if active is None or not self._trace.origins.is_from_batch(x):
            return x
        # As many sizes as replicas may be counted on; a mean over no rows is none.
        is_size = x.dtype.is_integer and x.shape.rank is not None and x.shape[axis] is not None
        return masked([x], active)[0] if is_size else cut(x, active, axis)

    def handed_in(self, xs: list[Any]) -> list[Any]:
        """``xs`` as others get them: a replica without examples adds nothing that was computed from its borrowed row."""
        active, origins = self.active, self._trace.origins
        if active is None:
            return xs
        kept, parts, rebuild = list(xs), [], {}
        for i, x in enumerate(xs):
            if not isinstance(x, tf.IndexedSlices):
                found, rebuild[i] = origins.split(x)
                parts.append(found)
            elif any(origins.is_from_batch(part) for part in (x.values, x.indices)):
                kept[i] = cut_rows(x, active)
        zeroed = iter(masked([part for found in parts for part in found], active))
        for (i, make), found in zip(rebuild.items(), parts, strict=True):
            kept[i] = make([next(zeroed) for _ in found])
        return kept


def current() -> Replica | None:
    """The lockstep replica that is being run or traced in this thread; None in cross-replica context or elsewhere."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return None
    replica = getattr(context, "lockstep", None)
    if replica is None:
        extended = getattr(context.strategy, "extended", None)
        make = getattr(extended, "thread_replica", None)
        if make is None:
            return None
        replica = context.lockstep = make(context._replica_id)
    return replica


def sum_over_replicas(values: list[Any]) -> list[Any]:
    """The sum of each of ``values`` over all replicas, called in one of them."""
    return tf.distribute.get_replica_context().all_reduce(ReduceOp.SUM, values)
