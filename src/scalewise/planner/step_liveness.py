"""Liveness of all parts of a rank's pipeline stages, with the sums that its peak points read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from scalewise.cached_hash import cache_hash
from scalewise.memory_config import ActivationCheckpointing
from scalewise.models.base import ModelConfig, StageSlice
from scalewise.models.op_graph import ForwardSpec, Recompute, SavedOn
from scalewise.planner.activation_liveness import (
    EMPTY,
    PartLiveness,
    block_liveness,
    liveness_by_block,
    non_block_liveness,
)
from scalewise.planner.memory_breakdown import StepPhase, blocks_by_phase


@cache_hash
@dataclass(frozen=True)
class StepGradients:
    """Gradients of the parts of a rank's stages, in bytes; equal for most micro-batch sizes."""

    embedding: int
    """Gradients of the embedding; 0 if the rank does not store it."""
    head: int
    """Gradients of the head; 0 if the rank does not store it."""
    block: int
    """Largest gradients of a block, before an optimizer step in backward frees them."""
    cumulative: tuple[int, ...]
    """Gradients of the last 0, 1, ... blocks."""
    middle: int | None
    """Block whose backward replaces that of the last block but one; None: no other block."""

    @property
    def blocks_by_phase(self) -> Mapping[StepPhase, tuple[int, int]]:
        """Number of blocks before and after their backward, by phase."""
        return blocks_by_phase(len(self.cumulative) - 1, self.middle)


@lru_cache(maxsize=4096)
def _unique_gradients(gradients: StepGradients) -> StepGradients:
    return gradients


@dataclass(frozen=True, eq=False)
class StepLiveness:
    """Liveness of the parts of a rank's stages in one forward and backward pass."""

    blocks: tuple[PartLiveness, ...]
    """Blocks, in order."""
    non_blocks: tuple[PartLiveness, PartLiveness, PartLiveness]
    """Embedding, head and loss; empty if the rank does not store them."""
    block_gradient_bytes: int
    """Largest gradients of a block, before an optimizer step in backward frees them."""
    has_equal_blocks: bool
    """Whether all blocks of the model have the same weights."""

    @cached_property
    def cumulative_saved_bytes(self) -> tuple[int, ...]:
        """Bytes that the first 0, 1, ... blocks save."""
        return tuple(accumulate((each.saved_bytes for each in self.blocks), initial=0))

    @cached_property
    def gradients(self) -> StepGradients:
        """Gradients of the parts; equal ones are one object."""
        embedding, head, _ = self.non_blocks
        middle = None if self.has_equal_blocks else self._find_middle_block()
        return _unique_gradients(
            StepGradients(
                embedding.gradient_bytes,
                head.gradient_bytes,
                self.block_gradient_bytes,
                self.cumulative_gradient_bytes,
                middle,
            )
        )

    @cached_property
    def cumulative_gradient_bytes(self) -> tuple[int, ...]:
        """Bytes of the gradients of the last 0, 1, ... blocks."""
        sizes = (each.gradient_bytes for each in reversed(self.blocks))
        return tuple(accumulate(sizes, initial=0))

    @cached_property
    def saved_by_phase(self) -> Mapping[StepPhase, int]:
        """Bytes that blocks save and that wait for their backward, by phase."""
        saved = self.cumulative_saved_bytes
        return {phase: saved[waiting] for phase, (waiting, _) in self.blocks_by_phase.items()}

    @cached_property
    def saved_formula(self) -> str:
        """Number of blocks that save as much as each other, times their bytes."""
        sizes = Counter(item.saved_bytes for item in self.blocks)
        return " + ".join(f"{count} x {size:,} B" for size, count in sizes.items())

    @cached_property
    def forward_peak(self) -> int:
        """Largest temporary tensors of a block in forward, above what the blocks before save."""
        return max(
            saved_bytes + block.forward_peak
            for saved_bytes, block in zip(self.cumulative_saved_bytes, self.blocks, strict=False)
        )

    @cached_property
    def blocks_by_phase(self) -> Mapping[StepPhase, tuple[int, int]]:
        """Number of blocks before and after their backward, by phase."""
        return self.gradients.blocks_by_phase

    def _find_middle_block(self) -> int | None:
        """Return the block of several kinds whose backward needs most; None if there is none.

        The first block of the model, the second one and the last one are not compared.
        """
        num_layers = len(self.blocks)
        return max(
            range(2, num_layers - 1),
            key=lambda layer: (
                self.cumulative_saved_bytes[layer]
                + self.blocks[layer].backward_peak
                + self.cumulative_gradient_bytes[num_layers - 1 - layer]
            ),
            default=None,
        )


@lru_cache(maxsize=16384)
def step_liveness(
    model: ModelConfig,
    memory: ActivationCheckpointing,
    stages: tuple[StageSlice, ...],
    forward_spec: ForwardSpec,
    saved_on: SavedOn,
    fresh_gradients: bool,
    step_scratch_ratio: float,
) -> StepLiveness:
    """Return the liveness of the parts of some stages.

    Args:
        model: Model.
        memory: Activation checkpointing.
        stages: Stages of the rank, in order.
        forward_spec: Sizes and formats of a forward pass.
        saved_on: Memory of saved tensors between forward and backward.
        fresh_gradients: Whether the parameters have no gradient yet, so that backward allocates it.
        step_scratch_ratio: Temporary bytes of an optimizer step in backward, per byte of gradient;
            negative if the optimizer steps after backward.
    """
    blocks = liveness_by_block(
        model, memory, stages, forward_spec, fresh_gradients, saved_on, step_scratch_ratio
    )
    compared = blocks
    if model.has_equal_blocks:  # the optimizer step in backward frees the gradients of each
        compared = (block_liveness(model, forward_spec, Recompute.nothing, fresh_gradients),)
    embedding, head, loss = non_block_liveness(
        model, forward_spec, fresh_gradients, step_scratch_ratio
    )
    if not any(stage.is_first for stage in stages):
        embedding = EMPTY
    if not any(stage.is_last for stage in stages):
        head = loss = EMPTY
    return StepLiveness(
        blocks,
        (embedding, head, loss),
        max(block.gradient_bytes for block in compared),
        model.has_equal_blocks,
    )
