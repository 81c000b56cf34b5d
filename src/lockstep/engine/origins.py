"""Which tensors of a trace were computed from the replica's slice of the batch, and which come from outside of it.

A replica without examples computes on a borrowed row, and what it makes of that row must not reach the others: not as a row,
not as a term of a sum, not as state. What does not depend on the batch is as good on that replica as on any other. A trace is
a graph, so the question is answered by looking at what a tensor was computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from lockstep.engine.tf_private import default_graph

if TYPE_CHECKING:
    from lockstep.engine.trace import Trace

# Ops that are linear in inputs: in all of them, in all but the last, in the first. Others must not come from the batch.
_LINEAR: dict[str, slice] = {
    **dict.fromkeys(("AddV2", "AddN", "Sub", "Pack"), slice(None)),
    "ConcatV2": slice(-1),
    **dict.fromkeys(("Neg", "Identity", "Cast", "RealDiv"), slice(1)),
    **dict.fromkeys(("Reshape", "Transpose", "Squeeze", "ExpandDims", "StridedSlice"), slice(1)),
}
# A sum of more terms inside of each other than this is taken whole.
_DEPTH = 32


class Flow:
    """Where in a trace the values of some of its placeholders go, other than by way of an exchange. It follows as that grows.

    Args:
      trace: the trace.
      sources: the names of the placeholders' tensors; may grow until they are used.
    """

    def __init__(self, trace: Trace, sources: set[str]):
        self._trace, self._sources = trace, sources
        # Per graph: its version and the number of its ops when it was last walked, and what was found.
        self._walked: dict[Any, tuple[int, int]] = {}
        self._names: dict[Any, set[str]] = {}

    def reaches(self, x: Any) -> bool:
        """Whether the tensor ``x`` was computed from one of the sources."""
        return not _is_eager(x) and self._trace.holds(x.graph) and x.name in self._reached(x.graph)

    def _reached(self, graph: Any) -> set[str]:
        """The names of the tensors in ``graph`` that are computed from the sources."""
        names = self._names.setdefault(graph, set())
        version, start = self._walked.get(graph, (-1, 0))
        if version < graph.version:
            ops = graph.get_operations()
            self._walked[graph] = graph.version, len(ops)
            exchanged = {name for mark in self._trace.marks_in[graph] for name in mark.ops}
            captured = {inner.name: outer for outer, inner in graph.captures}
            for op in ops[start:]:
                if op.name not in exchanged:
                    names.update(output.name for output in self._outputs_reached(op, graph, names, captured))
        return names

    def _outputs_reached(self, op: tf.Operation, graph: Any, names: set[str], captured: dict[str, Any]) -> list[tf.Tensor]:
        outputs = list(op.outputs)
        if not outputs:
            return []
        if op.type == "Placeholder":
            name = outputs[0].name
            if graph is self._trace.graph:
                return outputs if name in self._sources else []
            # What is not captured is a loop's variable or the argument of a nested function: it may come from anywhere.
            return outputs if name not in captured or self.reaches(captured[name]) else []
        inputs = [x.name in names for x in op.inputs]
        if op.type == "IdentityN":
            return [y for x, y in zip(inputs, outputs, strict=True) if x]
        if hasattr(op, "_true_graph") and not inputs[0]:
            ways = list(zip(op._true_graph.outputs, op._false_graph.outputs, strict=True))
            return [y for y, way in zip(outputs, ways, strict=True) if any(map(self.reaches, way))]
        return outputs if any(inputs) else []


class Origins:
    """What the tensors of one trace come from."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self.is_from_batch = Flow(trace, trace.batch).reaches

    def is_outside(self, x: Any) -> bool:
        """Whether ``x`` is one value for all replicas: made outside of the replica function, and handed to all of them."""
        if isinstance(x, tf.IndexedSlices):
            return self.is_outside(x.values) and self.is_outside(x.indices)
        if not isinstance(x, tf.Tensor):
            return False
        if _is_eager(x) or not self._trace.holds(x.graph):
            return True
        if x.graph is self._trace.graph and x.name in self._trace.common:
            return True
        return any(inner is x and self.is_outside(outer) for outer, inner in x.graph.captures)

    def split(self, x: tf.Tensor) -> tuple[list[tf.Tensor], Callable[[Sequence[tf.Tensor]], tf.Tensor]]:
        """The parts of ``x`` that come from the batch, and what makes ``x`` of them again, or of others in their place.

        A gradient may be the sum of one that comes from the batch and one (of a regularizer, say) that does not.
        """
        parts: dict[str, tf.Tensor] = {}
        self._collect(x, parts)
        names = list(parts)
        return list(parts.values()), lambda others: self._rebuilt(x, dict(zip(names, others, strict=True)))

    def _collect(self, x: tf.Tensor, parts: dict[str, tf.Tensor]) -> None:
        if not self.is_from_batch(x):
            return
        if self._is_mixed(x):
            for term in self._terms(x.op):
                self._collect(term, parts)
        else:
            parts[x.name] = x

    def _rebuilt(self, x: tf.Tensor, parts: dict[str, tf.Tensor]) -> tf.Tensor:
        if x.name in parts or not self.is_from_batch(x):
            return parts.get(x.name, x)
        return computed_again(x.op, [self._rebuilt(term, parts) for term in x.op.inputs])[x.value_index]

    def _is_mixed(self, x: tf.Tensor, depth: int = 0) -> bool:
        """Whether ``x`` is linear in terms of which some come from the batch and some do not."""
        terms = self._terms(x.op)
        # Sizes that are not known may be numbers of examples: rows, and no sum over them.
        known = x.shape.is_fully_defined() and all(term.shape.is_fully_defined() for term in terms)
        if depth == _DEPTH or not terms or not known or not x.dtype.is_floating:
            return False  # whole numbers may have been computed from shapes
        if sum(map(self.is_from_batch, x.op.inputs)) > sum(map(self.is_from_batch, terms)):
            return False
        if x.op.type in ("AddV2", "Sub") and any(term.shape != x.shape for term in terms):
            return False
        return any(not self.is_from_batch(term) or self._is_mixed(term, depth + 1) for term in terms)

    def _terms(self, op: tf.Operation) -> list[tf.Tensor]:
        """The inputs that ``op`` is linear in; none for other ops. Of a product it is the factor that comes from the batch."""
        if op.type == "Mul":
            return [x for x in op.inputs if self.is_from_batch(x)][:1]
        return list(op.inputs)[_LINEAR[op.type]] if op.type in _LINEAR else []


