"""Losses of objectives: sums over tokens, the loss of a batch, and its number of targets.

The loss may be summed over chunks of tokens, so that only the logits of one chunk exist at a time.

Shape suffixes: B sequences; T tokens; N tokens of all sequences; V vocabulary; C tokens of a chunk;
W width; P pairs of sequences (DPO, the chosen answer first) or prompts (GRPO); G answers to one
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.models.base_module import ModelModule
from scalewise.models.init import local_tensor
from scalewise.objectives.config import (
    DPO,
    GRPO,
    IGNORED,
    CausalLM,
    Classification,
    LogProbabilities,
    NextToken,
    ObjectiveConfig,
    TokenLogProbabilities,
)
from scalewise.objectives.z_loss import sum_with_z_loss
from scalewise.torch_compile import Compile

STD_EPSILON = 1e-4
"""Term added to the standard deviation of the rewards of a group, to avoid division by zero."""

ChunkLoss = Callable[[Tensor, Tensor], Tensor]
"""Loss sum of one chunk, from ``x_BCW`` and ``labels_BC``."""


@lazy_dispatch
def sum_over_tokens(config: ObjectiveConfig, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Sums over the positions whose label is not ``IGNORED``, in fp32."""
    raise not_registered(sum_over_tokens, config)


@lazy_dispatch
def compute_loss(
    config: ObjectiveConfig, token_sums: Tensor, batch: Mapping[str, Tensor]
) -> Tensor:
    """Loss of a batch, summed over its targets.

    Args:
        config: Objective.
        token_sums: Result of ``sum_over_tokens`` for the batch.
        batch: Tensors of the batch.

    Returns:
        A scalar, or a vector of the loss and the ``extra_metrics``.
    """
    return token_sums


@lazy_dispatch
def count_targets(config: ObjectiveConfig, labels_BT: Tensor) -> Tensor:
    """Number of targets in a batch, by which the loss is divided: labels, pairs or answers."""
    return (labels_BT != IGNORED).sum()


@cache
def token_sums_function(
    config: ObjectiveConfig, compile_config: Compile | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """``sum_over_tokens`` of an objective as a function of logits and labels.

    Args:
        config: Objective.
        compile_config: Config by which the function is compiled; None: it is not.
    """
    function = sum_over_tokens.bind(config)
    if compile_config is None:
        return function
    return torch.compile(
        function, backend=compile_config.backend.value, dynamic=compile_config.dynamic
    )


def set_chunked_loss(
    config: ObjectiveConfig,
    module: ModelModule,
    *,
    in_forward: bool,
    compile_config: Compile | None = None,
) -> None:
    """Set the chunked loss of a module, if ``loss_chunk`` is set; in validation, unregularized."""
    if config.loss_chunk is None:
        return
    weights = module.head_parameters if in_forward else None
    train_loss = chunked_loss(config, weights, compile_config)
    if config.unregularized == config:
        module.loss = train_loss
        return
    validation_loss = chunked_loss(config.unregularized, weights, compile_config)

    def loss(head: Callable[[Tensor], Tensor], x_BTW: Tensor, labels_BT: Tensor) -> Tensor:
        return (train_loss if module.training else validation_loss)(head, x_BTW, labels_BT)

    module.loss = loss


def chunked_loss(
    config: ObjectiveConfig,
    weights: Callable[[], Iterable[nn.Parameter]] | None = None,
    compile_config: Compile | None = None,
) -> Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]:
    """Function that computes ``sum_over_tokens(head(x), labels)`` from ``(head, x, labels)``.

    Logits of one chunk exist at a time.

    Args:
        config: Objective with a ``loss_chunk``.
        weights: Function that returns the head parameters, if gradients are computed in the
            forward pass; None: chunks are recomputed in the backward pass.
        compile_config: Config by which the loss of a chunk is compiled; None: it is not.
    """
    chunk_tokens = config.loss_chunk
    assert chunk_tokens is not None
    # bound here: torch.compile cannot trace the import and the dispatch
    sum_chunk = token_sums_function(config, compile_config)

    def loss(head: Callable[[Tensor], Tensor], x_BTW: Tensor, labels_BT: Tensor) -> Tensor:
        def chunk_sums(x_BCW: Tensor, labels_BC: Tensor) -> Tensor:
            return sum_chunk(head(x_BCW), labels_BC)

        if weights is None:
            return chunked_loss_recomputed(chunk_sums, x_BTW, labels_BT, chunk_tokens)
        return chunked_loss_with_gradients(chunk_sums, x_BTW, labels_BT, chunk_tokens, weights())

    return loss


