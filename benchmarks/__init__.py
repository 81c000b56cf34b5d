"""Engines of data-parallel training side by side, on the same models, batches and cores."""
