"""Mixture-of-experts feedforward of the decoder: token-choice routing, dropless or with capacity.

Shape suffixes: B batch, T tokens of a sequence on this rank, N = B T tokens, W width, E experts,
K experts of a token, C capacity of an expert, F hidden features of an expert, R rows sorted by
expert: N K without capacity, else E C, of which each expert has C, some of them empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.expert_rows import (
    add_gradient,
    scale_gradient,
    sort_by_expert,
    sum_by_token,
)
from scalewise.models.decoder.moe_config import RouterScore
from scalewise.models.grouped_mm import grouped_mm
from scalewise.models.init import local_tensor

ENTROPY_UNIT = 2**20
"""Entropy is counted in units of 1 / this, in nats: sums of integers do not depend on the order."""


class Routing(NamedTuple):
    """Assignment of tokens to experts."""

    weights: Tensor
    """Weight of each row in the output of its token, in fp32; 0 for empty rows."""
    order: Tensor
    """Index of each row among the assignments NK, which are ordered by token."""
    inverse: Tensor
    """Row of each assignment; -1 if it is dropped."""
    ends: Tensor
    """Ends of the rows of each expert, in int32."""
    capacity: int | None = None
    """Rows of each expert, filled or empty; None: no assignment is dropped."""


class TokenExchange:
    """Tokens and outputs of a mixture whose experts one rank computes: nothing to exchange."""

    def gather(self, x_BTW: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that the router and the routed experts read, and those of the shared ones."""
        return x_BTW, x_BTW

    def add_shared(self, y_BTW: Tensor, shared_BTW: Tensor) -> Tensor:
        """Sum of the outputs of routed and of shared experts."""
        return y_BTW + shared_BTW

    def reduce(self, y_BTW: Tensor) -> Tensor:
        """Output of the mixture."""
        return y_BTW


