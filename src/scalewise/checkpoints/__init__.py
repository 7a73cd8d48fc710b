"""Checkpoints: schedule, format on disk, and loading of trained models."""
