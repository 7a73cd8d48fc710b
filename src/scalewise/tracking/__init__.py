"""Run files and Weights & Biases tracking."""
