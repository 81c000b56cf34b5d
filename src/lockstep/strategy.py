"""The strategy classes that a user constructs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lockstep.engine import captured_values, feed, keras_private, losses
from lockstep.engine import devices as devices_
from lockstep.engine import update as update_
from lockstep.engine.accumulate import accumulate, check_count
from lockstep.engine.exchange import check_axis, reduce_op_of
from lockstep.engine.extended import Extended, Options
from lockstep.engine.replicas import StepFunction
from lockstep.engine.tf_options import check_run_options
from lockstep.engine.tf_private import DistributedValues, nest
from lockstep.engine.weights import find_slices
from lockstep.engine.xla import described
from lockstep.errors import ReplicaContextError, StrategyMismatchError

# What a first strategy sets up (seams, devices, threads of TensorFlow) is set up once, also where two threads make one each.
_constructing = threading.Lock()


# What to do in a replica instead.
_IN_A_REPLICA = {
    "scope": "Leave it out: a variable that a replica function makes has a copy on every replica as it is.",
    "run": "Call the function itself: it then runs on this replica, as it does on all others.",
    "reduce": "Use tf.distribute.get_replica_context().all_reduce(op, value), or reduce what strategy.run returns.",
    "gather": "Use tf.distribute.get_replica_context().all_gather(value, axis), or gather what strategy.run returns.",
}


class _Here(threading.local):
    """Per thread: how deep inside of a strategy's own code, which may run what the user would be warned about."""

    depth = 0


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """Synchronous data-parallel training on the devices of one host: N replicas compute what one device would.

    A drop-in for ``tf.distribute.MirroredStrategy`` (of which it is a subclass, with an engine of its own): the same scope,
    ``run``, ``reduce``, ``gather`` and datasets, and Keras ``fit`` / ``evaluate`` / ``predict`` unmodified.

    Args:
      devices: device names, one replica each, such as ``["GPU:0", "GPU:1"]``. Default: all visible GPUs; where there are
        none, logical CPU devices.
      cross_device_ops: how gradients are exchanged: None, ``tf.distribute.HierarchicalCopyAllReduce()`` (each tensor
        reduced on one device, spread over all) or ``tf.distribute.ReductionToOneDevice()``.
      replicas: how many devices, instead of naming them: the first GPUs, or that many logical CPU devices (default one), which
        are created before TensorFlow starts, with threads shared out between them.
      logical_replicas: train as this many replicas, whatever the number of devices, of which it must be a multiple: each
        device computes its share of the slices. The slices, dropout masks and the order of sums depend on this number alone, so
        that losses and weights are bit-identical on any number of devices of one kind. Each replica keeps a copy of the
        variables, so a device holds several. (Compare EasyScale, Li et al. 2022, arXiv 2208.14228.)
      check_finite: stop with ``tf.errors.InvalidArgumentError``, naming replica and step, before an update whose loss
        or gradients are not finite.
      sync_batch_norm: treat every ``keras.layers.BatchNormalization`` as if it were made with ``synchronized=True``: it
        normalises with the statistics of the global batch, as on one device, instead of those of each slice.
      exchange_dtype: "bfloat16" or "float16": what a Keras optimizer's gradients are rounded to for the exchange, which
        halves the bytes. They are summed in float32. Default: the gradients' own dtype, which loses nothing.
      micro_batches: Keras ``fit`` works through each slice in this many parts, one after the other, and updates once: the
        memory of a small batch, the result of the large one (see `accumulate`).
      update: how a Keras optimizer's update is done. "mirrored": every replica repeats all of it. "sharded": where an
        optimizer treats each element by itself, every replica updates 1/N of the elements and holds 1/N of the slots (Xu et
        al. 2020, arXiv 2004.13336). "auto": sharded for the variables that are large enough for it to be faster.

    Raises:
      DeviceError: unknown, repeated, mixed or too few devices, or logical replicas that are no multiple of them.
      TooLateError: CPU devices would have to be created after TensorFlow has started.
      ValueError: another ``exchange_dtype`` or ``update``, an unknown exchange, or ``micro_batches`` below 1.
      UnsupportedVersionError: TensorFlow or Keras is a version whose internals are not known.

    >>> import keras, numpy as np
    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
    >>> strategy.num_replicas_in_sync
    2

    Follows ``tf.distribute.MirroredStrategy`` (TensorFlow 2.21) in its interface.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: Any = None,
        *,
        replicas: int | None = None,
        logical_replicas: int | None = None,
        check_finite: bool = False,
        sync_batch_norm: bool = False,
        exchange_dtype: Any = None,
        micro_batches: int = 1,
        update: str = "auto",
    ):
        options = Options(
            check_finite, sync_batch_norm, _exchange_dtype(exchange_dtype), check_count(micro_batches), update_.choice(update)
        )
        with _constructing:
            keras_private.install()
            losses.install()
            captured_values.install()
            names = devices_.resolve(devices, replicas, logical_replicas)
        # Not MirroredStrategy's own constructor, which would build TensorFlow's engine.
        tf.distribute.Strategy.__init__(self, Extended(self, names, cross_device_ops, options))
        self._warned_undistributed = False
        self._inside_library = _Here()

    def __deepcopy__(self, memo: dict[int, Any]) -> MirroredStrategy:
        """Devices are not copied: a copied strategy is the same strategy."""
        del memo
        return self

    def scope(self) -> Any:
        """The context in which variables become mirrored.

        Raises:
          StrategyMismatchError: entered inside the scope of another strategy.
          ReplicaContextError: called in a replica function.
        """
        self._refuse_in_replica("scope")
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not self:
            raise StrategyMismatchError(
                "Two strategies cannot be in scope at once. "
                f"Received: scope() of {self!r} inside the scope of {tf.distribute.get_strategy()!r}. "
                "Leave the outer scope first, or use one strategy for the whole program."
            )
        return super().scope()

    def run(self, fn: Callable, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs ``fn`` on every replica, each with its own slice of per-replica arguments.

        Args:
          fn: the replica function. Inside a ``tf.function`` it is traced once for all replicas.
          args, kwargs: its arguments; leaves that are per-replica values (a distributed dataset's batches, results of
            ``run``) are taken apart, all others go to every replica as they are.
          options: a ``tf.distribute.RunOptions``, whose fields are for TPUs and change nothing here, or None.

        Returns:
          Per-replica values of what ``fn`` returned.

        Raises:
          ReplicaContextError: called in a replica function.
          StrategyMismatchError: an argument is a per-replica value of a strategy with another number of replicas.
          OptionError: ``options`` or one of its fields has the wrong type.
        """
        self._refuse_in_replica("run")
        check_run_options(options)
        feed.check_replicas((args, kwargs or {}), self.num_replicas_in_sync, "An argument of strategy.run was made")
        if not isinstance(fn, StepFunction):
            self._warn_if_undistributed(fn, (args, kwargs or {}))
            return super().run(fn, args=args, kwargs=kwargs, options=options)
        if self.num_replicas_in_sync > 1 and not find_slices(args) and not _has_per_replica(args):
            args = self.split(args)
        with self.extended.run_options(borrow=fn.borrow, compiled=fn.compiled):
            results = super().run(fn.function, args=args, kwargs=kwargs, options=options)
        return fn.after(results) if fn.after else results

    def split(self, batch: Any) -> Any:
        """Splits one global batch over the replicas, for ``run``.

        Args:
          batch: structure of tensors or arrays of shape ``[global_batch, ...]``, any dtype, dense, ragged or sparse.

        Returns:
          The same structure with one slice per replica in each leaf (with one replica, the batch itself).

        Raises:
          BatchError: a leaf has no batch axis, or the leaves disagree about the number of examples.

        >>> import numpy as np
        >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        >>> slices = strategy.split(np.array([1, 2, 3]))
        >>> [v.numpy().tolist() for v in strategy.experimental_local_results(slices)]
        [[1, 2], [3]]
        """
        return batch if self.num_replicas_in_sync == 1 else feed.split(batch, self.num_replicas_in_sync)

    def accumulate(self, fn: Callable, args: tuple = (), micro_batches: int = 1) -> Any:
        """Sums ``fn`` over micro-batches of the replica's slice: the memory of a small batch, the result of the large one.

        Call it in a replica function, around what computes losses and gradients; the update comes after it, once, with one
        exchange. A loss made by ``tf.nn.compute_average_loss`` or a Keras loss weighs each micro-batch by its size, so
        the sum is the gradient of the whole slice. Metrics are updated in ``fn``; batch statistics are those of micro-batches.

        Args:
          fn: the function of one micro-batch. It returns a structure of losses, gradients (also sparse ones) and counts,
            whose shapes do not depend on the number of examples; None stays None.
          args: its arguments for the whole slice; every tensor in them has shape ``[examples, ...]``.
          micro_batches: how many to cut the slice into, as evenly as possible; fewer where there are fewer examples.

        Returns:
          The sum of what ``fn`` returned, float16 and bfloat16 summed in float32.

        Raises:
          ValueError: ``micro_batches`` is not a positive integer.
          BatchError: ``args`` holds no tensor, or one without a batch axis.
          UnsupportedError: called outside of a replica, or ``fn`` returns something per example.

        >>> import tensorflow as tf
        >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     w = tf.Variable(1.0)
        >>> def gradient(x):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.nn.compute_average_loss(tf.square(w * x))
        ...     return tape.gradient(loss, w)
        >>> @tf.function
        ... def step(x):
        ...     return strategy.run(lambda x: strategy.accumulate(gradient, (x,), micro_batches=3), (x,))
        >>> x = tf.range(8.0)
        >>> float(strategy.reduce("SUM", step(strategy.split(x)), axis=None))  # 2 * mean(x * x)
        35.0
        """
        return accumulate(fn, args, micro_batches)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces per-replica values to one: over replicas, and over ``axis`` of each value unless it is None.

        Args:
          reduce_op: "SUM" or "MEAN" (``tf.distribute.ReduceOp``).
          value: per-replica values (``axis=0`` with MEAN weighs each example alike, however uneven the slices).
          axis: None, or the axis to reduce in each value as well.

        Returns:
          A tensor of the value's shape, without ``axis``.

        Raises:
          ReplicaContextError: called in a replica function.
          ExchangeError: another ``reduce_op``, or an axis that a value does not have.
        """
        self._refuse_in_replica("reduce")
        reduce_op = reduce_op_of(reduce_op)
        for leaf in nest.flatten(value):
            check_axis(leaf.values if isinstance(leaf, DistributedValues) else [leaf], axis)
        self._inside_library.depth += 1
        try:
            return super().reduce(reduce_op, value, axis)
        finally:
            self._inside_library.depth -= 1

    def gather(self, value: Any, axis: int) -> Any:
        """Joins per-replica values along ``axis``, in the order of the replicas; see ``tf.distribute.Strategy.gather``.

        Raises:
          ReplicaContextError: called in a replica function.
        """
        self._refuse_in_replica("gather")
        return super().gather(value, axis)

    def _refuse_in_replica(self, method: str) -> None:
        context = tf.distribute.get_replica_context()
        if context is not None and context.strategy is self:
            raise ReplicaContextError(
                f"strategy.{method} requires being in cross-replica context, outside of the replicas. Received: "
                f"strategy.{method}() in a replica function. {_IN_A_REPLICA[method]}"
            )

    def _warn_if_undistributed(self, fn: Callable, arguments: Any) -> None:
        if self.num_replicas_in_sync == 1 or self._warned_undistributed or self._inside_library.depth:
            return
        leaves = nest.flatten(arguments)
        if any(isinstance(leaf, DistributedValues) for leaf in leaves):
            return
        batch = next((leaf for leaf in leaves if feed.is_batched_value(leaf)), None)
        if batch is None:
            return
        self._warned_undistributed = True
        n = self.num_replicas_in_sync
        warnings.warn(
            f"strategy.run({described(fn)}) was given a batch that is not split over the replicas: a tensor of shape "
            f"{tuple(batch.shape)}. Each of the {n} replicas processes all of it: {n} times the work, and {n} times "
            "the gradient. "
            "Add the line\n    dataset = strategy.experimental_distribute_dataset(dataset)\n"
            "before the loop, or split this batch:\n    strategy.run(fn, args=(strategy.split(batch),))\n"
            "If every replica is meant to get the whole tensor, pass it as a closure instead of an argument.",
            UserWarning,
            stacklevel=3,
        )


def _exchange_dtype(dtype: Any) -> tf.DType | None:
    allowed = (tf.bfloat16, tf.float16, tf.float32)
    if dtype is None:
        return None
    try:
        known = tf.as_dtype(dtype)
    except TypeError:
        known = None
    if known not in allowed:
        raise ValueError(
            f"Gradients cannot be exchanged in this dtype. Received: exchange_dtype={dtype!r}. "
            "Allowed: 'bfloat16', 'float16', 'float32', or None for the gradients' own. Leave it out where bytes do not matter."
        )
    return known


def _has_per_replica(structure: Any) -> bool:
    return any(isinstance(leaf, DistributedValues) for leaf in nest.flatten(structure))
