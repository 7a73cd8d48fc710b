"""Optimizers that look at a matrix as such: at its rows and columns, or at its spectrum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue
from scalewise.models.base import Weight
from scalewise.optimizers.base import OptimizerConfig, betas_issues

if TYPE_CHECKING:
    from torch import optim

BF16 = 2
"""Bytes of a number of an update while it is orthogonalized."""
HIDDEN = ("attention", "feedforward")
"""Roles of the matrices that Muon orthogonalizes."""


@register_option("optimizer", "adafactor")
@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """One mean for each row and column of a matrix's squares (Shazeer and Stern, 2018), torch's.

    Steps are relative to a weight's own size: ``lr`` is the largest of them, less as
    1 / sqrt(step) falls below it.
    """

    lr: float = 1e-2
    """Largest relative step."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices, per step, times the learning rate."""
    beta2_decay: float = -0.8
    """How fast the means begin to last: step t forgets ``t ** beta2_decay`` of them."""

    elementwise = False
    uses_whole_weights = True

    def state_bytes(self, weight: Weight, shards: int, held: int) -> int:
        """Returns the bytes of a row's and a column's means, or of a vector's squares."""
        if len(weight.shape) < 2:
            return weight.share(shards) * held
        *batch, rows, columns = weight.shape
        each = rows + columns
        for size in batch:
            each *= size
        return each * held

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields rates out of range."""
        yield from super().complaints()
        if not self.beta2_decay <= 0:
            yield ConfigIssue("optimizer.beta2_decay", self.beta2_decay, "must be 0 or less")

    def over(self, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
        """Returns torch's Adafactor."""
        from torch import optim

        return optim.Adafactor(groups, lr=self.lr, beta2_decay=self.beta2_decay)


@register_option("optimizer", "muon")
@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Orthogonalized momentum for the matrices of blocks (Jordan et al., 2024); AdamW for the rest.

    Updates are scaled as AdamW's are large (Liu et al., 2025), so that one rate serves both.
    """

    momentum: float = 0.95
    """Decay of the momentum that is orthogonalized."""
    nesterov: bool = True
    """Whether the gradient counts once more beside the momentum."""
    beta1: float = 0.9
    """Decay of the first moment of what AdamW moves."""
    beta2: float = 0.95
    """Decay of the second moment of what AdamW moves."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""

    elementwise = False
    uses_whole_weights = True
    gathers_shards = True

    def is_hidden(self, weight: Weight) -> bool:
        """Returns whether a weight is orthogonalized: a matrix of a block."""
        return weight.role in HIDDEN and len(weight.shape) == 2

    def state_bytes(self, weight: Weight, shards: int, held: int) -> int:
        """Returns the bytes of a momentum for hidden matrices, of two moments for the rest."""
        return (1 if self.is_hidden(weight) else 2) * weight.share(shards) * held

    def gathers(self, weight: Weight) -> bool:
        """Returns whether a weight is orthogonalized, for which all of its update is needed."""
        return self.is_hidden(weight)

    def scratch_bytes(self, weight: Weight, shards: int, held: int) -> int:
        """Returns the bytes of an update that is gathered, and of what it becomes."""
        return weight.count * (held + BF16) if shards > 1 and self.is_hidden(weight) else 0

    def settings(self, weight: Weight) -> dict[str, object]:
        """Returns rate, decay, and whether the weight is orthogonalized."""
        return {**super().settings(weight), "hidden": self.is_hidden(weight)}

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields rates and decays out of range."""
        yield from super().complaints()
        yield from betas_issues(self, "momentum", "beta1", "beta2")
        if not self.epsilon > 0:
            yield ConfigIssue("optimizer.epsilon", self.epsilon, "must be positive")

    def over(self, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
        """Returns Muon and torch's AdamW as one optimizer; of one kind of group, that one."""
        from torch import optim

        from scalewise.optimizers.implementations import CombinedOptimizer, ShardedMuon

        kinds: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in groups:
            kinds[group.pop("hidden")].append(group)
        parts: list[optim.Optimizer] = []
        if kinds[True]:
            parts.append(
                ShardedMuon(
                    kinds[True],
                    lr=self.lr,
                    momentum=self.momentum,
                    nesterov=self.nesterov,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if kinds[False]:
            betas = (self.beta1, self.beta2)
            rest = optim.AdamW(kinds[False], lr=self.lr, betas=betas, eps=self.epsilon, fused=True)
            parts.append(rest)
        return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)
