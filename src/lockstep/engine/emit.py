"""Places the stages of a trace on N devices, with the exchanges between them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lockstep.engine import optimize
from lockstep.engine.marks import Mark, Region
from lockstep.engine.stages import Stage, call_types, cut
from lockstep.engine.tf_private import (
    AttrValue,
    NameAttrList,
    default_graph,
    mark_read_only_inputs,
    nest,
    select_replica,
)
from lockstep.engine.trace import Trace, is_graph_output
from lockstep.engine.variables import variable_of
from lockstep.engine.weights import Weights

_NOT_ONE_WAY = (
    "lockstep: replicas meet in a tf.cond (an all_reduce or an optimizer's apply is in it), so all of them must choose the "
    "same branch. Make the condition of something that is equal on all replicas, such as optimizer.iterations, or all-reduce "
    "it first. The replicas chose:"
)

# Name of a tensor in the trace -> one replica's tensor in the step.
Bindings = dict[str, tf.Tensor]


def emit(extended: Any, trace: Trace, arguments: Any, weights: Weights | None, xla: bool) -> list[Any]:
    """Adds the whole step to the current graph.

    Args:
      extended: the strategy's engine.
      trace: the replica function, traced once.
      arguments: (args, kwargs) with per-replica leaves.
      weights: the slices' weights; None where all are equal.
      xla: whether to compile the stages.

    Returns:
      Per replica, what the replica function returns there.
    """
    stages = cut(trace.region, extended.devices, xla)
    # The runtime keeps functions alive only as long as the graphs that own them.
    default_graph()._lockstep_traces = [*getattr(default_graph(), "_lockstep_traces", []), (trace, stages)]

    def place() -> list[Any]:
        bindings = [_bind(extended, trace, arguments, weights, r) for r in range(extended.replicas)]
        _place(extended, stages, bindings, xla)
        return [_results(trace, bound, device) for bound, device in zip(bindings, extended.devices, strict=True)]

    return optimize.once(place) if all(stage.all_optimized for stage in stages) else place()


def _place(extended: Any, stages: list[Stage], bindings: list[Bindings], xla: bool) -> None:
    """Adds ``stages`` on all replicas, with the exchanges between them, and binds what they give."""
    before: list[tf.Operation] = []
    for stage in stages:
        if not stage.does_nothing:
            calls = [_call(extended, stage, bindings[r], r, before, xla) for r in range(len(bindings))]
            # Nobody goes on before all are here: where one replica fails, none of the others has updated anything.
            with tf.control_dependencies(calls):
                before = [tf.no_op(name="all_replicas")]
        done = _exchange(extended, stage.marks, bindings)
        done += [_branch(extended, m, stage.branches[m.op], bindings, before, xla) for m in stage.marks if m.branches]
        before = [*before, *done]


def _branch(
    extended: Any, mark: Mark, branches: list[list[Stage]], bindings: list[Bindings], before: list[tf.Operation], xla: bool
) -> tf.Operation:
    """All replicas go through the branch that replica 0 chooses, after checking that the others choose the same."""
    choices = tf.stack([bound[mark.inputs[0].name] for bound in bindings])

    def through(region: Region, stages: list[Stage]) -> Any:
        taken = zip(region.inputs, mark.inputs[1:], strict=True)
        names = [(inner.name, outer.name) for inner, outer in taken]
        inside = [{inner: bound[outer] for inner, outer in names} for bound in bindings]
        _place(extended, stages, inside, xla)
        return [tf.constant(True), [[bound[o.name] for o in region.outputs] for bound in inside]]

    with tf.control_dependencies([*before, tf.debugging.Assert(tf.reduce_all(choices == choices[0]), [_NOT_ONE_WAY, choices])]):
        choice = tf.identity(choices[0])
    ways = [functools.partial(through, region, stages) for region, stages in zip(mark.branches, branches, strict=True)]
    done, results = tf.cond(choice, *ways)
    for bound, values in zip(bindings, results, strict=True):
        for output, value in zip(mark.outputs, values, strict=True):
            value.set_shape(output.shape)
            bound[output.name] = value
    return done.op


def _bind(extended: Any, trace: Trace, arguments: Any, weights: Weights | None, replica: int) -> Bindings:
    """The replica's own inputs: its id, weight, arguments and variables."""
    graph, device = default_graph(), extended.devices[replica]
    with tf.device(device):
        bound = {trace.replica_id.name: tf.constant(replica)}
    bound[trace.fraction.name] = weights.fractions[replica] if weights else tf.constant(1.0 / extended.replicas)
    bound[trace.active.name] = weights.active[replica] if weights else tf.constant(True)
    flat = nest.flatten(select_replica(replica, arguments), expand_composites=True)
    for position, placeholder in trace.arguments:
        bound[placeholder.name] = flat[position]
    for position, placeholder in trace.repeated:
        own = bound[trace.replica_id.name] if position is None else flat[position]
        bound[placeholder.name] = _own_or_first(trace, arguments, weights, own, position, replica)
    for outer, inner in trace.graph.captures:
        variable = variable_of(outer)
        handle = outer if variable is None else variable.values[replica].handle
        bound[inner.name] = graph.capture(handle)
    return bound


