"""Measurements of a training step: memory, time and collectives; imports torch."""
