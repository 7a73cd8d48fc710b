"""How good a trained model is: on held-out text, and in what it writes itself."""
