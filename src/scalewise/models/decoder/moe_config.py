"""Fields of a decoder whose feedforward is a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from scalewise.errors import ConfigIssue
from scalewise.typed_override import format_override


class RouterScore(StrEnum):
    """Function from router logits to the scores of experts."""

    softmax = "softmax"
    """Softmax over all experts. With ``norm_topk``, the same as a softmax over the chosen ones."""
    sigmoid = "sigmoid"
    """Sigmoid of each logit (DeepSeek-V3)."""


EXPERT_MATRICES = ("gate", "up", "down")
"""Matrices of a SwiGLU expert."""
EXPERTS_MODULE = "feedforward.experts"
"""Name, within a block, of the module of routed experts."""


EXPERT_OPTIONS = (
    "shared_experts",
    "dense_layers",
    "capacity_factor",
    "routed_scaling",
    "aux_loss",
    "router_z_loss",
    "balance_rate",
)
"""Options that have no effect without ``experts``."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts: a router chooses experts for each token (Shazeer et al., 2017).

    The output of a token is ``sum_e weight_e down_e(SiLU(gate_e(x)) * up_e(x))`` over its experts,
    plus that of the shared experts. No token is dropped without ``capacity_factor``.
    """

    experts: int | None = None
    """Number of routed experts per block; null: a dense feedforward instead of experts."""
    experts_per_token: int = 2
    """Number of experts that a token is routed to."""
    expert_dim: int | None = None
    """Width of the hidden layer of an expert, in features; null: ``feedforward``."""
    shared_experts: int = 0
    """Number of experts that every token passes through; they are one dense feedforward."""
    router_score: RouterScore = RouterScore.softmax
    """Scores of experts: ``softmax`` (Mixtral, Qwen3-MoE) or ``sigmoid`` (DeepSeek-V3)."""
    norm_topk: bool = True
    """Whether the scores of the chosen experts are divided by their sum."""
    routed_scaling: float = 1.0
    """Factor of the output of the routed experts (DeepSeek-V2: 16)."""
    dense_layers: int = 0
    """Number of first blocks with a dense feedforward of width ``feedforward`` instead of
    experts."""
    aux_loss: float = 0.0
    """Coefficient of the load-balancing loss ``E sum_e f_e P_e`` of each sequence, f: share of its
    tokens routed to an expert, P: mean score (Fedus et al., 2021; DeepSeek-V3, section 2.1.2)."""
    router_z_loss: float = 0.0
    """Coefficient of the router z-loss ``mean(logsumexp(logits)^2)`` (Zoph et al., 2022)."""
    balance_rate: float = 0.0
    """Step of the biases that balance the load without a loss: after each optimizer step, the bias
    of an expert below the mean load grows, and that of one above shrinks (DeepSeek-V3)."""

    capacity_factor: float | None = None
    """Most tokens of an expert in training, relative to a balanced load of the forward pass of a
    rank; later tokens pass it by (Switch Transformer); null: no token is dropped."""

    def expert_capacity(self, tokens: int) -> int | None:
        """Return the most tokens that one expert takes of ``tokens``; None: all."""
        if self.capacity_factor is None:
            return None
        mean_load = tokens * self.experts_per_token / self.routed_experts
        return min(tokens, ceil(self.capacity_factor * mean_load))

    @property
    def routed_experts(self) -> int:
        """Number of routed experts; 0 if the feedforward is dense."""
        return self.experts or 0

    def has_experts(self, layer: int) -> bool:
        """Whether the feedforward of a layer is a mixture of experts."""
        return bool(self.experts) and layer >= self.dense_layers

    def validate_experts(self) -> Iterator[ConfigIssue]:
        """Yield issues of the fields of a mixture of experts."""
        for name in ("experts", "experts_per_token", "expert_dim"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                fix = f"set {format_override(f'model.{name}', getattr(ExpertsConfig, name) or 2)}"
                yield ConfigIssue(f"model.{name}", value, "must be positive", fix)
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            fix = "set model.capacity_factor=1.25, or model.capacity_factor=null"
            key = "model.capacity_factor"
            yield ConfigIssue(key, self.capacity_factor, "must be positive", fix)
        for name in ("shared_experts", "dense_layers", "aux_loss", "router_z_loss", "balance_rate"):
            if getattr(self, name) < 0:
                value, fix = getattr(self, name), f"set model.{name}=0"
                yield ConfigIssue(f"model.{name}", value, "must be 0 or more", fix)
        if self.routed_scaling <= 0:
            fix = "set model.routed_scaling=1.0"
            yield ConfigIssue("model.routed_scaling", self.routed_scaling, "must be positive", fix)
        for name in EXPERT_OPTIONS if self.experts is None else ():
            value, default = getattr(self, name), getattr(ExpertsConfig, name)
            if value != default:
                fix = f"set {format_override(f'model.{name}', default)}"
                yield ConfigIssue(f"model.{name}", value, "requires model.experts", fix)
        if self.experts is not None and 0 < self.experts < self.experts_per_token:
            reason = f"exceeds model.experts={self.experts}"
            fix = f"set model.experts_per_token={self.experts}"
            yield ConfigIssue("model.experts_per_token", self.experts_per_token, reason, fix)