class MixtureOfExperts(nn.Module):
    """Sum over the experts of a token of weight times SwiGLU: ``x_BTW -> x_BTW``."""

    bias: Tensor | None
    """Biases of the scores by which experts are chosen."""
    load: Tensor
    """Rows of each expert since the last optimizer step; a recomputed forward counts twice."""
    entropy: Tensor
    """Entropy of the scores of these tokens, in units of ``1 / ENTROPY_UNIT``."""
    dropped: Tensor | None
    """Assignments of these tokens beyond the capacity of their experts; None: no capacity."""

    def __init__(self, spec: DecoderConfig, shared: nn.Module | None) -> None:
        super().__init__()
        self.spec = spec
        num_experts = spec.routed_experts
        self.router = nn.Linear(spec.width, num_experts, bias=False)
        self.experts = Experts(spec)
        self.shared = shared
        bias_E = torch.empty(num_experts, dtype=torch.float32) if spec.balance_rate else None
        self.register_buffer("bias", bias_E)
        load_E = torch.empty(num_experts, dtype=torch.int64)
        self.register_buffer("load", load_E, persistent=False)
        entropy = torch.empty((), dtype=torch.int64)
        self.register_buffer("entropy", entropy, persistent=False)
        dropped = torch.empty((), dtype=torch.int64) if spec.capacity_factor is not None else None
        self.register_buffer("dropped", dropped, persistent=False)
        self.sequence_weight: float | None = None
        self.tokens = TokenExchange()
        """Exchange of tokens with tensor-parallel ranks, which compute a part of each expert."""
        self.router_loss_scale = 1.0
        """Share of this rank in the losses of the router, which equal ranks compute each."""

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return the output of the experts."""
        x_BTW, shared_input_BTW = self.tokens.gather(x_BTW)
        routing = self._route(self.router(x_BTW).float())
        y_BTW: Tensor = self.experts(x_BTW.flatten(0, 1), routing).view(x_BTW.shape)
        if self.shared is not None:
            y_BTW = self.tokens.add_shared(y_BTW, self.shared(shared_input_BTW))
        return self.tokens.reduce(y_BTW)

    def _route(self, logits_BTE: Tensor) -> Routing:
        spec = self.spec
        is_softmax = spec.router_score is RouterScore.softmax
        scores_BTE = logits_BTE.softmax(-1) if is_softmax else logits_BTE.sigmoid()
        if self.bias is None:
            weights_BTK, experts_BTK = scores_BTE.topk(spec.experts_per_token)
        else:
            biased_BTE = scores_BTE.detach() + self.bias
            experts_BTK = biased_BTE.topk(spec.experts_per_token).indices
            weights_BTK = scores_BTE.gather(-1, experts_BTK)
        if spec.norm_topk:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        if spec.routed_scaling != 1.0:
            weights_BTK = weights_BTK * spec.routed_scaling
        is_training = self.training and torch.is_grad_enabled()
        if is_training and (spec.aux_loss or spec.router_z_loss):
            loss = self._router_loss(logits_BTE, scores_BTE, experts_BTK)
            weights_BTK = add_gradient(weights_BTK, loss)
        sorted_R, order_R = experts_BTK.flatten().sort(stable=True)
        num_experts = spec.routed_experts
        ends_E = torch.searchsorted(
            sorted_R, torch.arange(num_experts, device=sorted_R.device), right=True, out_int32=True
        )
        rows_R = torch.arange(len(order_R), device=order_R.device)
        # Validation drops no token, as the exported model does.
        capacity = spec.expert_capacity(len(order_R) // spec.experts_per_token)
        capacity = capacity if is_training else None
        if is_training:
            self._count(ends_E, scores_BTE.detach(), capacity)
        if capacity is not None:
            return _limit_rows(weights_BTK, sorted_R, order_R, ends_E, capacity)
        inverse_R = torch.empty_like(order_R).scatter_(0, order_R, rows_R)
        return Routing(
            weights_BTK.flatten().index_select(0, order_R),
            order_R,
            inverse_R.view(-1, spec.experts_per_token),
            ends_E,
        )

    def _count(self, ends_E: Tensor, scores_BTE: Tensor, capacity: int | None) -> None:
        load_E = _sizes(ends_E)
        self.load += load_E
        if self.dropped is not None and capacity is not None:
            self.dropped += (load_E - capacity).clamp(min=0).sum()
        probabilities_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        entropy = torch.special.entr(probabilities_BTE).sum(dtype=torch.float64)
        self.entropy += (entropy * ENTROPY_UNIT).long()

    def _router_loss(self, logits_BTE: Tensor, scores_BTE: Tensor, experts_BTK: Tensor) -> Tensor:
        """Losses of the router, summed over sequences with the weight of a sequence.

        The sum does not depend on how the global batch is divided into micro-batches and ranks.
        """
        spec, (num_sequences, _, num_experts) = self.spec, scores_BTE.shape
        loss_B = scores_BTE.new_zeros(num_sequences)
        if spec.aux_loss:
            chosen_BK = experts_BTK.flatten(1)
            counts_BE = torch.zeros_like(scores_BTE[:, 0]).scatter_add_(
                1, chosen_BK, torch.ones_like(chosen_BK, dtype=scores_BTE.dtype)
            )
            if spec.router_score is RouterScore.sigmoid:
                scores_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
            load_BE = counts_BE * (num_experts / chosen_BK.shape[1])
            loss_B = loss_B + spec.aux_loss * (load_BE * scores_BTE.mean(1)).sum(-1)
        if spec.router_z_loss:
            loss_B = loss_B + spec.router_z_loss * logits_BTE.logsumexp(-1).square().mean(1)
        weight = self.router_loss_scale * (self.sequence_weight or 1 / num_sequences)
        return weight * loss_B.sum()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Set counts and biases to zero."""
        self.reset_counts()
        if self.bias is not None:
            self.bias.zero_()

    @property
    def counts(self) -> Tensor:
        """Rows of each expert, the entropy and, with capacity, dropped ones, as integers."""
        scalars = [self.entropy] if self.dropped is None else [self.entropy, self.dropped]
        return torch.cat([self.load, torch.stack(scalars)])

    def reset_counts(self) -> None:
        """Set loads, entropy and the number of dropped assignments to zero."""
        for counter in (self.load, self.entropy, self.dropped):
            if counter is not None:
                counter.zero_()

    @torch.no_grad()
    def balance(self, load_E: Tensor) -> None:
        """Move the bias of each expert toward the mean load (Wang et al., 2024).

        ``load_E``: rows of each expert in the global batch.
        """
        if self.bias is not None:
            self.bias += self.spec.balance_rate * (load_E.float().mean() - load_E).sign()


def find_mixtures(module: nn.Module) -> list[MixtureOfExperts]:
    """Return the mixtures of experts in a module, in the order of layers."""
    return [part for part in module.modules() if isinstance(part, MixtureOfExperts)]


def _sizes(ends_E: Tensor) -> Tensor:
    """Numbers of rows of experts, from the ends of their rows."""
    return ends_E.diff(prepend=ends_E.new_zeros(1))


