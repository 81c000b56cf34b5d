"""Cuts a traced replica function at its marks into stages, each one graph function shared by all replicas.

Stage 0 needs nothing from other replicas; stage k + 1 starts from what the exchange after stage k gives back. A plain
training step has two: forward and backward up to the gradients, then the update.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from lockstep.engine import optimize, seeds
from lockstep.engine.marks import Mark, Region
from lockstep.engine.tf_private import (
    AttrValue,
    FuncGraph,
    GraphDef,
    copy_handle_data,
    function_from_graph,
    labelled_copy,
)

_function_ids = itertools.count()
READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "Identity", "NoOp"})
# Ops that raise no error whatever the numbers are; their shapes have been checked while tracing.
_NEVER_FAIL = (
    "Abs Add AddN AddV2 All Any AssignAddVariableOp AssignSubVariableOp AssignVariableOp BatchMatMulV2 BroadcastTo "
    "Cast Const DivNoNan Equal Exp ExpandDims Fill FloorMod Greater GreaterEqual Identity IdentityN IsFinite L2Loss "
    "Less LessEqual Log LogicalAnd LogicalNot LogicalOr MatMul Max Maximum Mean Min Minimum Mul MulNoNan Neg NoOp "
    "NotEqual OnesLike Placeholder Pow Prod ReadVariableOp RealDiv Reshape Rsqrt Select SelectV2 Shape Sign "
    "Softplus Sqrt Square SquaredDifference Squeeze Sub Sum Tanh Transpose VariableShape ZerosLike"
)


def _can_fail(op: tf.Operation) -> bool:
    """Whether running ``op`` can raise an error."""
    if op.type == "EnsureShape":
        return not op.inputs[0].shape.is_fully_defined()
    return op.type not in _NEVER_FAIL.split()


def _is_plain_read(op: tf.Operation) -> bool:
    """Whether ``op`` reads a variable, not inside a branch or loop (whose results wait for what is read in them)."""
    reads = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
    return op.type in reads and op.inputs[0].op.type == "Placeholder"


@dataclass
class Stage:
    """One graph function and how it connects to the rest of the step.

    Attributes:
      inputs: names of the trace's tensors that it takes, in order.
      outputs: names of the trace's tensors that it gives, in order.
      dtypes: the outputs' dtypes.
      graphs: the function's graph; one per replica where seeded random ops must differ, else one for all.
      functions: the graph functions; one per replica there and in inlined stages, so that an error names its replica.
      is_optimized: whether the graph optimizer has seen the graphs already.
      is_inlined: whether the runtime is to take the calls apart. A call left whole starts sooner, but an error in it would
        cancel what other devices wait for before it is reported, and the user would see "RecvAsync is cancelled" instead.
        So only stages in which nothing can go wrong are called whole, which is what most optimizers' updates are.
      does_nothing: whether it has neither outputs nor side effects.
      marks: the exchange that follows the stage.
      branches: of each "cond" among the marks, by its op, the stages of both branches.
    """

    inputs: list[str]
    outputs: list[str]
    dtypes: list[tf.DType]
    graphs: list[Any]
    functions: list[Any]
    is_optimized: bool
    is_inlined: bool
    does_nothing: bool
    marks: list[Mark] = field(default_factory=list)
    branches: dict[str, list[list[Stage]]] = field(default_factory=dict)

    @property
    def all_optimized(self) -> bool:
        """Whether the graph optimizer has seen this stage, and those of the branches that follow."""
        inside = [stage for stages in self.branches.values() for stage in itertools.chain.from_iterable(stages)]
        return self.is_optimized and all(stage.all_optimized for stage in inside)

    def for_replica(self, replica: int) -> tuple[Any, Any]:
        """(graph, function) that replica runs."""
        return self.graphs[replica % len(self.graphs)], self.functions[replica % len(self.functions)]


def cut(region: Region, devices: tuple[str, ...], xla: bool) -> list[Stage]:
    """The stages of ``region``, in order; the last has no marks after it.

    Args:
      region: of a complete trace.
      devices: the replicas' devices; on CPU devices the functions are optimized here, once for all replicas.
      xla: whether the stages will be compiled by XLA, which does its own optimizing.
    """
    return _Cutter(region, devices, xla).cut()


def _used(placeholders: dict[str, tf.Tensor], graph_def: Any) -> dict[str, tf.Tensor]:
    """The placeholders that some node of ``graph_def`` still takes (the optimizer may have found that it need not)."""
    taken = {source if ":" in source else f"{source}:0" for node in graph_def.node for source in node.input}
    return {name: placeholder for name, placeholder in placeholders.items() if name in taken}


def _in_order(ops: list[tf.Operation], producers: Callable[[tf.Operation], list[tf.Operation]]) -> list[tf.Operation]:
    """``ops`` with every op after those it waits for (control dependencies may point to ops created later)."""
    waiting: dict[str, int] = {}
    consumers: dict[str, list[tf.Operation]] = defaultdict(list)
    for op in ops:
        waits_for = producers(op)
        waiting[op.name] = len(waits_for)
        for producer in waits_for:
            consumers[producer.name].append(op)
    ordered = [op for op in ops if not waiting[op.name]]
    for op in ordered:  # grows while it is walked
        for consumer in consumers[op.name]:
            waiting[consumer.name] -= 1
            if not waiting[consumer.name]:
                ordered.append(consumer)
    assert len(ordered) == len(ops), "a traced function is a graph without cycles"
    return ordered


class _Cutter:
    def __init__(self, region: Region, devices: tuple[str, ...], xla: bool):
        self._region, self._devices, self._xla = region, devices, xla
        # Automatic control dependencies keep every stateful op, reads included; a read matters only to who uses it.
        self._mark_of = {name: mark for mark in region.marks for name in mark.ops}
        self._must_run = [op for op in region.must_run if op.type not in READS and op.name not in self._mark_of]
        self._inputs = {t.op.name for t in region.inputs}
        self._ops = _in_order(region.graph.get_operations(), self._producers)
        self._graph_def = region.graph.as_graph_def()
        self._nodes = {node.name: node for node in self._graph_def.node}

    def _producers(self, op: tf.Operation) -> list[tf.Operation]:
        """The ops that must come before ``op``; each output of a mark waits for all of the mark's inputs."""
        mark = self._mark_of.get(op.name)
        inputs = mark.inputs if mark is not None else op.inputs
        return [*(t.op for t in inputs), *op.control_inputs]

    def cut(self) -> list[Stage]:
        stage_of, count = self._assign()
        members: list[list[tf.Operation]] = [[] for _ in range(count)]
        for op in self._ops:
            if op.name not in self._inputs and op.name not in self._mark_of:
                members[stage_of[op.name]].append(op)
        needed, given = self._boundaries(members, stage_of)
        stages = [self._build(members[k], needed[k], given[k]) for k in range(count)]
        for mark in self._region.marks:
            stage = stages[min(stage_of[name] for name in mark.ops) - 1]
            stage.marks.append(mark)
            if mark.branches:
                stage.branches[mark.op] = [cut(branch, self._devices, self._xla) for branch in mark.branches]
        return stages

    def _assign(self) -> tuple[dict[str, int], int]:
        """The stage of every op: as early as its inputs allow, then as late as its consumers allow.

        Late matters: a variable that only the update reads must not be read before the exchange, or its buffer would be
        shared while it is written and TensorFlow would copy it.
        """
        early: dict[str, int] = {}
        for op in self._ops:
            stage = max((early[producer.name] for producer in self._producers(op)), default=0)
            early[op.name] = stage + (op.name in self._mark_of)
        late = self._sink(early)
        return late, max(late.values(), default=0) + 1

    def _sink(self, early: dict[str, int]) -> dict[str, int]:
        pinned = {op.name for op in self._must_run}
        pinned |= {o.op.name for o in self._region.outputs}
        pinned |= {x.op.name for mark in self._region.marks for x in mark.inputs}
        pinned |= set(self._mark_of) | self._inputs
        late = dict(early)
        consumers: dict[str, list[str]] = defaultdict(list)
        for op in self._ops:
            for producer in self._producers(op):
                consumers[producer.name].append(op.name)
        for op in reversed(self._ops):
            if op.name in pinned or not consumers[op.name]:
                continue
            # A mark's output belongs to the stage after its inputs, so what feeds one must stay a stage earlier.
            late[op.name] = max(early[op.name], min(late[c] - (c in self._mark_of) for c in consumers[op.name]))
        return late

    def _boundaries(
        self, members: list[list[tf.Operation]], stage_of: dict[str, int]
    ) -> tuple[list[dict[str, tf.Tensor]], list[dict[str, tf.Tensor]]]:
        """Per stage: the tensors it takes from outside or from earlier stages, and those it hands on."""
        needed: list[dict[str, tf.Tensor]] = [{} for _ in members]
        given: list[dict[str, tf.Tensor]] = [{} for _ in members]
        outside = self._inputs | set(self._mark_of)
        for k, ops in enumerate(members):
            for tensor in itertools.chain.from_iterable(op.inputs for op in ops):
                producer = tensor.op.name
                if producer in outside:
                    needed[k][tensor.name] = tensor
                elif stage_of[producer] < k and tensor.op.type != "Const":
                    needed[k][tensor.name] = tensor
                    given[stage_of[producer]][tensor.name] = tensor
        for tensor in [*self._region.outputs, *(x for mark in self._region.marks for x in mark.inputs)]:
            if tensor.op.name not in outside:
                given[stage_of[tensor.op.name]][tensor.name] = tensor
        return needed, given

    def _build(self, ops: list[tf.Operation], needed: dict[str, tf.Tensor], given: dict[str, tf.Tensor]) -> Stage:
        names = {op.name for op in ops}
        # Constants are repeated in each stage that uses them instead of being handed on.
        constants = {t.op.name for op in ops for t in op.inputs if t.op.type == "Const"} - names
        graph_def = GraphDef(versions=self._graph_def.versions, library=self._graph_def.library)
        kept = names | constants
        for name in [*constants, *(op.name for op in ops)]:
            node = graph_def.node.add()
            node.CopyFrom(self._nodes[name])
            inputs = [i for i in node.input if not (i.startswith("^") and (i[1:] not in kept or name in constants))]
            del node.input[:]
            node.input.extend(inputs)
            # All of a stage runs on one device, so what stood beside a node of another stage may stand where it is.
            optimize.drop_colocation(node, lambda other: other not in kept)
        must_run = [op.name for op in self._must_run if op.name in names]
        variants = range(len(self._devices)) if seeds.has_seeded_ops(graph_def) else [0]
        built = [self._graph(seeds.for_replica(graph_def, r), needed, list(given), must_run) for r in variants]
        graphs = [graph for graph, _ in built]
        is_optimized = all(optimized for _, optimized in built)
        is_inlined = not is_optimized or any(_can_fail(op) for graph in graphs for op in graph.get_operations())
        attributes = {} if is_inlined else {"_noinline": True}
        functions = [function_from_graph(f"__lockstep_{next(_function_ids)}", g, attributes) for g in graphs]
        if is_inlined:
            replicas = range(len(self._devices))
            functions = [labelled_copy(functions[r % len(functions)], f"replica_{r}") for r in replicas]
        dtypes = [t.dtype for t in given.values()]
        does_nothing = not given and not must_run
        return Stage(list(needed), list(given), dtypes, graphs, functions, is_optimized, is_inlined, does_nothing)

    def _graph(self, graph_def: Any, needed: dict[str, tf.Tensor], outputs: list[str], must_run: list[str]) -> tuple[Any, bool]:
        """A FuncGraph of ``graph_def`` from ``needed`` to ``outputs``, and whether it is optimized."""
        if not self._xla and optimize.worthwhile(self._devices) and (outputs or must_run):
            optimized = optimize.optimized(graph_def, needed, outputs, must_run, self._devices[0])
            # Where outputs that we asked for are gone, the stage stays as traced, and the runtime optimizes it on each device.
            with contextlib.suppress(ValueError):
                return _function_graph(optimized, needed, outputs, must_run), True
        return _function_graph(graph_def, needed, outputs, must_run), False


