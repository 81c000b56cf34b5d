"""Traces a replica function once, for all replicas.

The trace is a graph in which whatever differs between replicas is an input: the arguments, the replica id, the slice's
weight, and (by way of captures) the handles of the replica's own variables. Where replicas exchange values the graph
holds a *mark*: an input side that a replica hands in and an output side that it gets back. `stages` cuts the graph at
the marks.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from lockstep.engine import feed, repeats, xla
from lockstep.engine.context import FallBack, NeedsInlining, TracedContext, Written
from lockstep.engine.marks import Mark, Region
from lockstep.engine.nested import Inlining
from lockstep.engine.origins import Origins
from lockstep.engine.shards import ShardLayout
from lockstep.engine.tf_private import (
    BranchGraph,
    CompositeTensor,
    ControlDependencies,
    ControlFlowGraph,
    DistributedVariable,
    FuncGraph,
    ReduceOp,
    converted,
    copy_handle_data,
    default_graph,
    is_mirrored,
    nest,
    select_replica,
)
from lockstep.engine.variables import variable_of


@dataclass
class Trace:
    """One traced replica function."""

    graph: Any
    replicas: int
    weighted: bool
    inline: bool
    # Whether a function is being traced that is called in this trace only.
    in_own_function: bool = False
    replica_id: Any = None
    fraction: Any = None
    active: Any = None
    arguments: list[tuple[int, tf.Tensor]] = field(default_factory=list)
    # Names of the arguments that belong to the slice, and of those that are one value for all replicas.
    batch: set[str] = field(default_factory=set)
    common: set[str] = field(default_factory=set)
    # See `repeats`: the position of an argument, or None for the replica's id, and the placeholder.
    repeated: list[tuple[int | None, tf.Tensor]] = field(default_factory=list)
    marks_in: dict[Any, list[Mark]] = field(default_factory=lambda: defaultdict(list))
    written: Written = field(default_factory=dict)
    outputs: Any = None
    flat_outputs: list[Any] = field(default_factory=list)
    must_run: list[tf.Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origins = Origins(self)

    def visible(self, placeholder: tf.Tensor) -> tf.Tensor:
        """``placeholder`` for use in the current graph; signals where it cannot be used there."""
        graph = default_graph()
        if self.belongs(graph):
            return placeholder
        raise NeedsInlining if isinstance(graph, FuncGraph) and not self.inline else FallBack

    def belongs(self, graph: Any) -> bool:
        """Whether ``graph`` is part of this trace alone, and not of a nested tf.function that another trace may call too."""
        return self._is_within(graph, lambda g: self.in_own_function or isinstance(g, ControlFlowGraph))

    def inside_control_flow(self, graph: Any) -> bool:
        """Whether ``graph`` is a cond branch or loop body of the traced function (not of a nested tf.function)."""
        return self._is_within(graph, lambda g: isinstance(g, ControlFlowGraph))

    def can_exchange_in(self, graph: Any) -> bool:
        """Whether replicas can meet in ``graph``: the traced function itself, or a tf.cond's branch (but no loop) in it."""
        return self._is_within(graph, lambda g: isinstance(g, BranchGraph))

    def holds(self, graph: Any) -> bool:
        """Whether ``graph`` is the traced function's, or inside of it, in whatever way."""
        return self._is_within(graph, lambda g: True)

    def _is_within(self, graph: Any, may_be_between: Callable[[Any], bool]) -> bool:
        """Whether ``graph`` is the traced function's, or inside of it with only such graphs between."""
        while graph is not self.graph:
            if graph is None or not may_be_between(graph):
                return False
            graph = getattr(graph, "outer_graph", None)
        return True

    @property
    def region(self) -> Region:
        """The whole function."""
        captured = [inner for _, inner in self.graph.captures]
        own = [self.replica_id, self.fraction, self.active, *(p for _, p in [*self.arguments, *self.repeated]), *captured]
        outputs = [o for o in self.flat_outputs if is_graph_output(o)]
        return Region(self.graph, own, outputs, self.must_run, self.marks_within(self.graph))

    def marks_within(self, graph: Any) -> list[Mark]:
        """The marks of ``graph``; a tf.cond with marks in its branches is one as well."""
        marks = list(self.marks_in[graph])
        for op in graph.get_operations():
            if op.type not in ("If", "StatelessIf") or not hasattr(op, "_true_graph"):
                continue  # computed again (`origins.Again`), so that there are no marks in it
            inside = [(branch, self.marks_within(branch)) for branch in (op._true_graph, op._false_graph)]
            if any(found for _, found in inside):
                branches = [Region(b, b.inputs, b.outputs, b.control_outputs, found) for b, found in inside]
                marks.append(Mark("cond", tuple(op.inputs), tuple(op.outputs), op=op.name, branches=tuple(branches)))
        return marks

    def mark_reduce(self, op: ReduceOp, x: Any) -> Any:
        mean = op == ReduceOp.MEAN
        if isinstance(x, tf.IndexedSlices):
            return self._mark_rows("rows", x, mean)
        return self._mark_same_shape("mean" if mean else "sum", tf.convert_to_tensor(x))

    def mark_first(self, x: Any) -> Any:
        if isinstance(x, tf.IndexedSlices):
            return self._mark_rows("first", x)
        return self._mark_same_shape("first", tf.convert_to_tensor(x))

    def mark_gather(self, x: tf.Tensor, axis: int) -> tf.Tensor:
        with self._cut():
            x = _here(x)
            whole = _open(x, [None] * x.shape.rank if x.shape.rank is not None else None)
        self._add(Mark("gather", (x,), (whole,), axis=axis))
        return whole

    def mark_scatter(self, x: tf.Tensor, layout: ShardLayout) -> tf.Tensor:
        """The replica's shard of the sum of ``x`` over replicas: shape ``[layout.length]``."""
        return self._mark_shards("scatter", x, layout, [layout.length])

    def mark_join(self, shard: tf.Tensor, layout: ShardLayout) -> tf.Tensor:
        """The whole tensor of which each replica hands in its ``shard``."""
        return self._mark_shards("join", shard, layout, layout.shape)

    def _mark_shards(self, kind: str, x: tf.Tensor, layout: ShardLayout, shape: Sequence[int]) -> tf.Tensor:
        """A mark that gives back a tensor of another ``shape``."""
        with self._cut():
            x = _here(x)
            y = tf.raw_ops.Placeholder(dtype=x.dtype, shape=shape, name="exchanged")
        self._add(Mark(kind, (x,), (y,), layout=layout))
        return y

    def mark_check(self, right: tf.Tensor, message: str, step: tf.Tensor | None = None) -> tf.Tensor:
        """Stops the step with ``message`` unless ``right`` holds on every replica; what waits for the result runs after."""
        return self._mark_same_shape("check", right, *([] if step is None else [step]), message=message)

    def _mark_same_shape(self, kind: str, x: tf.Tensor, *more: tf.Tensor, message: str = "") -> tf.Tensor:
        """A mark that gives back a tensor like ``x``; ``more`` is handed in beside it."""
        with self._cut():
            x = _here(x)
            y = tf.identity(x, name="exchanged")
        self._add(Mark(kind, (x, *(_here(other) for other in more)), (y,), message=message))
        return y

    def _mark_rows(self, kind: str, x: tf.IndexedSlices, mean: bool = False) -> tf.IndexedSlices:
        """A mark that gives back other rows for a replica's own: as many as the exchange makes of them."""
        with self._cut():
            own_values, own_indices = _here(x.values), _here(x.indices)
            values = _open(own_values, [None, *x.values.shape[1:].as_list()])
            indices = _open(own_indices, [None])
        self._add(Mark(kind, (own_values, own_indices), (values, indices), mean=mean))
        return tf.IndexedSlices(values, indices, x.dense_shape)

    def _add(self, mark: Mark) -> None:
        self.marks_in[default_graph()].append(mark)

    @contextlib.contextmanager
    def _cut(self) -> Iterator[None]:
        """Where a mark's outputs are made: in the traced graph itself, on no device, waiting for nothing but the inputs."""
        if not self.can_exchange_in(default_graph()):
            raise NeedsInlining
        with tf.device(None), tf.control_dependencies(None):
            yield


