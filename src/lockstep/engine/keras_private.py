"""The only module that touches Keras's internals.

Keras 3 trains unmodified under a lockstep strategy but for the places below, where its TensorFlow code assumes equal
slices or meets other replicas inside a branch. Each *seam* replaces one function by a wrapper that acts only while a
lockstep strategy is running, says why, and is guarded: if Keras's source at that place is not one we know, `install` raises
UnsupportedVersionError instead of training wrongly.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as losses

from lockstep.engine import keras_steps, shares
from lockstep.engine.context import current
from lockstep.engine.keras_fingerprints import KNOWN, SUPPORTED
from lockstep.engine.tf_private import DistributedVariable, ReduceOp
from lockstep.engine.variables import weighted
from lockstep.errors import StrategyMismatchError, UnsupportedVersionError


@dataclass(frozen=True)
class Seam:
    """One place in Keras: where, how it is wrapped, and why.

    Attributes:
      module: the module that holds it.
      name: the function, or "Class.method".
      wrap: original -> replacement.
      reason: why Keras's own does not do.
    """

    module: str
    name: str
    wrap: Callable[[Callable], Callable]
    reason: str

    @property
    def key(self) -> str:
        return f"{self.module}:{self.name}"

    def owner(self) -> tuple[Any, str]:
        """The object whose attribute is replaced, and the attribute's name."""
        *parents, attribute = self.name.split(".")
        return functools.reduce(getattr, parents, importlib.import_module(self.module)), attribute


def fingerprint(function: Callable) -> str:
    """A hash of a function's code, blind to comments, docstrings and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(_dumped(tree).encode()).hexdigest()[:16]


def _dumped(node: ast.AST) -> str:
    """Like ast.dump, but the same on every Python version: empty and absent fields are left out."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, []) and name != "kind"]
        return f"{type(node).__name__}({','.join(f'{n}={_dumped(v)}' for n, v in fields)})"
    if isinstance(node, list):
        return f"[{','.join(_dumped(v) for v in node)}]"
    return repr(node)


# Losses: each replica's share of the global mean.


def _scale_loss(original: Callable) -> Callable:
    def scale_loss_for_distribution(value: Any) -> Any:
        replica = current()
        if replica is None:
            return original(value)
        replica.losses.append(value)
        return value if replica.replicas == 1 else replica.record_share(weighted(value, replica.fraction))

    return scale_loss_for_distribution


def _unscale_loss(original: Callable) -> Callable:
    def unscale_loss_for_distribution(value: Any) -> Any:
        replica = current()
        if replica is None:
            return original(value)
        if replica.replicas == 1 or value.shape.rank != 0:  # reduction=None: one loss per example, never scaled
            return value
        return tf.math.divide_no_nan(value, tf.cast(replica.fraction, value.dtype))

    return unscale_loss_for_distribution


def _compute_loss(original: Callable) -> Callable:
    @functools.wraps(original)
    def _compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current()
        before = len(replica.shares) if replica is not None else 0
        loss = original(self, *args, **kwargs)
        if replica is None or replica.replicas == 1 or not tf.is_tensor(loss) or loss.shape.rank != 0:
            return loss
        own = type(self).compute_loss is not keras.Model.compute_loss
        if own and (not tf.executing_eagerly() or len(replica.shares) == before):
            return shares.as_share(replica, loss)
        return loss

    return _compute_loss


def _mean_update(original: Callable) -> Callable:
    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> None:
        replica = current()
        if replica is None or replica.replicas == 1:
            return original(self, values, sample_weight)
        if getattr(values, "shape", None) == ():
            # A scalar counts once a batch on one device, so each slice's counts for its share.
            if shares.is_share(replica, values):
                values = tf.math.divide_no_nan(values, tf.cast(replica.fraction, values.dtype))
            sample_weight = replica.fraction if sample_weight is None else sample_weight
        return original(self, values, sample_weight)

    return update_state


def _sum_over_replicas(values: list[tf.Tensor]) -> list[tf.Tensor]:
    return tf.distribute.get_replica_context().all_reduce(ReduceOp.SUM, values)


