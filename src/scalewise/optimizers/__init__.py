"""How weights move, as specs: what is held for each weight, and the optimizer itself."""

from scalewise.optimizers.adam import AdamWConfig
from scalewise.optimizers.base import OptimizerConfig
from scalewise.optimizers.sgd import SGDConfig

__all__ = ["AdamWConfig", "OptimizerConfig", "SGDConfig"]
