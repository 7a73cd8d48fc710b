"""What is minimised."""

from scalewise.objectives.base import IGNORED, Objective
from scalewise.objectives.causal_lm import CausalLM
from scalewise.objectives.dpo import DPO

__all__ = ["DPO", "IGNORED", "CausalLM", "Objective"]
