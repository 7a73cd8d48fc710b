"""Configs of optimizers whose updates depend on whole matrices: Adafactor and Muon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.errors import ConfigIssue
from scalewise.models.base import Weight
from scalewise.optimizers.base import OptimizerConfig, betas_issues
from scalewise.registry import register_option

BF16_BYTES = 2
"""Bytes per element of an update during orthogonalization."""
HIDDEN_ROLES = ("attention", "feedforward")
"""Roles of the matrices that Muon orthogonalizes."""


@register_option("optimizer", "adafactor")
@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor: a factored second moment per matrix (Shazeer and Stern, 2018), by torch.

    Steps are relative to the size of a parameter: ``lr`` is the largest relative step, and
    1 / sqrt(step) replaces it once that is smaller.
    """

    lr: float = 1e-2
    """Largest relative step."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices, multiplied by the learning rate at each step."""
    beta2_decay: float = -0.8
    """Exponent of the second moment's decay: step t gives the newest gradient the weight ``t **
    beta2_decay``."""

    implementation = "scalewise.optimizers.implementations"
    elementwise = False
    uses_whole_weights = True

    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of row and column means of a matrix, or of the second moment of a vector."""
        if len(weight.shape) < 2:
            return weight.shard_numel(shards) * element_bytes
        *batch, rows, columns = weight.shape
        numel = rows + columns
        for size in batch:
            numel *= size
        return numel * element_bytes

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each hyperparameter out of range."""
        yield from super().validate()
        if not self.beta2_decay <= 0:
            yield ConfigIssue("optimizer.beta2_decay", self.beta2_decay, "must be 0 or less")


@register_option("optimizer", "muon")
@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon: orthogonalized momentum for matrices of blocks (Jordan et al., 2024), else AdamW.

    Updates are scaled to the size of AdamW's (Liu et al., 2025), so that one learning rate serves
    both.
    """

    momentum: float = 0.95
    """Decay rate of the momentum that is orthogonalized."""
    nesterov: bool = True
    """Whether Nesterov momentum is used."""
    beta1: float = 0.9
    """Decay rate of the first moment of AdamW."""
    beta2: float = 0.95
    """Decay rate of the second moment of AdamW."""
    epsilon: float = 1e-8
    """Constant added to the root of AdamW's second moment."""

    implementation = "scalewise.optimizers.implementations"
    elementwise = False
    uses_whole_weights = True
    gathers_shards = True

    def is_hidden(self, weight: Weight) -> bool:
        """Whether a weight is a matrix of a block, which is orthogonalized."""
        return weight.role in HIDDEN_ROLES and len(weight.shape) == 2

    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of the momentum of hidden matrices, or of both moments of other parameters."""
        return (1 if self.is_hidden(weight) else 2) * weight.shard_numel(shards) * element_bytes

    def gathers_update(self, weight: Weight) -> bool:
        """Whether a weight is orthogonalized, which requires its unsharded update."""
        return self.is_hidden(weight)

    def scratch_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of a gathered update and of its orthogonalization."""
        return (
            weight.numel * (element_bytes + BF16_BYTES)
            if shards > 1 and self.is_hidden(weight)
            else 0
        )

    def group_settings(self, weight: Weight) -> dict[str, object]:
        """Learning rate, weight decay, and whether the weight is orthogonalized."""
        return {**super().group_settings(weight), "hidden": self.is_hidden(weight)}

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each hyperparameter out of range."""
        yield from super().validate()
        yield from betas_issues(self, "momentum", "beta1", "beta2")
        if not self.epsilon > 0:
            yield ConfigIssue("optimizer.epsilon", self.epsilon, "must be positive")
