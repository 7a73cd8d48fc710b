"""Measurements of a training step: memory and time; imports torch."""
