"""Layouts alive: Lightning strategies that build, cut, step, clip and save a model."""