def _apply_mask(original: Callable) -> Callable:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = original(sample_weight, mask, dtype, reduction)
        replica = current()
        if mask is None or replica is None or replica.replicas == 1 or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        # Keras has multiplied by total/valid of this slice; the mean over the global batch needs those of all slices.
        total = tf.cast(tf.size(mask), weights.dtype)
        valid = tf.reduce_sum(tf.cast(mask, weights.dtype))
        all_total, all_valid = _sum_over_replicas([total, valid])
        here = tf.math.divide_no_nan(total, valid)
        factor = tf.math.divide_no_nan(tf.math.divide_no_nan(all_total, all_valid), here)
        return tf.where(valid > 0, weights * factor, tf.zeros_like(weights))

    return apply_mask


def _reduce_values(original: Callable) -> Callable:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        loss = original(values, sample_weight, reduction)
        replica = current()
        if tuple(values.shape) == () and reduction not in ("sum", "none", None):
            # Computed by the user from the whole slice; Keras takes it as it is.
            return losses.scale_loss_for_distribution(loss)
        by_weight = reduction == "mean_with_sample_weight" and sample_weight is not None and len(values.shape) > 0
        if not by_weight or replica is None or replica.replicas == 1:
            return loss
        # The divisor is the sum of all slices' weights: from sum/here*fraction to sum/all.
        weights: Any = sample_weight
        here = tf.reduce_sum(tf.cast(weights, loss.dtype))
        (everywhere,) = _sum_over_replicas([here])
        return replica.record_share(loss * tf.math.divide_no_nan(here, everywhere * tf.cast(replica.fraction, loss.dtype)))

    return reduce_values


# Optimizers: gradients are summed first, so that clipping, accumulation and loss-scale checks see the whole gradient.


def _apply(original: Callable) -> Callable:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        replica = current()
        if replica is None or replica.writes_are_equal:
            return original(self, grads, trainable_variables)
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        strategy = tf.distribute.get_strategy()
        if replica.replicas > 1:
            keras_steps.check_optimizer_in_scope(self, strategy)
            _check_mirrored(trainable_variables or self._trainable_variables, strategy)
        checked = keras_steps.check_finite(self, replica, grads) if strategy.extended.check_finite else []
        if replica.replicas == 1:
            with tf.control_dependencies(checked):
                return original(self, grads, trainable_variables)
        present = [i for i, g in enumerate(grads) if g is not None]
        for i, total in zip(present, _sum_over_replicas([grads[i] for i in present]), strict=True):
            grads[i] = total
        with replica.equal_writes(), tf.control_dependencies(checked):
            return original(self, grads, trainable_variables)

    return apply


def _check_mirrored(variables: list[Any], strategy: Any) -> None:
    for variable in variables:
        value = getattr(variable, "value", variable) if isinstance(variable, keras.Variable) else variable
        if not isinstance(value, DistributedVariable):
            name = getattr(variable, "path", variable.name)
            raise StrategyMismatchError(
                f"A model must be built in the scope of the strategy that trains it. Received: variable {name!r}, "
                "which was created "
                f"outside of any scope and has one copy, but would be updated by {strategy.num_replicas_in_sync} replicas. "
                "Create the model (and load its weights) inside `with strategy.scope():`."
            )


def _all_reduce_sum_gradients(original: Callable) -> Callable:
    def all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        replica = current()
        if replica is not None and replica.writes_are_equal:
            return list(grads_and_vars)
        return original(self, grads_and_vars)

    return all_reduce_sum_gradients


# State that is a sum over replicas.


def _add_of_all(original: Callable) -> Callable:
    @functools.wraps(original)
    def add(self: Any, value: Any) -> Any:
        replica, variable = current(), self._value
        is_sum = (
            isinstance(variable, DistributedVariable)
            and variable.aggregation == tf.VariableAggregation.SUM
            and variable.synchronization != tf.VariableSynchronization.ON_READ
        )
        if replica is None or replica.replicas == 1 or replica.writes_are_equal or not is_sum:
            return original(self, value)
        (total,) = _sum_over_replicas([tf.convert_to_tensor(value, variable.dtype)])
        with replica.equal_writes():
            return original(self, total)

    return add


# Randomness: replicas draw different numbers from the same seed state.

_SEED_STRIDE = 1_000_003


