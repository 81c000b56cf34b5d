"""Makes distributed datasets: of global batches, which are split, or of batches made for each replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lockstep.engine import feed
from lockstep.engine.datasets import DistributedDataset, whole_element
from lockstep.engine.tf_options import Input
from lockstep.engine.tf_private import DistributedDatasetInterface, InputContext, PerReplicaSpec, nest
from lockstep.errors import BatchError, OptionError, StrategyMismatchError


def distribute(dataset: Any, replicas: int, settings: Input, given: bool = False) -> Any:
    """Splits every global batch of ``dataset`` over the replicas.

    Args:
      dataset: yields global batches; every leaf has shape ``[global_batch, ...]``. The last batch may be shorter. A dataset of
        per-replica values (what ``tf.data.Dataset.zip`` makes of distributed datasets) is taken as it is.
      replicas: N. With one replica the elements stay plain tensors, as under ``tf.distribute``.
      settings: how it is fed.
      given: whether the settings are a user's and not the default.

    Raises:
      BatchError: the dataset is empty, not batched, of unknown rank, or its leaves disagree about the batch size.
      StrategyMismatchError: it is distributed over another number of replicas.
      OptionError: it is distributed already, so that options come too late.
    """
    if isinstance(dataset, DistributedDatasetInterface):
        _check_own(dataset, replicas, given)
        return dataset
    _check_dataset(dataset, "experimental_distribute_dataset")
    _check_not_empty(dataset)
    leaves = feed.named_leaves(dataset.element_spec)
    if any(isinstance(spec, PerReplicaSpec) for _, spec in leaves):
        _check_split(leaves, replicas)
        return DistributedDataset(dataset, settings)
    feed.check_leaves(leaves)
    spec = dataset.element_spec

    def split(*element: Any) -> Any:
        return feed.split(whole_element(spec, element), replicas)

    # One batch ahead hides the splitting. More would only be lost where a generator is read by one fit after the other.
    fed = dataset if replicas == 1 else dataset.map(split)
    fed = _ahead(fed, settings, 1 if replicas > 1 or given else 0)
    return DistributedDataset(fed, settings, dataset, lambda whole: distribute(whole, replicas, settings, given))


def from_function(make: Callable[[Any], tf.data.Dataset], replicas: int, settings: Input, given: bool = False) -> Any:
    """A dataset of *per-replica* elements, made by ``make(tf.distribute.InputContext)``.

    Consecutive elements go to replicas 0..N-1, unless each replica is to have a dataset of its own (`settings`). Elements are
    taken as they are. Where they end in the middle of a group, the replicas left over get empty batches, and every other its
    exact weight; elements that are no batches cannot be empty, and such a group is left out.

    Raises:
      BatchError: no dataset was made, an empty one, one of unknown rank, or the replicas' datasets differ in structure.
    """
    if replicas == 1:
        dataset = make(InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1))
        _check_dataset(dataset, "dataset_fn")
        _check_not_empty(dataset)
        fed = _ahead(dataset, settings, 1 if given else 0)
        return DistributedDataset(fed, settings, dataset, lambda whole: distribute(whole, 1, settings, given))
    made = _side_by_side(make, replicas) if settings.per_replica else _in_turn(make, replicas)
    return DistributedDataset(_ahead(made, settings, tf.data.AUTOTUNE), settings)


def _ahead(dataset: tf.data.Dataset, settings: Input, default: int) -> tf.data.Dataset:
    count = default if settings.ahead is None else settings.ahead
    if count:
        return dataset.prefetch(count)
    if settings.ahead is None:
        return dataset
    none_at_all = tf.data.Options()
    none_at_all.experimental_optimization.inject_prefetch = False  # tf.data would add one of its own
    return dataset.with_options(none_at_all)


def _in_turn(make: Callable, replicas: int) -> tf.data.Dataset:
    """One dataset whose consecutive elements go to replicas 0..N-1."""
    dataset = make(InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=replicas))
    _check_dataset(dataset, "dataset_fn")
    _check_not_empty(dataset)
    spec = dataset.element_spec
    feed.check_leaves(feed.named_leaves(spec), scalars=True)
    whole = _always_whole(spec, [dataset])

    def group(*window: Any) -> Any:
        elements = tf.data.Dataset.zip(window)
        # Known to be whole, nothing has to be asked at run time.
        count = None if whole else elements.reduce(tf.constant(0), lambda n, *_: n + 1)
        first = _nth(elements, 0)

        def of(replica: int) -> list[Any]:
            if replica == 0:
                return first
            if count is None:
                return _nth(elements, replica)
            return _either(replica < count, lambda: _nth(elements, replica), lambda: [_nothing_of(leaf) for leaf in first])

        return _joined(spec, [of(replica) for replica in range(replicas)])

    return _flat(dataset).window(replicas, drop_remainder=whole).map(group)


def _side_by_side(make: Callable, replicas: int) -> tf.data.Dataset:
    """N datasets, whose elements of the same number go to replicas 0..N-1."""
    contexts = [InputContext(replicas, replica, replicas) for replica in range(replicas)]
    made = [make(context) for context in contexts]
    for dataset in made:
        _check_dataset(dataset, "dataset_fn")
    if all(int(dataset.cardinality()) == 0 for dataset in made):
        _check_not_empty(made[0])
    spec = _common_spec([dataset.element_spec for dataset in made])
    feed.check_leaves(feed.named_leaves(spec), scalars=True)
    if _always_whole(spec, made):
        return tf.data.Dataset.zip(tuple(_flat(dataset) for dataset in made)).map(lambda *each: _joined(spec, each))
    absent = tf.data.Dataset.from_tensors((False, *(_absent(leaf) for leaf in _held(spec)))).repeat()
    longer = [_flat(dataset).map(lambda *leaves: (True, *leaves)).concatenate(absent) for dataset in made]
    rows = tf.data.Dataset.zip(tuple(longer)).take_while(lambda *each: tf.reduce_any([present for present, *_ in each]))
    counts = [int(dataset.cardinality()) for dataset in made]
    if min(counts) >= 0:
        rows = rows.apply(tf.data.experimental.assert_cardinality(max(counts)))
    return rows.map(lambda *each: _joined(spec, _first_filled([present for present, *_ in each], [list(e[1:]) for e in each])))


def _first_filled(present: list[Any], each: list[list[Any]]) -> list[list[Any]]:
    """Each replica's leaves. Replica 0, whose rows stand in where there are none, always has some: once its dataset has ended,
    those of the first replica whose dataset has not, which gets none. Sums over replicas are the same."""
    filled = each[-1]
    rest: list[list[Any]] = []
    for replica in reversed(range(1, len(each))):
        own, moves = each[replica], tf.logical_not(tf.reduce_any(present[:replica]))
        if replica < len(each) - 1:
            filled = _either(present[replica], lambda own=own: own, lambda filled=filled: filled)
        rest.insert(0, _either(moves, lambda own=own: [_nothing_of(leaf) for leaf in own], lambda own=own: own))
    return [_either(present[0], lambda: each[0], lambda: filled), *rest]


def _always_whole(spec: Any, made: list[tf.data.Dataset]) -> bool:
    """Whether there is no group of elements with a replica left over: elements without end, or such as cannot be empty."""
    endless = all(int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY for dataset in made)
    return endless or not any(leaf.shape.rank for leaf in _held(spec) if not feed.holds_nothing(leaf))


# Elements on their way to a group are lists of their leaves, without those that are None.


def _held(structure: Any) -> list[Any]:
    return [leaf for leaf in nest.flatten(structure) if leaf is not None and not isinstance(leaf, tf.NoneTensorSpec)]


def _flat(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(lambda *element: tuple(_held(element)))


def _nth(elements: tf.data.Dataset, n: int) -> list[Any]:
    return list(elements.skip(n).take(1).get_single_element())


def _either(condition: Any, one: Callable[[], list], other: Callable[[], list]) -> list[Any]:
    """The leaves that ``one`` makes if ``condition``, else those of ``other``, which are of the same types."""
    made: list[Any] = []

    def parts(make: Callable[[], list]) -> Callable[[], list]:
        def branch() -> list:
            made[:] = make()
            return nest.flatten(made, expand_composites=True)

        return branch

    flat = tf.nest.flatten(tf.cond(condition, parts(one), parts(other)))
    return nest.pack_sequence_as(made, flat, expand_composites=True)


def _nothing_of(leaf: Any) -> Any:
    """A batch without rows like ``leaf``; what is no batch stays as it is."""
    return feed.rows(leaf, 0, 0) if feed.is_split(leaf) and leaf.shape.rank else leaf


def _absent(spec: Any) -> Any:
    """A batch without rows of the type ``spec``; zero for what is no batch."""
    shape = [axis or 0 for axis in spec.shape.as_list()]
    shape[:1] = [0] * min(len(shape), 1)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        flat = tf.zeros([0, *shape[1 + spec.ragged_rank :]], spec.dtype)
        splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
        return tf.RaggedTensor.from_nested_row_splits(flat, splits, validate=False)
    return tf.zeros(shape, spec.dtype)


def _joined(spec: Any, each: Any) -> Any:
    """One structure of per-replica values from each replica's leaves."""
    leaves = iter([feed.per_replica(list(values)) for values in zip(*each, strict=True)])
    return nest.pack_sequence_as(spec, [next(leaves) if _held([leaf]) else None for leaf in nest.flatten(spec)])


