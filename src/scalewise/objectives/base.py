"""Base class of training objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from scalewise.errors import ConfigIssue
from scalewise.precision import FloatFormat
from scalewise.torch_compile import CompileScope

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from scalewise.models.base_module import ModelModule
    from scalewise.run_config import RunConfig

IGNORED = -100
"""Label of positions without a loss."""


@dataclass(frozen=True)
class ObjectiveConfig(ABC):
    """Config of a training objective.

    An objective computes sums over a batch: the loss and its ``extra_metrics``. They are divided by
    the number of targets of the global batch.
    """

    loss_chunk: int | None = None
    """Chunk size of the loss: logits of at most this many positions exist at once, in tokens;
    null: all."""

    pairs: ClassVar[bool] = False
    """Whether a sample is a pair of sequences, the first of which is preferred."""
    extra_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that are computed with the loss, as suffixes of metric keys."""
    is_user_defined: ClassVar[bool] = False
    """Whether a user-defined module replaces model, data, optimizer and schedule."""
    needs_encoder_decoder: ClassVar[bool] = False
    """Whether the model must be an encoder-decoder model."""
    reads_images: ClassVar[bool] = False
    """Whether the model inputs are images."""
    is_scalar: ClassVar[bool] = False
    """Whether ``sum_over_tokens`` returns a scalar."""
    trace_only: ClassVar[bool] = False
    """Whether only a trace can plan the run, not the analytic memory and time models."""
    model_kind: ClassVar[str] = ""
    """Kind of models of the objective, for messages."""

    @property
    def rollouts_per_sample(self) -> int:
        """Number of answers that the model samples for each sample; 0: it samples none."""
        return 0

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Suffixes of the metric keys of the loss and its extra metrics."""
        return ("loss", *self.extra_metrics)

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        if self.loss_chunk is not None and self.loss_chunk < 1:
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, "must be 1 or more, or null")

    @property
    def reference_objective(self) -> ObjectiveConfig | None:
        """Objective that the reference model evaluates; None: there is no reference model."""
        return None

    @property
    def unregularized(self) -> ObjectiveConfig:
        """Objective of validation, without regularization."""
        return self

    @abstractmethod
    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Sums over the positions whose label is not ``IGNORED``, in fp32."""

    def loss(self, token_sums: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Loss of a batch, summed over its targets.

        Args:
            token_sums: Result of ``sum_over_tokens`` for the batch.
            batch: Tensors of the batch.

        Returns:
            A scalar, or a vector of the loss and the ``extra_metrics``.
        """
        return token_sums

    def count_targets(self, labels_BT: Tensor) -> Tensor:
        """Number of targets in a batch, by which the loss is divided: labels, pairs or answers."""
        return (labels_BT != IGNORED).sum()

    def takes_gradients_in_forward(self, run: RunConfig) -> bool:
        """Whether the gradients of a chunked loss are computed in the forward pass.

        This avoids recomputing the logits. It requires a strategy that runs backward directly
        after forward, and does not work with fp16 loss scaling or a fully compiled model.
        """
        return (
            self.loss_chunk is not None
            and self.is_scalar
            and run.parallelism.backward_follows_forward
            and run.precision.compute is not FloatFormat.fp16
            and run.compile.scope is not CompileScope.whole
        )

    def apply(self, module: ModelModule, *, in_forward: bool) -> None:
        """Set the chunked loss of a module, if ``loss_chunk`` is set."""
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
        """``sum_over_tokens(head(x), labels)``, with logits of one chunk at a time.

        Args:
            head: Function from hidden states to logits.
            x_BTW: Hidden states.
            labels_BT: Labels.
            weights: Function that returns the head parameters, if gradients are computed in the
                forward pass; None: chunks are recomputed in the backward pass.
        """
        from scalewise.strategies.chunked_loss import (
            chunked_loss_recomputed,
            chunked_loss_with_gradients,
        )

        def chunk_sums(x_BCW: Tensor, labels_BC: Tensor) -> Tensor:
            return self.sum_over_tokens(head(x_BCW), labels_BC)

        assert self.loss_chunk is not None
        if weights is None:
            return chunked_loss_recomputed(chunk_sums, x_BTW, labels_BT, self.loss_chunk)
        return chunked_loss_with_gradients(chunk_sums, x_BTW, labels_BT, self.loss_chunk, weights())