def _own_or_first(
    trace: Trace, arguments: Any, weights: Weights | None, own: tf.Tensor, position: int | None, replica: int
) -> tf.Tensor:
    """A replica's own id or argument; replica 0's, where it has no example (see `repeats`)."""
    if replica == 0 or weights is None:
        return own
    flat = nest.flatten(select_replica(0, arguments), expand_composites=True)
    first = tf.zeros_like(own) if position is None else flat[position]
    return tf.cond(weights.active[replica], lambda: own, lambda: first)


def _call(extended: Any, stage: Stage, bound: Bindings, replica: int, before: list[tf.Operation], xla: bool) -> tf.Operation:
    """Calls the stage on one replica's device and binds what it gives."""
    graph, function = stage.for_replica(replica)
    default_graph()._add_function_recursive(function)
    with tf.device(extended.devices[replica]), tf.control_dependencies(before):
        op = default_graph().create_op(
            "StatefulPartitionedCall",
            [tf.convert_to_tensor(bound[name]) for name in stage.inputs],
            stage.dtypes,
            name=f"replica_{replica}",
            attrs=_call_attributes(function, stage, xla),
        )
    mark_read_only_inputs(op, graph)
    for name, tensor, inner in zip(stage.outputs, op.outputs, graph.outputs, strict=True):
        tensor.set_shape(inner.shape)
        bound[name] = tensor
    return op


def _call_attributes(function: Any, stage: Stage, xla: bool) -> dict[str, Any]:
    attributes = {
        **call_types(stage.graphs[0]),
        "f": AttrValue(func=NameAttrList(name=function.name)),
        "config_proto": AttrValue(s=optimize.call_config(stage.is_optimized)),
    }
    if xla or stage.is_inlined:
        attributes["_XlaMustCompile" if xla else "_lower_as_multi_device_function"] = AttrValue(b=True)
    return attributes


def _exchange(extended: Any, marks: Sequence[Mark], bindings: list[Bindings]) -> list[tf.Operation]:
    """Binds the outputs of ``marks`` on all replicas; returns the checks that the next stage must wait for."""
    reduced = [m for m in marks if m.kind in ("sum", "mean")]
    if reduced:
        tensors = [[bound[m.inputs[0].name] for bound in bindings] for m in reduced]
        sums = extended.exchange.reduce(tensors, [m.kind == "mean" for m in reduced])
        for mark, total in zip(reduced, sums, strict=True):
            _bind_all(mark, [total], bindings)
    joined = [m for m in marks if m.kind == "join"]
    shards = [[bound[m.inputs[0].name] for bound in bindings] for m in joined]
    for mark, whole in zip(joined, extended.exchange.join(shards, [m.layout for m in joined]), strict=True):
        _bind_all(mark, [whole], bindings)
    checks = []
    for position, mark in enumerate(marks):
        values = [[bound[x.name] for x in mark.inputs] for bound in bindings]
        if mark.kind == "first":
            _bind_all(mark, values[0], bindings)
        elif mark.kind == "scatter":
            for bound, shard in zip(bindings, extended.exchange.scatter([v[0] for v in values], mark.layout), strict=True):
                bound[mark.outputs[0].name] = shard
        elif mark.kind == "rows":
            _bind_all(mark, extended.exchange.join_rows(values, mark.mean, position), bindings)
        elif mark.kind == "gather":
            _bind_all(mark, [extended.exchange.gather([v[0] for v in values], mark.axis, position)], bindings)
        elif mark.kind == "check":
            checks.append(assert_all([v[0] for v in values], mark.message, values[0][1:]))
            _bind_all(mark, values[0][:1], bindings)
    return checks


def _bind_all(mark: Mark, values: Sequence[tf.Tensor], bindings: list[Bindings]) -> None:
    for output, value in zip(mark.outputs, values, strict=True):
        for bound in bindings:
            bound[output.name] = value


def assert_all(flags: list[tf.Tensor], message: str, step: list[tf.Tensor]) -> tf.Operation:
    """An op (in eager mode, a check at once) that fails, naming the first replica, unless every flag is True.

    Args:
      flags: a bool scalar of each replica.
      message: what to say.
      step: the number of updates made so far (int64 scalar), or nothing.
    """
    stacked = tf.stack(flags)
    replica = tf.argmin(tf.cast(stacked, tf.int32))
    return tf.debugging.Assert(tf.reduce_all(stacked), [message, "replica", replica, *(x for s in step for x in ("step", s))])


def _results(trace: Trace, bound: Bindings, device: str) -> Any:
    exchanged = {name for mark in trace.marks_in[trace.graph] for name in mark.ops}

    def result(output: Any) -> Any:
        if not is_graph_output(output):
            return output
        value = bound[output.name]
        if output.op.name not in exchanged:
            return value
        # What all replicas got from an exchange may be one tensor, and yet it is a value of each.
        with tf.device(device):
            return tf.identity(value)

    return nest.pack_sequence_as(trace.outputs, [result(o) for o in trace.flat_outputs], expand_composites=True)
