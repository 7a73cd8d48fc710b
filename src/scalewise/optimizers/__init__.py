"""Optimizer configs and optimizers: state per parameter, parameter groups, update rules."""

from scalewise.optimizers.adam import AdamWConfig
from scalewise.optimizers.base import OptimizerConfig
from scalewise.optimizers.sgd import SGDConfig

__all__ = ["AdamWConfig", "OptimizerConfig", "SGDConfig"]
