"""What is minimised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import option
from scalewise.errors import Complaint

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.module import ModelModule

IGNORED = -100
"""A label that takes no part in the loss."""


@option("objective", "causal_lm")
@dataclass(frozen=True)
class CausalLM:
    """Predict the next token: cross-entropy in nats."""

    label_smoothing: float = 0.0
    """Share of the target probability spread over the whole vocabulary."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time, made once more for backward; None: of all tokens."""

    def complaints(self) -> Iterator[Complaint]:
        """Yields figures out of range."""
        if self.loss_chunk is not None and self.loss_chunk < 1:
            yield Complaint("objective.loss_chunk", self.loss_chunk, "must be 1 or more, or null")
        if not 0 <= self.label_smoothing < 1:
            yield Complaint(
                "objective.label_smoothing", self.label_smoothing, "is a share, in [0, 1)"
            )

    def apply(self, module: ModelModule) -> None:
        """Has a module take the loss itself where it is taken in pieces."""
        if self.loss_chunk is not None:
            module.loss = self.in_pieces

    def in_pieces(
        self, head: Callable[[Tensor], Tensor], x_BTW: Tensor, labels_BT: Tensor
    ) -> Tensor:
        """Returns ``loss(head(x), labels)`` with the logits of ``loss_chunk`` tokens at a time."""
        from torch.utils.checkpoint import checkpoint

        def piece(x_BCW: Tensor, labels_BC: Tensor) -> Tensor:
            return self.loss(head(x_BCW), labels_BC)

        assert self.loss_chunk is not None
        each = max(1, self.loss_chunk // x_BTW.shape[0])
        parts = [slice(at, at + each) for at in range(0, labels_BT.shape[1], each)]
        sums: list[Tensor] = [
            checkpoint(piece, x_BTW[:, part], labels_BT[:, part], use_reentrant=False)
            for part in parts
        ]
        return sum(sums[1:], sums[0])

    def loss(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Returns the sum over all labels that are not ``IGNORED``, a scalar in fp32."""
        from torch.nn import functional as F

        return F.cross_entropy(
            logits_BTV.flatten(0, 1).float(),
            labels_BT.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
