"""What is trained: sizes and synthetic data of each workload. Knows no framework, so that every engine can import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SEED = 7
CLASSES = 10
LEARNING_RATE = 1e-3
# The data repeats after this many global batches: enough not to stay in the cache of a core, little to hold.
BATCHES = 16
# An epoch of warm-up, then this many that are measured, all of one length.
MEASURED_EPOCHS = 4

# The sizes of the models, which benchmarks/keras_models.py and benchmarks/torch_models.py both build from.
MLP_UNITS = 2048
CNN_FILTERS = (8, 16)
CNN_UNITS = 64
RESNET_FILTERS = (16, 32, 64)
RESNET_BLOCKS = 3
VOCABULARY = 8192
SEQUENCE = 64
WIDTH = 128
HEADS = 4
FEED_FORWARD = 512
ENCODER_BLOCKS = 2


@dataclass(frozen=True)
class Workload:
    """One model and its batches.

    Args:
      name: as in ``--workloads``.
      title: what a report says about it.
      per_replica_batch: examples per step and replica.
      steps: measured steps, for some seconds of work; each is one optimizer update.
      shape: of one example.
      tokens: whether examples are numbers of words instead of pixels.
    """

    name: str
    title: str
    per_replica_batch: int
    steps: int
    shape: tuple[int, ...]
    tokens: bool = False

    def data(self, batch: int) -> tuple[Any, Any]:
        """`BATCHES` batches of inputs and classes, ``[BATCHES * batch, ...]`` and ``[BATCHES * batch]``."""
        random = np.random.default_rng(SEED)
        examples = BATCHES * batch
        if self.tokens:
            inputs = random.integers(0, VOCABULARY, (examples, *self.shape), dtype=np.int32)
        else:
            inputs = random.standard_normal((examples, *self.shape), dtype=np.float32)
        return inputs, random.integers(0, CLASSES, examples, dtype=np.int32)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp", f"MLP 784-{MLP_UNITS}-{MLP_UNITS}-10", 64, 120, (784,)),
        Workload("cnn", "CNN, two 3x3 convolutions, 28x28x1", 64, 1000, (28, 28, 1)),
        Workload("resnet20", "ResNet-20 with BatchNormalization, 32x32x3", 8, 160, (32, 32, 3)),
        Workload(
            "encoder", f"Transformer encoder, {ENCODER_BLOCKS} blocks, {SEQUENCE} x {WIDTH}", 8, 200, (SEQUENCE,), tokens=True
        ),
    )
}