def computed_again(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """What ``op``, which has no state, gives for other ``inputs``, in the current graph."""
    attributes = {name: value for name, value in op.node_def.attr.items() if name != "_class"}
    return list(default_graph().create_op(op.type, inputs, [y.dtype for y in op.outputs], attrs=attributes).outputs)


class Again:
    """Tensors of the traced graph, computed again with others in the place of some.

    Args:
      trace: the trace.
      flow: what depends on those that are replaced.
      other: what takes a tensor's place; None for one that is computed again.
    """

    def __init__(self, trace: Trace, flow: Flow, other: Callable[[tf.Tensor], tf.Tensor | None]):
        self._trace, self._flow, self._other = trace, flow, other
        self._made: dict[str, tf.Tensor] = {}

    def of(self, x: tf.Tensor) -> tf.Tensor | None:
        """``x`` computed again, itself where it depends on none that is replaced, None where that cannot be done."""
        if x.name in self._made or not self._flow.reaches(x):
            return self._made.get(x.name, x)
        other = self._other(x)
        if other is None:
            cannot = x.op.op_def.is_stateful or self._holds_marks(x.op)
            inputs = [] if cannot else [again for y in x.op.inputs if (again := self.of(y)) is not None]
            if not inputs or len(inputs) < len(x.op.inputs):
                return None
            outputs = computed_again(x.op, inputs)
            self._made |= {y.name: again for y, again in zip(x.op.outputs, outputs, strict=True)}
        else:
            self._made[x.name] = other
        return self._made[x.name]

    def _holds_marks(self, op: tf.Operation) -> bool:
        branches = [getattr(op, name) for name in ("_true_graph", "_false_graph") if hasattr(op, name)]
        return any(self._trace.marks_within(branch) for branch in branches)


def _is_eager(x: Any) -> bool:
    return isinstance(x, tf.__internal__.EagerTensor)