def _limit_rows(
    weights_BTK: Tensor, expert_A: Tensor, order_A: Tensor, ends_E: Tensor, capacity: int
) -> Routing:
    """Give each expert ``capacity`` rows, for its first tokens; no size depends on the routing.

    Args:
        weights_BTK: Weights of the assignments.
        expert_A: Experts of the assignments A = NK, sorted.
        order_A: Index of each of these among all assignments, which are ordered by token.
        ends_E: Ends of the assignments of each expert.
        capacity: Rows of each expert.
    """
    num_experts, device = len(ends_E), order_A.device
    load_E = _sizes(ends_E)
    starts_E, slots_C = ends_E - load_E, torch.arange(capacity, device=device)
    # The weights of empty rows are zero; any token stands in for theirs.
    is_filled_EC = slots_C < load_E[:, None]
    sources_EC = (starts_E[:, None] + slots_C).clamp(max=len(order_A) - 1)
    order_R = order_A.index_select(0, sources_EC.flatten())
    position_A = torch.arange(len(order_A), device=device) - starts_E.index_select(0, expert_A)
    row_A = torch.where(position_A < capacity, expert_A * capacity + position_A, -1)
    inverse_A = torch.empty_like(order_A).scatter_(0, order_A, row_A)
    return Routing(
        weights_BTK.flatten().index_select(0, order_R) * is_filled_EC.flatten(),
        order_R,
        inverse_A.view(-1, weights_BTK.shape[-1]),
        torch.arange(1, num_experts + 1, dtype=torch.int32, device=device) * capacity,
        capacity,
    )


RowMap = Callable[[Tensor], Tensor]
Exchange = Callable[[Tensor, int, int | None], tuple[RowMap, Tensor, RowMap]]
"""Function of the ends of the rows of all experts, their number, and the capacity: a function that
sends rows to the ranks of their experts, the ends of the rows of this rank's experts, and the
inverse."""


class Experts(nn.Module):
    """Weighted sum of the SwiGLUs of the experts of each token: ``x_NW, routing -> y_NW``."""

    def __init__(self, spec: DecoderConfig) -> None:
        super().__init__()
        self.gate = ExpertMatrices(spec.routed_experts, spec.hidden_dim, spec.width)
        self.up = ExpertMatrices(spec.routed_experts, spec.hidden_dim, spec.width)
        self.down = ExpertMatrices(spec.routed_experts, spec.width, spec.hidden_dim)
        self.exchange: Exchange | None = None
        """Exchange of rows with the ranks that store other experts; None: there are none."""

    def forward(self, x_NW: Tensor, routing: Routing) -> Tensor:
        """Return the sum over the experts of each token."""
        _, order_R, inverse_NK, ends, capacity = routing
        is_limited = capacity is not None
        send: RowMap = _keep
        receive: RowMap = _keep
        if self.exchange is not None:
            send, ends, receive = self.exchange(ends, len(order_R), capacity)
        # No tensor of the size of all rows has a name here: each is freed after its last use.
        y_RW = _weigh(
            receive(
                self.down(
                    self._hidden(
                        send(sort_by_expert(x_NW, order_R, inverse_NK, is_limited=is_limited)), ends
                    ),
                    ends,
                )
            ),
            routing.weights,
        )
        return sum_by_token(y_RW, order_R, inverse_NK, is_limited=is_limited)

    def _hidden(self, x_RW: Tensor, ends_E: Tensor) -> Tensor:
        hidden_RF: Tensor = F.silu(self.gate(x_RW, ends_E)) * self.up(x_RW, ends_E)
        return hidden_RF


class ExpertMatrices(nn.Module):
    """One matrix per expert, stacked along the first dimension, which FSDP shards evenly."""

    def __init__(self, experts: int, out_features: int, in_features: int) -> None:
        super().__init__()
        self.num_experts, self.out_features = experts, out_features
        self.weight = nn.Parameter(torch.empty(experts * out_features, in_features))
        self.gradient_scale = 1.0
        self.grad_placements: Sequence[Placement] | None = None
        """Placements of the gradient of a DTensor; None: those of the weight."""

    def forward(self, x_RI: Tensor, ends_E: Tensor) -> Tensor:
        """Return the product of each row with the matrix of its expert, as ``nn.Linear``."""
        device = x_RI.device.type
        if torch.is_autocast_enabled(device):
            x_RI = x_RI.to(torch.get_autocast_dtype(device))
        weight = local_tensor(self.weight, self.grad_placements)
        weight_EOI = weight.to(x_RI.dtype).unflatten(0, (-1, self.out_features))
        if self.gradient_scale != 1:
            weight_EOI = scale_gradient(weight_EOI, self.gradient_scale)
        return grouped_mm(x_RI, weight_EOI, ends_E)


def _keep(x_RW: Tensor) -> Tensor:
    return x_RW


def _weigh(y_RW: Tensor, weights_R: Tensor) -> Tensor:
    return y_RW * weights_R[:, None].to(y_RW.dtype)
