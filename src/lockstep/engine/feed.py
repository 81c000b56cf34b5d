"""A global batch -> N slices, one per replica.

Slices are contiguous and keep the order of the examples; their sizes differ by at most one (the first ``b mod N``
replicas take one more), so no replica is empty unless there are fewer examples than replicas. The leaves of a split batch are
`Slices`: per-replica values that remember they came from one batch, which is how the engine knows each replica's exact weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.engine.tf_private import CompositeTensor, DistributedValues, PerReplica, PerReplicaSpec, nest, select_replica
from lockstep.errors import BatchError, StrategyMismatchError


class SlicesSpec(PerReplicaSpec):
    """The type of `Slices`: one spec per replica."""

    __slots__ = ()
    value_type = property(lambda self: Slices)

    def _from_components(self, tensor_list: Any) -> Slices:
        return Slices(tensor_list, self)


class Slices(PerReplica):
    """The slices of one batched tensor, one per replica, in replica order.

    Its spec leaves the batch axis open (unless the dataset fixes it), so that a shorter last batch is the same type to
    a ``tf.function`` and does not retrace it.
    """

    def __init__(self, values: Any, spec: SlicesSpec | None = None):
        super().__init__(tuple(values))
        self._spec = spec

    @property
    def _type_spec(self) -> SlicesSpec:
        if self._spec is None:
            self._spec = SlicesSpec(*(open_batch_axis(tf.type_spec_from_value(v)) for v in self._values))
        return self._spec


def with_values(leaf: Any, values: list[Any]) -> Any:
    """A per-replica value of the same type as ``leaf``, with other values of the same types."""
    return Slices(values, leaf._spec) if isinstance(leaf, Slices) else PerReplica(tuple(values))


def per_replica(values: list[Any]) -> Any:
    """One value per replica: `Slices` if they have a batch axis, else a plain per-replica value (None stays None)."""
    first = values[0]
    if not is_split(first):
        return first
    return Slices(values) if getattr(first, "shape", None) is not None and first.shape.rank else PerReplica(tuple(values))


def map_replicas(fn: Any, element: Any, unpack: bool) -> Any:
    """``fn`` of each replica's part of a distributed dataset's ``element`` (its parts one by one if ``unpack``)."""
    replicas = max((len(leaf.values) for leaf in nest.flatten(element) if isinstance(leaf, PerReplica)), default=1)
    parts = [select_replica(replica, element) for replica in range(replicas)]
    results = [fn(*part) if unpack else fn(part) for part in parts]
    if not any(isinstance(leaf, PerReplica) for leaf in nest.flatten(element)):
        return results[0]
    results = [nest.map_structure(as_tensor, result) for result in results]
    return nest.map_structure(lambda *values: per_replica(list(values)), *results)


def open_batch_axis(spec: tf.TypeSpec) -> tf.TypeSpec:
    """``spec`` with an unknown leading axis."""
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank in (None, 0):
        return spec
    opened = [None, *shape.as_list()[1:]]
    if isinstance(spec, tf.TensorSpec):
        return tf.TensorSpec(opened, spec.dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(opened, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(opened, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return spec


def bounds(size: Any, replicas: int) -> list[Any]:
    """The N + 1 cut points of ``size`` examples: replica r takes rows ``bounds[r]`` to ``bounds[r + 1]``.

    Works on Python integers and on scalar int tensors alike. Sizes differ by at most one and sum to ``size``.

    >>> bounds(9, 4)
    [0, 3, 5, 7, 9]
    """
    each, rest = size // replicas, size % replicas
    if isinstance(size, int):
        return [r * each + min(r, rest) for r in range(replicas + 1)]
    return [r * each + tf.minimum(r, rest) for r in range(replicas + 1)]


def batch_size(leaf: Any) -> Any:
    """The number of examples in a batched leaf: an int where the shape is static, else a scalar int32 tensor."""
    static = leaf.shape[0] if leaf.shape.rank else None
    if static is not None:
        return int(static)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def rows(leaf: Any, start: Any, stop: Any) -> Any:
    """Rows ``start`` to ``stop`` of a dense, ragged or sparse leaf."""
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    axes = leaf.shape.rank
    begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros([axes - 1], tf.int64)], 0)
    size = tf.concat([[tf.cast(stop - start, tf.int64)], leaf.dense_shape[1:]], 0)
    return tf.sparse.slice(leaf, begin, size)


def split(batch: Any, replicas: int) -> Any:
    """Splits every leaf of ``batch`` along its first axis into `Slices`, one slice per replica.

    Args:
      batch: a structure of dense (any dtype), ragged or sparse tensors or arrays of shape ``[global_batch, ...]``.
      replicas: N.

    Returns:
      The same structure with a `Slices` of N values per leaf; ``None`` leaves stay ``None``.

    Raises:
      BatchError: a leaf has no batch axis or the leaves disagree about the number of examples.
    """
    batch = nest.map_structure(as_tensor, batch)
    check_leaves([(path, spec_of(leaf)) for path, leaf in named_leaves(batch)])
    leaves = [leaf for leaf in nest.flatten(batch) if is_split(leaf)]
    sizes = [batch_size(leaf) for leaf in leaves]
    checks = _agreement_checks(sizes)
    cuts: dict[Any, list] = {}

    def slices(leaf: Any) -> Any:
        if not is_split(leaf):
            return leaf
        size = batch_size(leaf)
        key = size if isinstance(size, int) else "dynamic"
        if key not in cuts:
            with tf.control_dependencies(checks):
                cuts[key] = bounds(size if isinstance(size, int) else tf.identity(size), replicas)
        cut = cuts[key]
        values = [rows(leaf, cut[r], cut[r + 1]) for r in range(replicas)]
        if isinstance(size, int) and not tf.executing_eagerly():
            return Slices(values, SlicesSpec(*(tf.type_spec_from_value(v) for v in values)))
        return Slices(values)

    return nest.map_structure(slices, batch)


def is_split(leaf: Any) -> bool:
    """Whether a leaf holds examples: ``None`` and Optionals (Keras's stand-in for None in a dataset) hold nothing."""
    return leaf is not None and not isinstance(leaf, tf.experimental.Optional)


def holds_nothing(spec: Any) -> bool:
    return isinstance(spec, tf.OptionalSpec) or type(spec).__name__ == "NoneTensorSpec"  # public from TensorFlow 2.21 on


def check_replicas(structure: Any, replicas: int, what: str) -> None:
    """Raises StrategyMismatchError if a per-replica value (or its spec) in ``structure`` is of another number of replicas."""
    for leaf in nest.flatten(structure):
        if isinstance(leaf, PerReplicaSpec):
            found = len(leaf._component_specs)
        elif isinstance(leaf, DistributedValues) and not isinstance(leaf, tf.Variable):
            found = len(leaf.values)
        else:
            continue
        if found != replicas:
            raise StrategyMismatchError(
                f"{what} by a strategy with another number of replicas. Received: a per-replica value of {found}, in a "
                f"strategy with {replicas}. Distribute the dataset, or split the batch, with the strategy that trains."
            )


def as_tensor(leaf: Any) -> Any:
    """``leaf`` of a batch as a tensor; None stays None, and a batch that is split already is an error."""
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, CompositeTensor):
        if isinstance(leaf, DistributedValues):
            raise BatchError(
                "This batch is split over the replicas already. Received: a per-replica value. "
                "Pass it to strategy.run as it is, without strategy.split."
            )
        return leaf
    return tf.convert_to_tensor(leaf)


