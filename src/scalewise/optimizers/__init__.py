"""Optimizer configs and optimizers: state per parameter, parameter groups, update rules."""

from scalewise.optimizers.base import OptimizerConfig
from scalewise.optimizers.config import AdamWConfig, SGDConfig

__all__ = ["AdamWConfig", "OptimizerConfig", "SGDConfig"]
