"""How weights move, as specs: what is held for each weight, and the optimizer itself."""

from scalewise.optimizers.adam import AdamW
from scalewise.optimizers.base import Optimizer
from scalewise.optimizers.sgd import SGD

__all__ = ["SGD", "AdamW", "Optimizer"]
