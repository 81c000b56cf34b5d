"""The list of all places where Keras's internals are touched.

Keras 3 trains unmodified under a lockstep strategy but for the places below, where its TensorFlow code assumes equal
slices or meets other replicas inside a branch. Each *seam* replaces one function by a wrapper that acts only while a
lockstep strategy is running, says why, and is guarded: if Keras's source at that place is not one we know, `install` raises
UnsupportedVersionError instead of training wrongly. The wrappers are in `keras_losses`, `keras_optimizers`,
`keras_layers`, `keras_states` and `keras_steps`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from lockstep.engine import keras_layers, keras_losses, keras_optimizers, keras_states, keras_steps, update
from lockstep.engine.keras_fingerprints import KNOWN, SUPPORTED
from lockstep.errors import UnsupportedVersionError


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


_OPTIMIZER = "keras.src.backend.tensorflow.optimizer"
_TRAINER = "keras.src.backend.tensorflow.trainer"
SEAMS = (
    Seam("keras.src.losses.loss", "scale_loss_for_distribution", keras_losses.scale_loss, "slices weigh b_r/b, not 1/N"),
    Seam(
        "keras.src.losses.loss", "unscale_loss_for_distribution", keras_losses.unscale_loss, "the inverse, for the loss metrics"
    ),
    Seam(
        "keras.src.metrics.reduction_metrics",
        "Mean.update_state",
        keras_losses.mean_update,
        "a slice's scalar counts for its share",
    ),
    Seam(
        "keras.src.losses.loss", "apply_mask", keras_losses.apply_mask, "a masked mean divides by the valid steps of all slices"
    ),
    Seam(
        "keras.src.losses.loss",
        "reduce_values",
        keras_losses.reduce_values,
        "a weighted mean divides by the weights of all slices",
    ),
    Seam(
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer.apply",
        keras_optimizers.apply,
        "clip and accumulate the summed gradient",
    ),
    Seam(
        "keras.src.optimizers.loss_scale_optimizer",
        "LossScaleOptimizer.apply",
        keras_optimizers.apply,
        "an overflow anywhere skips everywhere",
    ),
    Seam(
        _OPTIMIZER,
        "TFOptimizer._all_reduce_sum_gradients",
        keras_optimizers.all_reduce_sum_gradients,
        "gradients are summed already",
    ),
    Seam(_OPTIMIZER, "TFOptimizer.add_variable_from_reference", update.add_slot, "each replica holds a shard of the slots"),
    Seam(_OPTIMIZER, "TFOptimizer._backend_update_step", update.update_step, "each replica updates its shards"),
    Seam(_OPTIMIZER, "TFOptimizer._apply_weight_decay", update.weight_decay, "shards decay with their update"),
    Seam(
        "keras.src.trainers.trainer",
        "Trainer._compute_loss",
        keras_losses.compute_loss,
        "a mean over the slice is made a share",
    ),
    Seam(
        "keras.src.backend.common.variables",
        "Variable.assign_add",
        keras_layers.add_of_all,
        "a sum would add the old value N times",
    ),
    Seam("keras.src.backend.common.variables", "Variable.assign_sub", keras_layers.add_of_all, "likewise"),
    Seam(
        "keras.src.random.seed_generator",
        "SeedGenerator.next",
        keras_layers.next_seed,
        "dropout masks must differ between replicas",
    ),
    Seam(
        "keras.src.layers.rnn.rnn",
        "RNN.call",
        keras_states.rnn_call,
        "a stateful RNN's states are rows, each of one example",
    ),
    Seam(
        "keras.src.layers.normalization.batch_normalization",
        "BatchNormalization._moments",
        keras_layers.moments,
        "sync_batch_norm=True; and masked statistics, which Keras does not synchronize",
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