def spec_of(leaf: Any) -> Any:
    return None if leaf is None else tf.type_spec_from_value(leaf)


def named_leaves(structure: Any) -> list[tuple[str, Any]]:
    """(path, leaf) pairs, with paths as a user would write them: ``[0]['image']``."""
    return [
        ("".join(f"[{key!r}]" for key in path) or "the batch", leaf) for path, leaf in nest.flatten_with_tuple_paths(structure)
    ]


def check_leaves(leaves: list[tuple[str, Any]], scalars: bool = False) -> None:
    """Raises BatchError if a leaf has no batch axis, an unknown rank, or the static batch sizes disagree.

    Args:
      leaves: (path, spec) pairs.
      scalars: whether there may be leaves without a batch axis.
    """
    known: dict[str, int] = {}
    for path, spec in leaves:
        shape = getattr(spec, "shape", None)
        if spec is None or holds_nothing(spec) or (scalars and shape is not None and shape.rank == 0):
            continue
        if shape is None or shape.rank is None:
            raise BatchError(
                f"A batch cannot be split along an axis that may not exist. Received: {path} of unknown rank ({spec}). "
                "Allowed: tensors whose number of axes is known, the first being the batch. "
                "Give the shape: dataset.map(lambda x: tf.ensure_shape(x, [None, ...])), or output_signature= in "
                "from_generator."
            )
        if shape.rank == 0:
            raise BatchError(
                f"A batch is split along its first axis, and there is none. Received: {path} of shape () ({spec}). "
                "Allowed: tensors of shape [global_batch, ...]. Call dataset.batch(global_batch_size) first."
            )
        if shape[0] is not None:
            known[path] = int(shape[0])
    if len(set(known.values())) > 1:
        sizes = ", ".join(f"{path}: {size}" for path, size in known.items())
        raise BatchError(
            "The parts of a batch must hold the same number of examples, and do not. "
            f"Received: first axes {sizes}. Make them equal, or pass what is not per example as a closure or constant."
        )


def _agreement_checks(sizes: list[Any]) -> list[Any]:
    """Run-time checks (ops in a graph, at once in eager mode) that the leading axes agree; none where static shapes show it."""
    if len({s for s in sizes if isinstance(s, int)}) <= 1 and all(isinstance(s, int) for s in sizes):
        return []
    first, message = sizes[0], "lockstep: the parts of a batch must hold the same number of examples (first axes differ)"
    return [op for s in sizes[1:] if (op := tf.debugging.assert_equal(s, first, message=message)) is not None]


def is_batched_value(value: Any) -> bool:
    """Whether ``value`` looks like a whole batch that nobody split: an array or tensor with more than one row."""
    if isinstance(value, (tf.Variable, DistributedValues)):
        return False
    if not (tf.is_tensor(value) or isinstance(value, np.ndarray)):
        return False
    shape = tf.TensorShape(value.shape)
    rank: Any = shape.rank
    rows_: Any = shape[0] if rank else 0
    return bool(rank) and (rows_ is None or rows_ > 1)
