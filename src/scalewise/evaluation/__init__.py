"""Evaluation of trained models on validation data, and sampling from them."""

ALL, AS_TRAINED = "all", "as trained"
"""Named numbers of validation samples: all of them, or as many as during training."""