def _next_seed(original: Callable) -> Callable:
    def next(self: Any, ordered: bool = True) -> Any:
        replica = current()
        if replica is None or replica.replicas == 1:
            return original(self, ordered)
        with replica.equal_writes():
            seed = original(self, ordered)
        replica_id = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, seed.dtype)
        return seed + tf.stack([replica_id * tf.cast(_SEED_STRIDE, seed.dtype), tf.zeros([], seed.dtype)])

    return next


# State that belongs to the examples of a slice.


def _rnn_call(original: Callable) -> Callable:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current()
        with replica.own_writes() if replica is not None and self.stateful else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return call


_TRAINER = "keras.src.backend.tensorflow.trainer"
SEAMS = (
    Seam("keras.src.losses.loss", "scale_loss_for_distribution", _scale_loss, "slices weigh b_r/b, not 1/N"),
    Seam("keras.src.losses.loss", "unscale_loss_for_distribution", _unscale_loss, "the inverse, for the loss metrics"),
    Seam("keras.src.metrics.reduction_metrics", "Mean.update_state", _mean_update, "a slice's scalar counts for its share"),
    Seam("keras.src.losses.loss", "apply_mask", _apply_mask, "a masked mean divides by the valid steps of all slices"),
    Seam("keras.src.losses.loss", "reduce_values", _reduce_values, "a weighted mean divides by the weights of all slices"),
    Seam("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply", _apply, "clip and accumulate the summed gradient"),
    Seam(
        "keras.src.optimizers.loss_scale_optimizer", "LossScaleOptimizer.apply", _apply, "an overflow anywhere skips everywhere"
    ),
    Seam(
        "keras.src.backend.tensorflow.optimizer",
        "TFOptimizer._all_reduce_sum_gradients",
        _all_reduce_sum_gradients,
        "gradients are summed already",
    ),
    Seam("keras.src.trainers.trainer", "Trainer._compute_loss", _compute_loss, "a mean over the slice is made a share"),
    Seam("keras.src.backend.common.variables", "Variable.assign_add", _add_of_all, "a sum would add the old value N times"),
    Seam("keras.src.backend.common.variables", "Variable.assign_sub", _add_of_all, "likewise"),
    Seam("keras.src.random.seed_generator", "SeedGenerator.next", _next_seed, "dropout masks must differ between replicas"),
    Seam(
        "keras.src.layers.rnn.rnn", "RNN.call", _rnn_call, "a stateful RNN's states are rows of the slice, not to be averaged"
    ),
    Seam(_TRAINER, "TensorFlowTrainer._make_function", keras_steps.make_function, "this step takes a batch; exact logs; XLA"),
    Seam(
        _TRAINER, "TensorFlowTrainer.make_predict_function", keras_steps.make_predict_function, "likewise; drop borrowed rows"
    ),
    Seam(
        _TRAINER,
        "TensorFlowTrainer._maybe_symbolic_build",
        keras_steps.symbolic_build,
        "build from a slice, not a mean of slices",
    ),
)


@functools.cache
def install() -> None:
    """Puts the seams in place, once per process; they are inert outside of lockstep strategies.

    Raises:
      UnsupportedVersionError: Keras's source at a seam is not one we know.
    """
    if keras.config.backend() != "tensorflow":
        raise UnsupportedVersionError(
            f"lockstep trains Keras models with the TensorFlow backend. Received: Keras backend {keras.config.backend()!r}. "
            "Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    unknown = [seam.key for seam in SEAMS if not _known(seam)]
    if unknown:
        raise UnsupportedVersionError(
            f"lockstep does not know this version of Keras. Received: keras {keras.__version__}, which differs at "
            f"{', '.join(unknown)}. "
            f"Supported: {SUPPORTED}. Install one of them: pip install '{SUPPORTED}'."
        )
    for seam in SEAMS:
        owner, attribute = seam.owner()
        setattr(owner, attribute, seam.wrap(inspect.getattr_static(owner, attribute)))


def _known(seam: Seam) -> bool:
    try:
        owner, attribute = seam.owner()
        return fingerprint(getattr(owner, attribute)) in KNOWN[seam.key]
    except (AttributeError, ImportError, OSError):
        return False