def _here(x: tf.Tensor) -> tf.Tensor:
    """``x`` as a tensor of the current graph, which may be a branch that takes it from outside."""
    return default_graph().capture(x)


def _open(x: tf.Tensor, shape: Any) -> tf.Tensor:
    return tf.raw_ops.PlaceholderWithDefault(input=x, shape=tf.TensorShape(shape))


def is_graph_output(value: Any) -> bool:
    """Whether an output leaf of a replica function is a tensor (not a variable, which is returned as it is)."""
    return tf.is_tensor(value) and not isinstance(value, (tf.Variable, DistributedVariable))


def trace_replica(
    strategy: Any,
    fn: Callable,
    args: Any,
    kwargs: Any,
    replicas: int,
    weighted: bool,
    compiled: bool,
    finish: Callable[[Any], None],
) -> Trace:
    """Traces ``fn`` with replica 0's arguments standing for everybody's.

    Args:
      strategy: the strategy whose replica context the function sees.
      fn, args, kwargs: the replica function and its arguments (leaves may be per-replica values).
      replicas: N.
      weighted: whether the slices' sizes may differ, so that fractions are inputs.
      compiled: whether XLA will compile all of it.
      finish: called at the end of the trace, in the replica context, to make written state equal on all replicas.

    Raises:
      FallBack: the function cannot be traced once.
    """
    # AutoGraph decides by the context of the call, so conversion happens out here and not in the new graph.
    fn = xla.built_for(converted(fn)) if compiled else converted(fn)
    with contextlib.suppress(NeedsInlining):
        return _Tracer(strategy, replicas, weighted, None, finish).trace(fn, args, kwargs)
    inlining = Inlining(compiled)
    while True:
        known = len(inlining.opened)
        try:
            trace = _Tracer(strategy, replicas, weighted, inlining, finish).trace(fn, args, kwargs)
        except NeedsInlining:
            if len(inlining.opened) == known:
                raise FallBack from None
        else:
            xla.warn_opened(strategy.extended, inlining.opened)
            return trace


