"""What one rank holds of a run and works on, in the facts that the memory ledger asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.hardware import DeviceKind
from scalewise.models.base import StageSlice, Weight
from scalewise.models.op_graph import ForwardSpec
from scalewise.parallelism.rank_partition import RankStages
from scalewise.torch_compile import CompileScope
from scalewise.training.callbacks.callback_args import AVERAGE_BYTES_PER_ELEMENT, averaging_callback

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class FSDPMemory:
    """Weights that are made whole block by block, and gradients cut again (FSDP2).

    ``num_shards``: ranks that share each out. ``gathered_element_bytes``,
    ``reduced_element_bytes``: bytes of a gathered number and of
    one in a reduction. ``keeps_unsharded``: whether blocks stay whole between forward and backward.
    ``prefetch``: blocks gathered before they are at work. ``has_unsharded_gradients``: whether
    gradients stay
    whole until the last micro batch. ``has_replicas``: whether shards are summed over replicas too.
    """

    num_shards: int
    gathered_element_bytes: int
    reduced_element_bytes: int
    keeps_unsharded: bool
    prefetch: int
    has_unsharded_gradients: bool
    has_replicas: bool


@dataclass(frozen=True)
class ZeroMemory:
    """What DeepSpeed's ZeRO holds otherwise than torch.

    Bytes of a number: ``weight_element_bytes`` of those at work, ``master_element_bytes`` of the
    copy that is stepped,
    ``gradient_element_bytes`` of a gradient that waits for the step. A bucket has so many
    ``bucket_elements`` numbers;
    ``num_buckets`` of them exist while backward runs. ``max_live_elements``: numbers that stay
    whole between uses.
    ``persistence_threshold``: a weight of fewer numbers is whole at all times.
    """

    stage: int
    weight_element_bytes: int
    master_element_bytes: int
    gradient_element_bytes: int
    bucket_elements: int
    num_buckets: int
    max_live_elements: int
    persistence_threshold: int


@dataclass(frozen=True)
class RankMemory(RankStages):
    """One rank's share.

    ``block_weights``: the weights of one block as it works with them, and ``other_weights`` those
    outside of blocks,
    cut by tensor parallelism, not by shards. ``parameter_shards``, ``gradient_shards``,
    ``state_shards``: ranks that
    share each out. ``has_persistent_buckets``: whether gradients lie in buffers that outlive a
    step; ``bucket_copy_bytes``:
    bytes of such buffers beside them. ``in_flight``: passes, of one part each, whose activations
    exist at once, of ``num_pipeline_micro_batches`` of a micro batch that go through a pipeline of
    ``pipeline_ranks`` ranks.
    """

    forward_spec: ForwardSpec
    block_weights: tuple[Weight, ...]
    other_weights: tuple[Weight, ...]
    parameter_shards: int = 1
    gradient_shards: int = 1
    state_shards: int = 1
    has_persistent_buckets: bool = False
    bucket_copy_bytes: int = 0
    in_flight: int = 1
    num_pipeline_micro_batches: int = 1
    pipeline_ranks: int = 1
    fsdp: FSDPMemory | None = None
    zero: ZeroMemory | None = None
    states_on_host: bool = False
    states_paged: bool = False
    parameters_on_host: bool = False
    states_on_disk: bool = False
    parameters_on_disk: bool = False

    def numel(self, shards: int, *, trained: bool = False) -> int:
        """Returns the numbers of all weights here, or of those trained, that one shard has."""
        count = self.num_layers * shard_elements(self.block_weights, shards, trained=trained)
        return count + shard_elements(self.other_weights, shards, trained=trained)

    def weight_bytes(self, element_bytes: int, shards: int) -> int:
        """Returns the bytes of all weights here that one shard has; ``element_bytes``: of a
        number."""
        return self.num_layers * shard_bytes(
            self.block_weights, element_bytes, shards
        ) + shard_bytes(self.other_weights, element_bytes, shards)

    def state_bytes(self, run: RunConfig) -> int:
        """Returns the bytes of the optimizer's state for the share that this rank steps."""
        held = run.precision.parameters.bytes
        block, rest = (
            sum(run.optimizer.state_bytes(w, self.state_shards, held) for w in part if w.trainable)
            for part in (self.block_weights, self.other_weights)
        )
        return self.num_layers * block + rest

    def ema_bytes(self, run: RunConfig) -> int:
        """Returns the bytes of the moving average of the weights, fp32 of each number held here."""
        averaged = averaging_callback(run.callbacks) is not None
        return (
            averaged * AVERAGE_BYTES_PER_ELEMENT * self.numel(self.parameter_shards, trained=True)
        )

    @property
    def streams_weights(self) -> bool:
        """Returns whether weights go to the host and back to be stepped, one after the other."""
        return self.states_on_host and self.zero is None and not self.parameters_on_host

    @property
    def largest_numel(self) -> int:
        """Returns the numbers of the largest weight that is trained."""
        each = (*self.block_weights, *self.other_weights)
        return max((w.shard_numel(self.state_shards) for w in each if w.trainable), default=0)

    def scratch_bytes(self, run: RunConfig) -> int:
        """Returns the most bytes that stepping one weight takes."""
        held, each = run.precision.parameters.bytes, (*self.block_weights, *self.other_weights)
        found = (
            run.optimizer.scratch_bytes(w, self.state_shards, held) for w in each if w.trainable
        )
        return max(found, default=0)


