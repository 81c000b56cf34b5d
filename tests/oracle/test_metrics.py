"""Every metric that Keras ships: updated on slices, it says what it says on one device about the global batches."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from oracle.oracle import strategy_of

REPLICAS = 3
# Full, uneven, and fewer examples than replicas.
BATCHES = (9, 7, 2)
CLASSES = 3

ARGUMENTS: dict[str, dict[str, Any]] = {
    "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 2], "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
# Bases of other metrics, and what takes one argument only.
ABSTRACT = {"Metric", "MeanMetricWrapper"}
OF_VALUES = {"Mean", "Sum"}


def _metrics() -> list[str]:
    found = inspect.getmembers(keras.metrics, inspect.isclass)
    return sorted(name for name, value in found if issubclass(value, keras.metrics.Metric) and name not in ABSTRACT)


def _arguments(name: str, size: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """(targets, predictions) of ``size`` examples that the metric accepts, or (values,)."""
    scores = rng.dirichlet(np.ones(CLASSES), size).astype("float32")
    if name in OF_VALUES:
        return (scores,)
    labels = rng.integers(0, CLASSES, size)
    if name == "BinaryIoU":
        return labels[:, None] > 0, scores[:, :1]
    by_class = name.startswith("Sparse") or name in ("MeanIoU", "IoU")
    return (labels if by_class else np.eye(CLASSES, dtype="float32")[labels]), scores


def _weight_dtype(name: str) -> str:
    """Metrics that count in a confusion matrix warn about weights that are not whole numbers."""
    return "int64" if "IoU" in name else "float32"


@pytest.mark.parametrize("name", _metrics())
def test_a_metric_of_slices_is_that_of_the_whole(name: str) -> None:
    strategy, rng = strategy_of(REPLICAS), np.random.default_rng(5)
    alone = getattr(keras.metrics, name)(**ARGUMENTS.get(name, {}))
    with strategy.scope():
        spread = getattr(keras.metrics, name)(**ARGUMENTS.get(name, {}))

    def updating(metric: keras.Metric) -> Any:
        return lambda batch, weights: metric.update_state(*batch, sample_weight=weights)

    # Both in graphs: with weights, R2Score does not compute the same in eager mode.
    update_alone = tf.function(updating(alone), reduce_retracing=True)
    update_spread = tf.function(lambda *slices: strategy.run(updating(spread), slices), reduce_retracing=True)

    for size in BATCHES:
        batch, weights = _arguments(name, size, rng), rng.integers(1, 4, size).astype(_weight_dtype(name))
        update_alone(batch, weights)
        update_spread(*strategy.split((batch, weights)))
    want = np.asarray(alone.result())
    assert np.all(np.isfinite(want))
    np.testing.assert_allclose(np.asarray(spread.result()), want, rtol=2e-6)
    with strategy.scope():
        np.testing.assert_allclose(np.asarray(spread.result()), want, rtol=2e-6)
