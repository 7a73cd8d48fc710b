"""Training objectives."""

from scalewise.objectives.base import IGNORED, ObjectiveConfig
from scalewise.objectives.captioning import Captioning
from scalewise.objectives.causal_lm import CausalLM
from scalewise.objectives.classification import Classification
from scalewise.objectives.dpo import DPO
from scalewise.objectives.grpo import GRPO
from scalewise.objectives.module import UserModule
from scalewise.objectives.seq2seq import Seq2Seq

__all__ = [
    "DPO",
    "GRPO",
    "IGNORED",
    "Captioning",
    "CausalLM",
    "Classification",
    "ObjectiveConfig",
    "Seq2Seq",
    "UserModule",
]