class _Tracer:
    def __init__(self, strategy: Any, replicas: int, weighted: bool, inlining: Inlining | None, finish: Callable[[Any], None]):
        self._strategy, self._finish, self._inlining = strategy, finish, inlining
        self._trace = Trace(FuncGraph("lockstep_replica", collections={}), replicas, weighted, inlining is not None)

    def trace(self, fn: Callable, args: Any, kwargs: Any) -> Trace:
        trace = self._trace
        structure, leaves = _merged_leaves(args, kwargs, trace.replicas)
        batch = _batch_positions((args, kwargs))
        with trace.graph.as_default(), ControlDependencies() as control, tf.device(None):
            self._add_inputs()
            flat = [self._argument(j, values, j in batch) for j, values in enumerate(leaves)]
            args, kwargs = nest.pack_sequence_as(structure, flat, expand_composites=True)
            inlined = self._inlining.within(trace) if self._inlining else contextlib.nullcontext()
            with TracedContext(self._strategy, trace), inlined:
                trace.outputs = nest.map_structure(_read, fn(*args, **kwargs))
                self._finish(trace)
                if trace.weighted:
                    repeats.repeat_first(trace)
            trace.flat_outputs = [self._output(o, control) for o in nest.flatten(trace.outputs, expand_composites=True)]
        trace.must_run = list(control.ops_which_must_run)
        if trace.graph.deferred_external_captures:
            raise FallBack
        return trace

    def _add_inputs(self) -> None:
        trace = self._trace
        trace.replica_id = tf.raw_ops.Placeholder(dtype=tf.int32, shape=[], name="replica_id")
        trace.fraction = tf.raw_ops.Placeholder(dtype=tf.float32, shape=[], name="fraction")
        trace.active = tf.raw_ops.Placeholder(dtype=tf.bool, shape=[], name="active")

    def _argument(self, position: int, values: list[Any], is_batch: bool) -> Any:
        first = values[0]
        if not is_graph_output(first):
            if any(v is not first and not _same(v, first) for v in values[1:]):
                raise FallBack  # Python values that differ between replicas need a trace each.
            return first
        shape = first.shape
        if any(other.dtype != first.dtype for other in values[1:]):
            raise FallBack
        for other in values[1:]:
            shape = shape.most_specific_compatible_shape(other.shape)
        placeholder = tf.raw_ops.Placeholder(dtype=first.dtype, shape=shape)
        if first.dtype in (tf.resource, tf.variant):
            copy_handle_data(first, placeholder)
        self._trace.arguments.append((position, placeholder))
        if is_batch:
            self._trace.batch.add(placeholder.name)
        elif all(other is first for other in values):
            self._trace.common.add(placeholder.name)
        return placeholder

    def _output(self, value: Any, control: Any) -> Any:
        if isinstance(value, tf.Operation) or not is_graph_output(value):
            return None if isinstance(value, tf.Operation) else value
        return control.mark_as_return(self._trace.graph.capture(value))


