"""Handwritten digits: 1,797 scans of 8 × 8 pixels that ship with scikit-learn, and a convolutional net for them.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998;
scikit-learn holds the test part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.training.data import Examples, Splits

if TYPE_CHECKING:
    import keras

__all__ = ["load", "model"]


def load(test_fraction: float = 0.2, split_seed: int = 0) -> Splits:
    """The digits, in a fixed split with the same share of each digit on both sides.

    Args:
        test_fraction: the share of examples held out, between 0 and 1.
        split_seed: decides which examples those are; apart from the seed of training, so that runs with several
            seeds are tested on the same examples.

    Returns:
        Inputs [examples, 8, 8, 1] as float32 in [0, 1]; targets [examples] as int32 from 0 to 9.

    >>> len(load().train), len(load().test)
    (1437, 360)
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    scans, digits = load_digits(return_X_y=True)
    # Each scan is 64 counts of ink from 0 to 16.
    inputs = (scans / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    targets = digits.astype("int32")
    # Any: scikit-learn's annotations allow for lists and sparse matrices too.
    halves: Any = train_test_split(inputs, targets, test_size=test_fraction, random_state=split_seed, stratify=targets)
    train_inputs, test_inputs, train_targets, test_targets = halves
    return Splits(Examples(train_inputs, train_targets), Examples(test_inputs, test_targets))


def model(filters: int = 32, dropout: float = 0.5) -> keras.Model:
    """A small convolutional net from a scan [batch, 8, 8, 1] to probabilities [batch, 10].

    Args:
        filters: channels of the first two convolutions; the third has twice as many.
        dropout: the share of features dropped before the last layer while training, from 0 to below 1; half of it
            is dropped before the third convolution.
    """
    import keras

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Dropout(dropout / 2),
            keras.layers.Conv2D(2 * filters, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(10, activation="softmax"),
        ],
        name="digits",
    )