def _common_spec(specs: list[Any]) -> Any:
    def common(*leaves: Any) -> Any:
        found = leaves[0].most_specific_common_supertype(leaves[1:])
        if found is None:
            raise ValueError
        return found

    try:
        return nest.map_structure(common, *specs)
    except (ValueError, TypeError):
        raise BatchError(
            "The datasets of the replicas must hold elements of one structure and of the same dtypes and ranks. Received: "
            f"{'; '.join(f'replica {replica}: {spec}' for replica, spec in enumerate(specs))}. "
            "Make dataset_fn return the same kind of elements for every tf.distribute.InputContext."
        ) from None


def _check_dataset(dataset: Any, where: str) -> None:
    if isinstance(dataset, tf.data.Dataset) and (where != "dataset_fn" or not isinstance(dataset, DistributedDataset)):
        return
    if isinstance(dataset, (dict, list, tuple)) and any(isinstance(d, tf.data.Dataset) for d in nest.flatten(dataset)):
        todo = "Join them first: tf.data.Dataset.zip(datasets), where datasets is a dict or a tuple."
    else:
        todo = (
            "Wrap arrays with tf.data.Dataset.from_tensor_slices(...).batch(global_batch_size), one batch with "
            "strategy.split(batch)."
        )
    what = "dataset_fn must return one" if where == "dataset_fn" else "Only a tf.data.Dataset can be distributed"
    raise BatchError(f"{what}. Received: {type(dataset).__name__}. Allowed: a tf.data.Dataset that is not distributed. {todo}")