def replicated_memory(run: RunConfig) -> RankMemory:
    """Returns the share of a rank that works with every weight on whole rows."""
    layers = run.model.layers
    block, rest = run.weight_census_by_kind()
    return RankMemory(
        (StageSlice(range(layers)),),
        forward_spec(run, run.sequences_per_forward, run.data.sequence),
        block,
        rest,
        states_on_host=run.optimizer.offload and run.hardware.device is DeviceKind.cuda,
        states_paged=run.optimizer.pages_state and run.hardware.device is DeviceKind.cuda,
    )


def forward_spec(
    run: RunConfig, sequences: int, tokens_per_sequence: int, *, casts_weights: bool = False
) -> ForwardSpec:
    """Returns the formats and sizes of a pass; ``casts_weights``: whether weights come in its
    format."""
    precision = run.precision
    held = precision.compute.bytes if casts_weights else precision.parameters.bytes
    return ForwardSpec(
        sequences=sequences,
        tokens_per_sequence=tokens_per_sequence,
        residual_element_bytes=held,
        compute_element_bytes=precision.compute.bytes,
        gradient_element_bytes=held,
        autocast=precision.compute.bytes < held,
        on_cpu=run.hardware.device == "cpu",
        loss_chunk=run.objective.loss_chunk or 0,
        loss_in_forward=run.objective.takes_gradients_in_forward(run),
        rope_element_bytes=precision.parameters.bytes,
        has_frozen_weights=run.has_frozen_weights,
        fully_trained_modules=run.adapter.fully_trained_modules(run.model),
        adapted_layers=run.adapter.adapted_layers(run.model),
        adapter_rank=run.adapter.rank,
        adapter_dropout=run.adapter.dropout,
        has_magnitudes=run.adapter.magnitudes,
        scaled_layers=run.adapter.scaled_layers(run.model),
        packed_layers=run.quantization.packed_layers(run.model),
        scale_bytes=run.quantization.scale_bytes,
        sequence_packing=run.data.packing,
        prompt_tokens=run.adapter.prompt_tokens,
        prefix_tokens=run.adapter.prefix_tokens,
        fp8_layers=precision.fp8_layers(run.model),
        fake_quantized_layers=run.quantization.fake_quantized_layers(run.model),
        quantization_group=run.quantization.group,
        rounds_inputs=run.quantization.rounds_inputs,
        is_compiled=run.compile.scope is not CompileScope.none,
    )


def shard_elements(weights: Iterable[Weight], ranks: int = 1, *, trained: bool = False) -> int:
    """Returns the numbers that one of ``ranks`` holds of weights cut by their rows."""
    return sum(weight.shard_numel(ranks) for weight in weights if weight.trainable or not trained)


def shard_bytes(weights: Iterable[Weight], element_bytes: int, ranks: int = 1) -> int:
    """Returns the bytes that one of ``ranks`` holds of them; ``element_bytes``: of a number."""
    return sum(weight.shard_bytes(element_bytes, ranks) for weight in weights)
