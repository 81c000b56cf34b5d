"""TensorFlow's extension seam: every question that tf.distribute asks a strategy, answered by the engine's parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lockstep.engine import inputs, replicas, session_graphs, tf_options, values, variables
from lockstep.engine.context import SoleContext, ThreadReplica, TracedContext, TracedReplica, current
from lockstep.engine.exchange import choose
from lockstep.engine.shards import ShardLayout
from lockstep.engine.tf_private import (
    DistributedVariable,
    Mirrored,
    StrategyExtended,
    UpdateContext,
    ValueContext,
    current_replica,
    regroup,
    require_cross_replica,
    select_replica,
    update_regroup,
    validate_colocated_variable,
    value_container,
)
from lockstep.engine.weights import Weights


@dataclass(frozen=True)
class Options:
    """What a user chooses about how a strategy computes; see `lockstep.MirroredStrategy`."""

    check_finite: bool = False
    sync_batch_norm: bool = False
    exchange_dtype: tf.DType | None = None
    micro_batches: int = 1
    update: str = "auto"


class _Here(threading.local):
    """What goes on under a strategy in one thread of Python; another thread may run something else meanwhile."""

    def __init__(self) -> None:
        # How runs are to be made (`replicas.run`).
        self.options: dict[str, bool] = {}
        # The replicas of which this thread is one, or which this thread waits for (and merges what they hand in).
        self.thread_run: replicas.ThreadRun | None = None
        # How the variable being made is cut, and which variable it belongs to.
        self.next_is_sharded: tuple[ShardLayout, Any] | None = None


class Extended(StrategyExtended):
    """The engine behind `lockstep.MirroredStrategy`."""

    # Variables take lockstep's read and write policies.
    _use_var_policy = True
    experimental_between_graph = False
    experimental_should_init = True
    should_checkpoint = True
    should_save_summary = True

    def __init__(self, container: Any, devices: Sequence[str], cross_device_ops: Any, options: Options):
        super().__init__(container)
        self.devices = tuple(devices)
        self.replicas = len(self.devices)
        self.exchange = choose(cross_device_ops, self.devices)
        self.options = options
        # Called by a Keras optimizer, in each replica, with the summed gradients and their variables.
        self.observers: list[Callable[[list[Any], list[Any]], None]] = []
        # What users have been told already, where once is enough.
        self.notices: set[str] = set()
        self._default_device = None
        # Replica functions that are a tf.function, as they are called with the replicas inside.
        self.clones = replicas.Clones(self)
        self._here = _Here()

    @property
    def container(self) -> Any:
        return self._container_strategy()

    # Who and where the replicas are.

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.replicas

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self.devices

    @property
    def worker_devices_by_replica(self) -> list[list[str]]:
        return [[device] for device in self.devices]

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self.devices

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        del var_list
        return self.devices

    def _in_multi_worker_mode(self) -> bool:
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        return replica_id_in_sync_group

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return replica_id

    @property
    def _global_batch_size(self) -> bool:
        """Datasets yield global batches."""
        return True

    def value_container(self, value: Any) -> Any:
        return value_container(value)

    def _use_merge_call(self) -> bool:
        """Whether replicas meet by pausing in merge_call. Traced once, alone, or writing equal values, they need not."""
        replica = current()
        return not (
            replica is not None and (replica.replicas == 1 or isinstance(replica, TracedReplica) or replica.writes_are_equal)
        )

    # Variables.

    @contextlib.contextmanager
    def sharded(self, layout: ShardLayout, whose: Any) -> Iterator[None]:
        """The variable made in this block and thread is one of which each replica holds a shard (`shards`)."""
        before, self._here.next_is_sharded = self._here.next_is_sharded, (layout, whose)
        try:
            yield
        finally:
            self._here.next_is_sharded = before

    @property
    def next_is_sharded(self) -> tuple[ShardLayout, Any] | None:
        """How the variable being made is cut, and which variable it belongs to; None for a mirrored one."""
        return self._here.next_is_sharded

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        session_graphs.refuse("a variable made in a strategy's scope")
        return variables.create(self, next_creator, **kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        validate_colocated_variable(colocate_with_variable, self)

    def read_var(self, v: Any) -> tf.Tensor:
        return values.read(v)

    # Input.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        session_graphs.refuse("experimental_distribute_dataset")
        settings = tf_options.input_options(options, self.devices)
        if settings.per_replica:
            tf_options.refuse_per_replica()
        return inputs.distribute(dataset, self.replicas, settings, given=options is not None)

    def _experimental_make_numpy_dataset(self, numpy_input: Any, session: Any) -> tf.data.Dataset:
        del session
        return tf.data.Dataset.from_tensor_slices(numpy_input)

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: Any) -> Any:
        session_graphs.refuse("distribute_datasets_from_function")
        settings = tf_options.input_options(options, self.devices)
        return inputs.from_function(dataset_fn, self.replicas, settings, given=options is not None)

    def _make_dataset_iterator(self, dataset: Any) -> Any:
        del dataset
        tf_options.refuse_tf1("make_dataset_iterator", "strategy.experimental_distribute_dataset(dataset)")

    def _make_input_fn_iterator(self, input_fn: Callable, replication_mode: Any = None) -> Any:
        del input_fn, replication_mode
        tf_options.refuse_tf1("make_input_fn_iterator", "strategy.distribute_datasets_from_function(dataset_fn)")

    def _experimental_run_steps_on_iterator(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        tf_options.refuse_tf1("experimental_run_steps_on_iterator", "a loop in a tf.function that calls strategy.run")

    def _experimental_distribute_values_from_function(self, value_fn: Callable) -> Any:
        return regroup([value_fn(ValueContext(r, self.replicas)) for r in range(self.replicas)], always_wrap=True)

    # Values in cross-replica context.

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
        tf_options.check_communication_options(options)
        return values.reduce_to(self, reduce_op, value, destinations)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any = None) -> list[Any]:
        tf_options.check_communication_options(options)
        return values.batch_reduce_to(self, reduce_op, value_destination_pairs)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        del destinations
        return tensor if isinstance(tensor, (int, float)) else Mirrored([tensor] * self.replicas)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        require_cross_replica(self)
        return self._broadcast_to(tensor, destinations)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        tf_options.check_communication_options(options)
        return values.gather(self, value, destinations, axis)

    # Updates.

    def _update(self, var: Any, fn: Callable, args: Any, kwargs: Any, group: bool) -> Any:
        if not isinstance(var, DistributedVariable):
            return fn(var, *args, **kwargs)
        updates = []
        for replica, component in enumerate(var.values):
            name = f"update_{replica}"
            with tf.device(component.device), UpdateContext(replica), tf.name_scope(name):
                updates.append(fn(component, *select_replica(replica, args), **select_replica(replica, kwargs)))
        return update_regroup(self, updates, group)

    def _update_non_slot(self, colocate_with: Any, fn: Callable, args: Any, kwargs: Any, group: bool) -> Any:
        del colocate_with
        updates = []
        for replica, device in enumerate(self.devices):
            with tf.device(device), UpdateContext(replica):
                updates.append(fn(*select_replica(replica, args), **select_replica(replica, kwargs)))
        return update_regroup(self, updates, group)

    def _replica_ctx_update(self, var: Any, fn: Callable, args: Any, kwargs: Any, group: bool) -> Any:
        if self._use_merge_call():
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        if isinstance(var, DistributedVariable):
            var = var._get_replica(current_replica())
        return fn(var, *args, **kwargs)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        tf_options.check_communication_options(options)
        context = tf.distribute.get_replica_context()
        if isinstance(context, (TracedContext, SoleContext)):
            return context.all_reduce(reduce_op, value, options)
        return super()._replica_ctx_all_reduce(reduce_op, value, options)

    # Running replicas.

    @contextlib.contextmanager
    def run_options(self, **options: bool) -> Iterator[None]:
        """How the runs started in this block and thread are to be made (`replicas.run`)."""
        before, self._here.options = self._here.options, {**self._here.options, **options}
        try:
            yield
        finally:
            self._here.options = before

    def _call_for_each_replica(self, fn: Callable, args: Any, kwargs: Any) -> Any:
        session_graphs.refuse("strategy.run")
        # They are this run's, and not those of one that a merge_call inside of it may start.
        options, self._here.options = self._here.options, {}
        try:
            return replicas.run(self, fn, args, kwargs or {}, **options)
        finally:
            self._here.options = options

    @contextlib.contextmanager
    def in_thread_run(self, run: replicas.ThreadRun) -> Iterator[None]:
        """In this block and thread, ``run`` is what goes on: for the thread that starts it, and in each of its replicas."""
        before, self._here.thread_run = self._here.thread_run, run
        try:
            yield
        finally:
            self._here.thread_run = before

    @property
    def thread_weights(self) -> Weights | None:
        """The weights of the batch that replicas in threads are working on; None where all are equal."""
        run = self._here.thread_run
        return run.weights if run is not None else None

    def thread_replica(self, replica: int) -> ThreadReplica | None:
        """The engine's view of a replica that runs in a thread; None where none does."""
        run = self._here.thread_run
        return None if run is None else ThreadReplica(self.replicas, replica, run.weights, run.written)