def _merged_leaves(args: Any, kwargs: Any, replicas: int) -> tuple[Any, list[list[Any]]]:
    """The structure of replica 0's arguments and, for each leaf, the values of all replicas."""
    selected = [select_replica(r, (tuple(args), dict(kwargs))) for r in range(replicas)]
    try:
        for other in selected[1:]:
            nest.assert_same_structure(selected[0], other, expand_composites=True)
    except (ValueError, TypeError):
        raise FallBack from None
    flat = [nest.flatten(s, expand_composites=True) for s in selected]
    structure = nest.map_structure(_common_type, *selected)
    return structure, [list(leaf) for leaf in zip(*flat, strict=True)]


def _batch_positions(arguments: Any) -> set[int]:
    """The positions of the tensors that belong to the batch among one replica's flat arguments."""
    positions: set[int] = set()
    count = 0
    for leaf in nest.flatten(arguments):
        size = len(nest.flatten(select_replica(0, leaf), expand_composites=True))
        if isinstance(leaf, feed.Slices):
            positions.update(range(count, count + size))
        count += size
    return positions


def _common_type(*leaves: Any) -> Any:
    """A composite leaf's type that fits all replicas (ragged and sparse parts differ in size); else the leaf."""
    first = leaves[0]
    if not isinstance(first, CompositeTensor) or isinstance(first, (tf.Variable, DistributedVariable)):
        return first
    specs = [tf.type_spec_from_value(leaf) for leaf in leaves]
    common = specs[0].most_specific_common_supertype(specs[1:])
    if common is None:
        raise FallBack
    return common


def _read(output: Any) -> Any:
    """A Keras variable that is returned (by a metric's result(), say) is returned as its value, as a tf.function would."""
    if isinstance(output, tf.TensorArray):
        raise FallBack  # Its parts are tensors that only the graph it was made in can read.
    # What a write to a replica-local variable gives back is the replica's own copy.
    owner = variable_of(output.handle) if isinstance(output, tf.Variable) and hasattr(output, "handle") else None
    is_local = owner is not None and output is not owner and not is_mirrored(owner)
    if not is_local and (isinstance(output, (tf.Tensor, CompositeTensor)) or not is_graph_output(output)):
        return output
    return tf.convert_to_tensor(output)


def _same(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except (ValueError, TypeError):
        return False
