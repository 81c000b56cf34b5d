"""Keras's compiled train, test and predict steps under a lockstep strategy (used by the seams in `keras_private`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from lockstep.engine import keras_logs, keras_scope, keras_weights, optimize, xla
from lockstep.engine.accumulate import accumulate, held_updates
from lockstep.engine.context import Replica, TracedContext, current, sum_over_replicas
from lockstep.engine.emit import assert_all
from lockstep.engine.feed import SlicesSpec
from lockstep.engine.replicas import StepFunction
from lockstep.engine.tf_private import DistributedValues, Function, nest
from lockstep.errors import BatchError, UnsupportedError

_NOT_FINITE = (
    "lockstep: the loss or a gradient is not finite (check_finite=True). No replica was updated. "
    "Look for a learning rate that is too large, a log or division of 0, or bad input in this replica's slice:"
)


def make_function(original: Callable) -> Callable:
    """Wraps Trainer._make_function: the train or test step takes a batch, and reports global metrics."""

    @functools.wraps(original)
    def _make_function(self: Any, step_function: Callable) -> Callable:
        keras_scope.check_model(self)
        strategy: Any = self._distribute_strategy
        if not keras_scope.is_lockstep(strategy):
            return original(self, step_function)
        micro_batches = strategy.extended.options.micro_batches if step_function.__name__ == "train_step" else 1
        compiled = bool(self.jit_compile)
        if strategy.num_replicas_in_sync == 1 and micro_batches == 1:
            run = original(self, _checked(step_function))
            return xla.explained(run) if compiled else run
        logs = keras_logs.Logs(self, step_function)
        replica_step = _accumulated(self, step_function, micro_batches, logs)
        step = StepFunction(replica_step, compiled=compiled, after=logs.of_all)
        convert = self._autoconvert_optionals

        def traced_once(function: Any) -> Callable:
            # Keras traces the step and, around it, the loop over steps. A loop of one turn needs no function inside.
            traced = convert(function)
            if not isinstance(function, Function) or self.steps_per_execution > 1 or function._jit_compile:
                return traced
            inlined = convert(function.python_function)
            return lambda data: traced(data) if tf.executing_eagerly() else inlined(data)

        with _making_step(self, traced_once):
            run = original(self, step)
        return optimize.Step(xla.explained(run) if compiled else run)

    return _make_function


@contextlib.contextmanager
def _making_step(model: Any, convert: Callable) -> Iterator[None]:
    """While Keras makes a step function of ``model``: ``convert`` says what is called for one batch.

    Keras would compile the whole step with XLA, all replicas at once; of several, each one's stages are compiled instead.
    """
    jit_compile = model._jit_compile
    object.__setattr__(model, "_autoconvert_optionals", convert)
    if model._distribute_strategy.num_replicas_in_sync > 1:
        model._jit_compile = False
    try:
        yield
    finally:
        object.__delattr__(model, "_autoconvert_optionals")
        model._jit_compile = jit_compile


def make_predict_function(original: Callable) -> Callable:
    """Wraps Trainer.make_predict_function: the predict step takes a batch, and drops rows that were only borrowed."""

    @functools.wraps(original)
    def make_predict_function(self: Any, force: bool = False) -> Any:
        strategy: Any = self._distribute_strategy
        if not keras_scope.is_lockstep(strategy) or strategy.num_replicas_in_sync == 1:
            return original(self, force)
        if self.predict_function is not None and not force:
            return self.predict_function
        convert = self._autoconvert_optionals
        compiled = bool(self.jit_compile)

        def as_step(function: Callable) -> StepFunction:
            step = convert(function)

            @functools.wraps(self.predict_step)
            def predict(data: Any) -> Any:
                return _own_rows(step(data))

            return StepFunction(predict, compiled=compiled)

        with _making_step(self, as_step):
            original(self, force)
        run: Any = self.predict_function
        self.predict_function = xla.explained(run) if compiled else run
        return self.predict_function

    return make_predict_function


def symbolic_build(original: Callable) -> Callable:
    """Wraps Trainer._maybe_symbolic_build: the model is built from the type of replica 0's slices, or in its first step.

    Without a strategy, models are built in their first step. To build one ahead is possible where the step is Keras's own,
    which takes a batch for (x, y, sample_weight) and calls the model with x; one that a user has written may do anything.
    """

    @functools.wraps(original)
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if not keras_scope.is_lockstep(self._distribute_strategy):
            return original(self, iterator=iterator, data_batch=data_batch)
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and self._distribute_strategy.num_replicas_in_sync > 1:
            keras_scope.check_optimizer(optimizer, self._distribute_strategy)
        if not all(map(keras_weights.is_own_step, (self.train_step, self.test_step, self.predict_step))):
            return None
        if iterator is not None:
            data_batch = _replica_types(iterator._distributed_dataset.element_spec)
        data_batch = nest.map_structure(lambda v: v.values[0] if isinstance(v, DistributedValues) else v, data_batch)
        try:
            with self._distribute_strategy.scope(), keras_weights.mismatch_explained(self.train_step, data_batch):
                self._symbolic_build(data_batch=data_batch)
        except BatchError:
            raise
        except Exception:  # What is wrong with the model shows in the first step, if anything is.
            return None

    return _maybe_symbolic_build


def _replica_types(element_spec: Any) -> Any:
    """The types of replica 0's slice of a batch. Enough to build from, and unlike a batch it is not missed afterwards:
    a Python generator cannot give one back."""

    def one(spec: Any) -> Any:
        if isinstance(spec, tf.OptionalSpec):
            return None
        return spec._component_specs[0] if isinstance(spec, SlicesSpec) else spec

    return nest.map_structure(one, element_spec)


def _accumulated(model: Any, step: Callable, micro_batches: int, logs_of: keras_logs.Logs) -> Callable:
    """``step`` of a replica, in micro-batches, with what it returns beside metrics reduced over replicas."""

    def replica_step(data: Any) -> Any:
        if micro_batches == 1:
            return logs_of.of_replica(step(data))
        seen: list[Any] = []

        def micro_step(data: Any) -> Any:
            with held_updates() as held:
                logs = step(data)
            _check_one_update(model, held, micro_batches)
            seen[:] = [held, logs]
            return [grads for _, grads, _ in held], logs_of.beside_metrics(logs)

        summed, own = accumulate(micro_step, (data,), micro_batches)
        held, logs = seen
        for (optimizer, _, variables), grads in zip(held, summed, strict=True):
            optimizer.apply(grads, variables)
        # Of the metrics only the state outlives a micro-batch, so they are read now.
        return {**model.get_metrics_result(), **_summed(own)} if isinstance(logs, dict) else None

    return _checked(replica_step, step)


def _checked(replica_step: Callable, step: Callable | None = None) -> Callable:
    """``replica_step``, which runs ``step`` (default: is it), with the sample weights in its batch checked."""

    @functools.wraps(step or replica_step)
    def checked_step(data: Any) -> Any:
        with keras_weights.checked(step or replica_step, data):
            return replica_step(data)

    return checked_step


def _check_one_update(model: Any, held: list[Any], micro_batches: int) -> None:
    if len(held) > 1:
        raise UnsupportedError(
            "A train_step that updates more than once cannot be accumulated: what comes after the first update must see it. "
            f"Received: {len(held)} calls of an optimizer's apply in {type(model).__name__}.train_step, and "
            f"micro_batches={micro_batches}. Use micro_batches=1."
        )


def _summed(own: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return dict(zip(own, sum_over_replicas(list(own.values())), strict=True)) if own else {}


def _own_rows(outputs: Any) -> Any:
    """``outputs`` without the row that a replica without examples has borrowed."""
    replica = current()
    active = replica.active if replica is not None else None
    if active is None:
        return outputs
    return nest.map_structure(lambda t: t[: tf.where(active, tf.shape(t)[0], 0)] if t.shape.rank != 0 else t, outputs)


def check_finite(optimizer: Any, replica: Replica, grads: list[Any]) -> list[Any]:
    """Stops before the update unless this and every other replica's loss and gradients are finite.

    With a LossScaleOptimizer only the loss is checked: an overflowing gradient is what it expects and handles.

    Returns:
      What the update must wait for.
    """
    scales = hasattr(optimizer, "inner_optimizer")
    tensors = [] if scales else [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    tensors += [tf.stop_gradient(loss) for loss in replica.losses]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(t)) for t in tensors if t.dtype.is_floating])
    if replica.active is not None:
        finite = finite | ~replica.active
    step = tf.cast(optimizer.iterations, tf.int64)
    context = tf.distribute.get_replica_context()
    if isinstance(context, TracedContext):
        return [context.trace.mark_check(finite, _NOT_FINITE, step)]
    checked = context.merge_call(_assert_finite, args=(finite, step))
    return [] if checked is None else [checked]


def _assert_finite(strategy: Any, finite: Any, step: Any) -> Any:
    flags = [tf.convert_to_tensor(f) for f in strategy.experimental_local_results(finite)]
    return assert_all(flags, _NOT_FINITE, [strategy.experimental_local_results(step)[0]])