def _check_not_empty(dataset: tf.data.Dataset) -> None:
    if int(dataset.cardinality()) == 0:
        raise BatchError(
            "There is nothing to train on. Received: an empty dataset (0 batches). "
            "Check the filter, the file pattern and drop_remainder=True, which drops a batch that is not full."
        )


def _check_own(dataset: Any, replicas: int, given: bool) -> None:
    """Raises unless ``dataset``, which is distributed, is so over N replicas and by lockstep."""
    if not isinstance(dataset, DistributedDataset):
        raise StrategyMismatchError(
            "The dataset was distributed by another library, and its slices do not say how large the global batch is. "
            f"Received: {type(dataset).__name__}. Pass the tf.data.Dataset itself to this strategy."
        )
    feed.check_replicas(dataset.element_spec, replicas, "The dataset was distributed")
    if given:
        raise OptionError(
            "Options cannot be given to a dataset that is distributed already. Received: options= with a distributed dataset. "
            "Give them where the dataset is distributed first."
        )


def _check_split(leaves: list[tuple[str, Any]], replicas: int) -> None:
    """Raises unless a dataset that holds per-replica values holds no whole batches beside them."""
    feed.check_replicas([spec for _, spec in leaves], replicas, "The dataset was distributed")
    for path, spec in leaves:
        if not isinstance(spec, PerReplicaSpec) and not feed.holds_nothing(spec) and spec.shape.rank != 0:
            raise BatchError(
                "A part of the dataset is distributed already, and another part is not. "
                f"Received: {path} of type {spec}. Zip the datasets first, and distribute the result."
            )
