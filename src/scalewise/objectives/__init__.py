"""Training objectives."""

from scalewise.objectives.config import (
    DPO,
    GRPO,
    IGNORED,
    Captioning,
    CausalLM,
    Classification,
    ObjectiveConfig,
    Seq2Seq,
    UserModule,
)

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
