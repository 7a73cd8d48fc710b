"""What every objective answers: what of a batch adds up over tokens, and what is made of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from scalewise.config.registry import option_name
from scalewise.errors import ConfigIssue
from scalewise.precision import FloatFormat
from scalewise.torch_compile import CompileScope
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from scalewise.models.base_module import ModelModule
    from scalewise.run_config import RunConfig

IGNORED = -100
"""A label that takes no part in the loss."""


@dataclass(frozen=True)
class ObjectiveConfig(ABC):
    """A loss as a spec: the sum over a batch of what is measured, to be divided into means.

    ``pairs``: whether a row of the data is two sequences, one preferred to the other.
    ``extra_metrics``: what a loss holds besides itself, by the end of a metric's key.
    ``is_user_defined``:
    whether it is a module of the user's, which decides about model, data and optimizer as well.
    ``needs_encoder_decoder``: whether an encoder reads what a decoder answers. ``reads_images``:
    whether what is read
    are pictures. ``is_scalar``: whether one number is all that adds up over tokens. ``trace_only``:
    whether plans know it by a trace alone; ``model_kind``: as what.
    """

    loss_chunk: int | None = None
    """Chunk size of the loss: logits of at most this many positions exist at once, in tokens;
    null: all."""

    pairs: ClassVar[bool] = False
    extra_metrics: ClassVar[tuple[str, ...]] = ()
    is_user_defined: ClassVar[bool] = False
    needs_encoder_decoder: ClassVar[bool] = False
    reads_images: ClassVar[bool] = False
    is_scalar: ClassVar[bool] = False
    trace_only: ClassVar[bool] = False
    model_kind: ClassVar[str] = ""

    @property
    def rollouts_per_sample(self) -> int:
        """Returns how often the model itself answers each row; 0: it reads what is there."""
        return 0

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Returns the ends of the keys of all that a loss holds."""
        return ("loss", *self.extra_metrics)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields figures out of range."""
        if self.loss_chunk is not None and self.loss_chunk < 1:
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, "must be 1 or more, or null")

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields data of another kind than this objective reads, and a head of another."""
        chosen = run.choices.get("data", option_name(run.data))
        if run.data.pairs:
            reason = "has rows of two answers each, which another objective compares"
            yield ConfigIssue("data", chosen, reason, "set objective=dpo, or data=chat")
        if run.data.classes:
            reason = "has rows that are of a class each, which another objective tells apart"
            yield ConfigIssue("data", chosen, reason, "set objective=classification, or data=text")
        if run.data.target_length:
            reason = "has answers apart from their questions, which an encoder reads"
            yield ConfigIssue("data", chosen, reason, "set objective=seq2seq, or data=chat")
        if run.data.image_size:
            reason = "has pictures, which another objective tells in words"
            yield ConfigIssue("data", chosen, reason, "set objective=captioning, or data=text")
        if run.model.classes:
            reason = "has no logits of tokens, which this objective is about"
            fix = "set model.classes=null, or objective=classification"
            yield ConfigIssue("model.classes", run.model.classes, reason, fix)

    def validate_planning(self, run: RunConfig, subject: str) -> Iterator[ConfigIssue]:
        """Yields what of a run asks the ledger, which knows nothing of ``subject``."""
        planned = {
            "plan.search": (run.plan.search.value, "none"),
            "plan.fit": (run.plan.fit.value, "none"),
            "launch.refuse_unfit": (run.launch.refuse_unfit, False),
        }
        for key, (value, neutral) in planned.items():
            if value != neutral:
                reason = f"asks the ledger, and {subject} is known only by trace"
                yield ConfigIssue(key, value, reason, f"set {format_override(key, neutral)}")

    @property
    def reference_objective(self) -> ObjectiveConfig | None:
        """Returns what the model as it was at first is asked about a batch; None: nothing."""
        return None

    @property
    def unregularized(self) -> ObjectiveConfig:
        """Returns the objective that held-out rows are measured by, without regularization."""
        return self

    @abstractmethod
    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Returns what adds up over tokens whose labels are not ``IGNORED``, in fp32."""

    def loss(self, token_sums: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum over a batch from what ``token_sums`` gave of all its tokens.

        A scalar, or a vector of the loss and, after it, the ``extra_metrics``.
        """
        return token_sums

    def count_targets(self, labels_BT: Tensor) -> Tensor:
        """Returns how many the loss of a batch is summed over, and divided by: labels, or pairs."""
        return (labels_BT != IGNORED).sum()

    def takes_gradients_in_forward(self, run: RunConfig) -> bool:
        """Returns whether the gradients of a loss in pieces are taken with it, in forward.

        Then no logits are made twice. fp16 scales a loss before gradients, a compiler cannot see
        through, and a layout must not have several passes wait, nor give weights away in between.
        """
        return (
            self.loss_chunk is not None
            and self.is_scalar
            and run.parallelism.backward_follows_forward
            and run.precision.compute is not FloatFormat.fp16
            and run.compile.scope is not CompileScope.whole
        )

    def apply(self, module: ModelModule, *, in_forward: bool) -> None:
        """Has a module take the sums itself where they are taken in pieces."""
        if self.loss_chunk is not None:
            weights = module.head_parameters if in_forward else None
            module.loss = partial(self.chunked_loss, weights=weights)

    def chunked_loss(
        self,
        head: Callable[[Tensor], Tensor],
        x_BTW: Tensor,
        labels_BT: Tensor,
        weights: Callable[[], Iterable[Parameter]] | None = None,
    ) -> Tensor:
        """Returns ``summed(head(x), labels)``, with the logits of ``loss_chunk`` tokens at once.

        ``weights``: gives those of the head if gradients are taken at once; None: pieces are made
        once more for backward.
        """
        from scalewise.strategies.chunked_loss import (
            chunked_loss_recomputed,
            chunked_loss_with_gradients,
        )

        def piece(x_BCW: Tensor, labels_BC: Tensor) -> Tensor:
            return self.sum_over_tokens(head(x_BCW), labels_BC)

        assert self.loss_chunk is not None
        if weights is None:
            return chunked_loss_recomputed(piece, x_BTW, labels_BT, self.loss_chunk)
        return chunked_loss_with_gradients(piece, x_BTW, labels_BT, self.loss_chunk, weights())
