"""Comparison of a parallelism strategy with one device: losses, gradients and weights."""
