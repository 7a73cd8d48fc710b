"""Checkpoints: when they are written, and how they lie on disk."""
