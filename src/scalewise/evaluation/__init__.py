"""How good a trained model is: on held-out text, and in what it writes itself."""

ALL, AS_TRAINED = "all", "as trained"
"""How many of the held-out rows, where no number says so."""
