"""Metrics of mixtures of experts: balance of the load, and entropy of the router.

Shape suffixes: S optimizer steps, L layers of this rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalewise.models.decoder.moe import ENTROPY_UNIT, find_mixtures
from scalewise.strategies.base import ParallelStrategy


class ExpertMetrics:
    """Recorder of the loads of experts, without device synchronization between log intervals."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._mixtures = find_mixtures(module)
        self._counts: list[Tensor] = []

    def record_step(self) -> None:
        """Record the counts of the step that ends."""
        if self._mixtures:
            self._counts.append(self._module.last_expert_counts)

    def take_rows(
        self, strategy: ParallelStrategy, first: int, steps: int
    ) -> Sequence[dict[str, float]]:
        """Metrics of the recorded steps; every rank must call it at the same step.

        Args:
            strategy: Strategy, which sums over ranks.
            first: First recorded step, from 1.
            steps: Number of steps; without experts, that of empty rows.
        """
        if not self._mixtures:
            return [{}] * steps
        counts_SLE = torch.stack(self._counts)
        self._counts = []
        strategy.sum_over_data_ranks(counts_SLE)
        counts_SLE = counts_SLE.double()
        spec = self._mixtures[0].spec
        loads_SLE, scalars = counts_SLE.tensor_split([spec.routed_experts], dim=-1)
        entropy_SL = scalars[..., 0] / ENTROPY_UNIT
        relative_SLE = loads_SLE / loads_SLE.mean(-1, keepdim=True).clamp(min=1)
        pairs_SL = loads_SLE.sum(-1)
        tokens_S = pairs_SL.sum(1) / spec.experts_per_token
        # Recomputed forward passes count twice; fractions do not depend on it.
        dropped_S = (scalars[..., -1] / pairs_SL).sum(1)
        layers_S = torch.full_like(tokens_S, pairs_SL.shape[1])
        extremes_S2 = torch.stack([relative_SLE.amax((1, 2)), -relative_SLE.amin((1, 2))], 1)
        sums_S4 = torch.stack([entropy_SL.sum(1), tokens_S, dropped_S, layers_S], 1)
        if dist.is_initialized():  # other layers are on other stages of a pipeline
            dist.all_reduce(extremes_S2, dist.ReduceOp.MAX)
            dist.all_reduce(sums_S4)
        return [
            {
                "experts/max_load": highest,
                "experts/min_load": -lowest,
                "experts/router_entropy": entropy / tokens,
                **self._count_dropped(dropped / layers, first + index),
            }
            for index, ((highest, lowest), (entropy, tokens, dropped, layers)) in enumerate(
                zip(extremes_S2.tolist(), sums_S4.tolist(), strict=True)
            )
        ]

    def _count_dropped(self, fraction: float, step: int) -> dict[str, float]:
        """Number of dropped pairs in a step, of their mean fraction over layers."""
        spec, run = self._mixtures[0].spec, self._module.run
        if spec.capacity_factor is None:
            return {}
        tokens = run.tokens_in_step.at(step - 1)
        tokens += tokens // run.sequence_per_step.at(step - 1) * run.adapter.prompt_tokens
        return {"experts/dropped": round(fraction * tokens * spec.experts_per_token * spec.layers)}
