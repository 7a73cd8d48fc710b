"""Where measurements go: the run's folder and Weights & Biases."""
