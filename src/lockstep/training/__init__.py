"""What a training run needs around Keras ``fit``: the recipe, data, progress, logs."""
