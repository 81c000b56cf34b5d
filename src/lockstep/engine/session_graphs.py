"""Graphs that a TensorFlow 1 session runs: refused, because a step that is traced once for all replicas is a function.

Graphs of functions are another thing: those of a tf.function, of ``tf.compat.v1.wrap_function``, of a dataset's map, of a
Keras model, of a SavedModel. Whatever they are inside of, eager mode is outermost there.
"""

from __future__ import annotations

import tensorflow as tf

from lockstep.errors import UnsupportedError


def refuse(what: str) -> None:
    """Raises UnsupportedError where ``what`` would be added to a graph that only a session can run."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return
    raise UnsupportedError(
        f"lockstep computes in eager mode and in tf.function, not in a TF1 graph that a session runs. Received: {what} while "
        "a TF1 graph is built (tf.Graph().as_default(), or tf.compat.v1.disable_eager_execution()). "
        "Do it outside of the graph, in a tf.function say, or use tf.distribute.MirroredStrategy for TF1 graphs."
    )