def call_types(graph: Any) -> dict[str, Any]:
    """The attributes of an op that calls ``graph`` which say what it takes and gives."""

    def types(tensors: list[tf.Tensor]) -> Any:
        return AttrValue(list=AttrValue.ListValue(type=[t.dtype.as_datatype_enum for t in tensors]))

    return {"Tin": types(graph.inputs), "Tout": types(graph.outputs)}


def _function_graph(graph_def: Any, needed: dict[str, tf.Tensor], outputs: list[str], must_run: list[str]) -> Any:
    """A FuncGraph that holds ``graph_def``."""
    graph = FuncGraph("lockstep_stage")
    with graph.as_default():
        placeholders = {}
        for name, tensor in needed.items():
            placeholder = tf.raw_ops.Placeholder(dtype=tensor.dtype, shape=tensor.shape)
            if tensor.dtype in (tf.resource, tf.variant):
                copy_handle_data(tensor, placeholder)
            placeholders[name] = placeholder
        elements = tf.graph_util.import_graph_def(
            graph_def, input_map=_used(placeholders, graph_def), return_elements=[*outputs, *must_run], name=""
        )
        graph.inputs = list(placeholders.values())
        graph.outputs = list(elements[: len(outputs)])
        graph.structured_outputs = graph.outputs
        # Who waits for an inlined stage waits for its control outputs: a write in a later stage must not overtake a read.
        graph.control_outputs = [*elements[len(outputs) :], *(op for op in graph.get_operations() if _is_plain_read(op))]
    return graph
