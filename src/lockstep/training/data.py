"""What a data source hands to a run, and how it becomes a dataset of global batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

__all__ = ["Examples", "Splits", "evaluation_batches", "training_batches"]


@dataclass(frozen=True)
class Examples:
    """Inputs and targets, row by row.

    Args:
        inputs: [examples, ...], what the model takes.
        targets: [examples, ...], what the loss compares its output with.
    """

    inputs: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                "Inputs and targets must have the same number of rows. "
                f"Received: inputs of shape {self.inputs.shape}, targets of shape {self.targets.shape}."
            )

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Splits:
    """A data set: what is trained on, and what is held out to test the trained model."""

    train: Examples
    test: Examples


def training_batches(examples: Examples, global_batch: int, seed: int) -> tf.data.Dataset:
    """Global batches of all ``examples``, in an order that changes with each epoch and follows from ``seed``.

    The last batch holds what is left and may be smaller: replicas weight uneven slices exactly.
    """
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((examples.inputs, examples.targets))
    shuffled = dataset.shuffle(len(examples), seed=seed, reshuffle_each_iteration=True)
    return shuffled.batch(global_batch).prefetch(tf.data.AUTOTUNE)


def evaluation_batches(examples: Examples, global_batch: int) -> tf.data.Dataset:
    """Global batches of all ``examples`` in their own order."""
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((examples.inputs, examples.targets))
    return dataset.batch(global_batch).prefetch(tf.data.AUTOTUNE)