@sum_over_tokens.register(CausalLM)
def _sum_cross_entropy(config: CausalLM, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Cross-entropy summed over all labels, with the z-loss, a scalar."""
    logits_NV, labels_N = logits_BTV.flatten(0, 1), labels_BT.flatten()
    if config.z_loss:
        return sum_with_z_loss(config, logits_NV, labels_N)
    return F.cross_entropy(
        logits_NV.float(),
        labels_N,
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=config.label_smoothing,
    )


@sum_over_tokens.register(Classification)
def _sum_classification(config: Classification, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Summed cross-entropy and number of correct predictions, a vector."""
    num_correct = (logits_BTV.detach().argmax(-1) == labels_BT).sum()
    return torch.stack([_sum_cross_entropy(config, logits_BTV, labels_BT), num_correct])


@sum_over_tokens.register(TokenLogProbabilities)
def _token_logprobs(config: TokenLogProbabilities, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Log-probability of each label, ``logp_BT``; 0 at ignored positions."""
    losses_N = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        labels_BT.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return -losses_N.view(labels_BT.shape)


@sum_over_tokens.register(LogProbabilities)
def _sequence_logprobs(config: LogProbabilities, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Log-probability of the labels of each sequence, ``logp_B``."""
    return _token_logprobs(config, logits_BTV, labels_BT).sum(1)


@sum_over_tokens.register(NextToken)
def _next_token_logits(config: NextToken, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Logits of the position, ``logits_BV``."""
    return logits_BTV[:, config.position].float()


@count_targets.register(DPO)
def _count_pairs(config: DPO, labels_BT: Tensor) -> Tensor:
    """Number of pairs with labels; the other ones are padding."""
    return _real_pairs(labels_BT).sum()


@compute_loss.register(DPO)
def _dpo_loss(config: DPO, token_sums: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Sums over the pairs of loss, reward margin and reward accuracy.

    The reward of an answer is ``beta (log p - log p_ref)``; the margin is the reward of the chosen
    answer minus that of the rejected one. The accuracy is 1 for a positive margin and 1/2 for a
    margin of 0, so that an untrained model has chance level.
    """
    log_ratio_P2 = (token_sums - batch["reference"]).view(-1, 2)
    margin_P = config.beta * (log_ratio_P2[:, 0] - log_ratio_P2[:, 1])
    detached_P = margin_P.detach()
    accuracy_P = (detached_P.sign() + 1) / 2
    metrics_3P = torch.stack([-F.logsigmoid(margin_P), detached_P, accuracy_P])
    return torch.where(_real_pairs(batch["labels"]), metrics_3P, 0.0).sum(1)


def _real_pairs(labels_BT: Tensor) -> Tensor:
    return (labels_BT != IGNORED).view(len(labels_BT) // 2, -1).any(1)


@count_targets.register(GRPO)
def _count_answers(config: GRPO, labels_BT: Tensor) -> Tensor:
    """Number of answers with labels; the other ones are padding."""
    return (labels_BT != IGNORED).any(1).sum()


def compute_advantages(config: GRPO, reward_B: Tensor) -> Tensor:
    """Advantage of each answer: its reward, standardized within its group."""
    reward_PG = reward_B.view(-1, config.answers)
    centered_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    return (centered_PG / (reward_PG.std(1, keepdim=True) + STD_EPSILON)).flatten()


@compute_loss.register(GRPO)
def _grpo_loss(config: GRPO, token_sums: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Sums over the answers of loss, reward and, with ``beta``, KL divergence.

    The advantages of a group sum to 0, and so would a loss of them alone. Therefore the loss
    contains the constant ``1 - reward``, which makes its value meaningful.
    """
    real_BT = batch["labels"] != IGNORED
    tokens_B = real_BT.sum(1).clamp(min=1)
    ratio_BT = (token_sums - token_sums.detach()).exp()
    constant_B1, advantage_B1 = 1 - batch["reward"][:, None], batch["advantage"][:, None]
    loss_BT = constant_B1 - advantage_B1 * (ratio_BT - 1)
    metrics = [batch["reward"]]
    if config.beta:
        gap_BT = batch["reference"] - token_sums
        kl_BT = gap_BT.exp() - gap_BT - 1
        loss_BT = loss_BT + config.beta * kl_BT
        metrics.append((kl_BT.detach() * real_BT).sum(1) / tokens_B)
    loss_B = (loss_BT * real_BT).sum(1) / tokens_B
    return torch.where(real_BT.any(1), torch.stack([loss_B, *metrics]), 0.0).sum(1)


def chunked_loss_recomputed(
    chunk_loss: ChunkLoss, x_BTW: Tensor, labels_BT: Tensor, chunk_tokens: int
) -> Tensor:
    """Loss sum over chunks; the backward pass recomputes the logits of each chunk.

    ``chunk_tokens``: largest number of tokens of a chunk.
    """
    sums: list[Tensor] = [
        checkpoint(chunk_loss, x_BCW, labels_BC, use_reentrant=False)
        for x_BCW, labels_BC in _chunks(x_BTW, labels_BT, chunk_tokens)
    ]
    return sum(sums[1:], sums[0])


def chunked_loss_with_gradients(
    chunk_loss: ChunkLoss,
    x_BTW: Tensor,
    labels_BT: Tensor,
    chunk_tokens: int,
    weights: Iterable[nn.Parameter],
) -> Tensor:
    """Loss sum over chunks, a scalar; gradients are computed in the forward pass.

    ``weights``: parameters that ``chunk_loss`` reads. As in Liger (Hsu et al., 2024, section 3.2),
    no logits are recomputed, and the gradients of ``weights`` are stored from the forward pass on.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    with _cached_casts(x_BTW.device.type):
        if not torch.is_grad_enabled() or not (trained or x_BTW.requires_grad):
            sums = [chunk_loss(*chunk) for chunk in _chunks(x_BTW, labels_BT, chunk_tokens)]
            return sum(sums[1:], sums[0])
        arguments = (chunk_loss, chunk_tokens, labels_BT, x_BTW, *trained)
        total: Tensor = ChunkedLossWithGradients.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
        return total


class ChunkedLossWithGradients(torch.autograd.Function):
    """Autograd function: forward computes the gradients, backward scales them."""

    @staticmethod
    def forward(
        context: Any,
        chunk_loss: ChunkLoss,
        chunk_tokens: int,
        labels_BT: Tensor,
        x_BTW: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Loss sum; saves the gradients of ``x_BTW`` and ``weights``."""
        sums: list[Tensor] = []
        x_gradients: list[Tensor] = []
        weight_gradients: list[Tensor] = []
        for x_BCW, labels_BC in _chunks(x_BTW, labels_BT, chunk_tokens):
            with torch.enable_grad(), saved_tensors_hooks(_identity, _identity):
                leaf_BCW = x_BCW.detach().requires_grad_(x_BTW.requires_grad)
                chunk_sum = chunk_loss(leaf_BCW, labels_BC)
                grad_inputs = (leaf_BCW,) * x_BTW.requires_grad + weights
                gradients = [*torch.autograd.grad(chunk_sum, grad_inputs)]
            sums.append(chunk_sum.detach())
            x_gradients += gradients[: x_BTW.requires_grad]
            del chunk_sum, gradients[: x_BTW.requires_grad]
            for accumulated in weight_gradients:
                accumulated.add_(gradients.pop(0))
            weight_gradients = weight_gradients or gradients
            del gradients
        context.x_requires_grad = x_BTW.requires_grad
        context.save_for_backward(
            *([torch.cat(x_gradients, 1)] if x_gradients else []), *weight_gradients
        )
        return sum(sums[1:], sums[0])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Saved gradients times the gradient of the sum.

        They are scaled in place: the backward pass reads them once.
        """
        gradients: tuple[Tensor, ...] = context.saved_tensors
        for saved in gradients:
            local_tensor(saved).mul_(local_tensor(gradient))
        return None, None, None, *([] if context.x_requires_grad else [None]), *gradients


def _chunks(x_BTW: Tensor, labels_BT: Tensor, chunk_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of all sequences, with at most ``chunk_tokens`` tokens in total.

    A chunk has at least one token per sequence.
    """
    tokens_per_sequence = max(1, chunk_tokens // x_BTW.shape[0])
    for start in range(0, labels_BT.shape[1], tokens_per_sequence):
        yield (
            x_BTW[:, start : start + tokens_per_sequence],
            labels_BT[:, start : start + tokens_per_sequence],
        )


@contextmanager
def _cached_casts(device: str) -> Iterator[None]:
    """Context in which autocast casts each trained parameter once instead of at each use.

    The precision plugins of Lightning disable this cache, since gradients of the uses are then
    added in the data type of the cast. Here each chunk takes its gradients by itself.
    """
    if not torch.is_autocast_enabled(device):
        yield
        return
    with torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=True):
        yield
    torch.clear_autocast_cache()


def _identity(tensor: Tensor) -> Tensor:
    """Saved-tensor hook that keeps a tensor as it is: it is read at once."""
    return tensor
