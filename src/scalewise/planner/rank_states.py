"""Model states of one rank: parameters, gradients and optimizer state, and how they are sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Protocol

from scalewise.cached_hash import cache_hash
from scalewise.callback_config import AVERAGE_BYTES_PER_ELEMENT, averaging_callback
from scalewise.models.base import Weight
from scalewise.optimizers import OptimizerConfig
from scalewise.planner.rank_partition import FSDPGroups, RankStages
from scalewise.planner.weight_sizes import (
    all_gather_bytes,
    gathered_bytes,
    multiples,
    padded_elements,
    shard_bytes,
    shard_elements,
    state_bytes,
)
from scalewise.precision import Precision
from scalewise.run_config import RunConfig


class TrainedConfigs(Protocol):
    """Configs that decide the optimizer state of a weight."""

    @property
    def precision(self) -> Precision:
        """Data types of parameters and matmuls."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """Optimizer."""


@cache_hash
@dataclass(frozen=True)
class FSDPMemory:
    """FSDP2: parameters gathered block by block, gradients reduced to shards."""

    num_shards: int
    """Number of ranks that shard each parameter."""
    gathered_element_bytes: int
    """Bytes per element of gathered parameters."""
    reduced_element_bytes: int
    """Bytes per element of gradients in a reduction."""
    keeps_unsharded: bool
    """Whether blocks stay unsharded between forward and backward."""
    keeps_between_passes: bool
    """Whether parameters stay unsharded for all micro-batches of a step."""
    prefetch: int
    """Number of blocks gathered ahead of use."""
    has_unsharded_gradients: bool
    """Whether gradients stay unsharded until the last micro-batch."""
    has_replicas: bool
    """Whether gradient shards are also all-reduced over replicas."""
    groups: FSDPGroups
    """Weights outside of blocks by FSDP group, before sharding."""

    def gathered_bytes(self, weights: tuple[Weight, ...]) -> int:
        """Return the size of gathered weights, in bytes."""
        return gathered_bytes(weights, self.gathered_element_bytes, self.num_shards)

    def all_gather_bytes(self, weights: tuple[Weight, ...]) -> int:
        """Return the size of the output of an all-gather, in bytes.

        FSDP2 gathers no weight of one shard, such as experts of as many ranks: it allocates these
        when their block runs, without a buffer and not ahead of use.
        """
        return all_gather_bytes(weights, self.gathered_element_bytes, self.num_shards)

    def reduced_bytes(self, weights: tuple[Weight, ...]) -> tuple[int, int]:
        """Return the sizes of a reduction of gradients in bytes: of its input and its output."""
        output = shard_elements(weights, self.num_shards, trained=True)
        source = padded_elements(weights, self.num_shards)
        return source * self.reduced_element_bytes, output * self.reduced_element_bytes

    def copied_gradient_elements(self, weights: tuple[Weight, ...]) -> int:
        """Return the elements of a gradient that FSDP2 copies, since it shards its columns."""
        copied = (it for it in weights if it.trainable and it.shard_dim)
        return max((it.numel for it in copied if it.num_shards(self.num_shards) > 1), default=0)


@cache_hash
@dataclass(frozen=True)
class ZeroMemory:
    """DeepSpeed ZeRO: master weights, gradient buckets and gathered parameters."""

    stage: int
    """ZeRO stage."""
    weight_element_bytes: int
    """Bytes per element of the weights used in forward and backward."""
    master_element_bytes: int
    """Bytes per element of the master weights that the optimizer updates."""
    gradient_element_bytes: int
    """Bytes per element of a gradient that waits for the optimizer step."""
    bucket_elements: int
    """Elements per gradient bucket."""
    num_buckets: int
    """Number of gradient buckets that are alive in backward."""
    max_live_elements: int
    """Maximum number of gathered elements between uses."""
    persistence_threshold: int
    """Parameters with fewer elements stay unsharded."""
    prefetch_elements: int
    """Minimum elements of parameters that are gathered together; 0: parameters stay unsharded."""


@cache_hash
@dataclass(frozen=True)
class RankStates(RankStages):
    """Model states of one rank; independent of the size of a micro-batch."""

    block_weights: tuple[Weight, ...]
    """Weights of one block, after tensor parallelism and before sharding; of blocks that differ,
    those of the largest one."""
    other_weights: tuple[Weight, ...]
    """Weights outside of blocks, after tensor parallelism and before sharding."""
    parameter_shards: int = 1
    """Number of ranks that shard the parameters."""
    gradient_shards: int = 1
    """Number of ranks that shard the gradients."""
    state_shards: int = 1
    """Number of ranks that shard the optimizer state."""
    has_persistent_buckets: bool = False
    """Whether gradients are views of buckets that persist between steps."""
    bucket_copy_bytes: int = 0
    """Size of buckets that copy the gradients."""
    pipeline_ranks: int = 1
    """Number of pipeline ranks."""
    fsdp: FSDPMemory | None = None
    """FSDP2 sharding."""
    zero: ZeroMemory | None = None
    """DeepSpeed ZeRO."""
    states_on_host: bool = False
    """Whether optimizer state is stored in host memory."""
    states_paged: bool = False
    """Whether the driver pages optimizer state between device and host."""
    parameters_on_host: bool = False
    """Whether parameters are stored in host memory."""
    states_on_disk: bool = False
    """Whether optimizer state is stored on disk."""
    parameters_on_disk: bool = False
    """Whether parameters are stored on disk."""
    weights_by_block: tuple[tuple[Weight, ...], ...] = ()
    """Weights of each block, in order; empty: all blocks are equal."""

    @cached_property
    def block_counts(self) -> Mapping[tuple[Weight, ...], int]:
        """Number of blocks with the same weights."""
        if self.weights_by_block:
            return Counter(self.weights_by_block)
        return {self.block_weights: self.num_layers}

    @property
    def all_weights(self) -> tuple[Weight, ...]:
        """Weights of all blocks and those outside of blocks."""
        blocks = Counter(self.block_counts).elements()
        return (*chain.from_iterable(blocks), *self.other_weights)

    def numel(self, shards: int, *, trained: bool = False) -> int:
        """Return the elements of a shard of the rank's parameters, or of the trained ones."""
        return self._sum_weights(lambda group: shard_elements(group, shards, trained=trained))

    def weight_bytes(self, element_bytes: int, shards: int) -> int:
        """Return the size of a shard of the rank's parameters, in bytes."""
        return self._sum_weights(lambda group: shard_bytes(group, element_bytes, shards))

    def state_bytes(self, run: TrainedConfigs) -> int:
        """Return the size of the optimizer state of this rank, in bytes."""
        element_bytes = run.precision.parameters.bytes
        return self._sum_weights(
            lambda group: state_bytes(run.optimizer, group, self.state_shards, element_bytes)
        )

    def list_block_weights(self) -> tuple[tuple[Weight, ...], ...]:
        """Return the weights of each block, in order."""
        return self.weights_by_block or (self.block_weights,) * self.num_layers

    def cumulative_trained_elements(self, shards: int) -> tuple[int, ...]:
        """Return the trained elements of the last 0, 1, ... blocks, sharded."""
        if not self.weights_by_block:
            return multiples(
                shard_elements(self.block_weights, shards, trained=True), self.num_layers
            )
        blocks = reversed(self.weights_by_block)
        elements = (shard_elements(block, shards, trained=True) for block in blocks)
        return tuple(accumulate(elements, initial=0))

    def _sum_weights(self, measure: Callable[[tuple[Weight, ...]], int]) -> int:
        """Return the sum of a measure over the weights of all blocks and those outside."""
        blocks = sum(count * measure(group) for group, count in self.block_counts.items())
        return blocks + measure(self.other_weights)

    def ema_bytes(self, run: RunConfig) -> int:
        """Return the size of the moving average of the weights on this rank, in bytes."""
        return self.average_bytes * (averaging_callback(run.callbacks) is not None)

    @property
    def average_elements(self) -> int:
        """Elements of a moving average on this rank: of its weights, with ZeRO of its masters."""
        shards = self.parameter_shards if self.zero is None else self.state_shards
        return self.numel(shards, trained=True)

    @property
    def average_bytes(self) -> int:
        """Size of a moving average of the weights on this rank, in bytes."""
        return AVERAGE_BYTES_PER_ELEMENT * self.average_elements

    @property
    def average_on_host(self) -> bool:
        """Whether a moving average is stored in host memory, as the weights that it averages."""
        return self.parameters_on_host if self.zero is None else self.states_on_host

    @property
    def streams_weights(self) -> bool:
        """Whether parameters are copied to the host and back, one at a time, for the update."""
        return self.states_on_host and self.zero is None and not self.parameters_on_host

    @property
    def largest_numel(self) -> int:
        """Elements of the largest trained parameter, after sharding."""
        weights = (*chain.from_iterable(self.block_counts), *self.other_weights)
        return max((w.shard_numel(self.state_shards) for w in weights if w.trainable), default=0)

    def scratch_bytes(self, run: TrainedConfigs) -> int:
        """Return the temporary memory of an optimizer update, in bytes."""
        element_bytes, weights = (
            run.precision.parameters.bytes,
            (*chain.from_iterable(self.block_counts), *self.other_weights),
        )
        optimizer, shards, is_rounded = (
            run.optimizer,
            self.state_shards,
            run.precision.stochastic_rounding,
        )
        sizes = (
            optimizer.rounding_scratch_bytes(w, shards)
            if is_rounded
            else optimizer.scratch_bytes(w, shards, element_bytes)
            for w in weights
            if w.trainable
        )
        return max(sizes, default=0)
