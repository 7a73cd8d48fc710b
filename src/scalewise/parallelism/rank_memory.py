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
from scalewise.training.callbacks.callback_args import AVERAGED_BYTES, averaging_callback

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class FSDPMemory:
    """Weights that are made whole block by block, and gradients cut again (FSDP2).

    ``shards``: ranks that share each out. ``whole``, ``reduced``: bytes of a gathered number and of
    one in a reduction. ``keeps``: whether blocks stay whole between forward and backward.
    ``ahead``: blocks gathered before they are at work. ``whole_gradients``: whether gradients stay
    whole until the last micro batch. ``replicas``: whether shards are summed over replicas too.
    """

    shards: int
    whole: int
    reduced: int
    keeps: bool
    ahead: int
    whole_gradients: bool
    replicas: bool


@dataclass(frozen=True)
class ZeroMemory:
    """What DeepSpeed's ZeRO holds otherwise than torch.

    Bytes of a number: ``weights`` of those at work, ``masters`` of the copy that is stepped,
    ``summed`` of a gradient that waits for the step. A bucket has so many ``bucket`` numbers;
    ``buckets`` of them exist while backward runs. ``live``: numbers that stay whole between uses.
    ``threshold``: a weight of fewer numbers is whole at all times.
    """

    stage: int
    weights: int
    masters: int
    summed: int
    bucket: int
    buckets: int
    live: int
    threshold: int


@dataclass(frozen=True)
class RankMemory(RankStages):
    """One rank's share.

    ``block``: the weights of one block as it works with them, and ``rest`` those outside of blocks,
    cut by tensor parallelism, not by shards. ``parameters``, ``gradients``, ``states``: ranks that
    share each out. ``buckets``: whether gradients lie in buffers that outlive a step; ``copies``:
    bytes of such buffers beside them. ``in_flight``: passes, of one part each, whose activations
    exist at once, of ``pieces`` of a micro batch that go through a pipeline of ``places`` ranks.
    """

    shape: ForwardSpec
    block: tuple[Weight, ...]
    rest: tuple[Weight, ...]
    parameters: int = 1
    gradients: int = 1
    states: int = 1
    buckets: bool = False
    copies: int = 0
    in_flight: int = 1
    pieces: int = 1
    places: int = 1
    gathering: FSDPMemory | None = None
    zero: ZeroMemory | None = None
    states_on_host: bool = False
    states_paged: bool = False
    parameters_on_host: bool = False
    states_on_disk: bool = False
    parameters_on_disk: bool = False

    def numbers(self, shards: int, *, trained: bool = False) -> int:
        """Returns the numbers of all weights here, or of those trained, that one shard has."""
        count = self.layers * shard_elements(self.block, shards, trained=trained)
        return count + shard_elements(self.rest, shards, trained=trained)

    def weight_bytes(self, held: int, shards: int) -> int:
        """Returns the bytes of all weights here that one shard has; ``held``: of a number."""
        return self.layers * shard_bytes(self.block, held, shards) + shard_bytes(
            self.rest, held, shards
        )

    def state_bytes(self, run: RunConfig) -> int:
        """Returns the bytes of the optimizer's state for the share that this rank steps."""
        held = run.precision.parameters.bytes
        block, rest = (
            sum(run.optimizer.state_bytes(w, self.states, held) for w in part if w.trainable)
            for part in (self.block, self.rest)
        )
        return self.layers * block + rest

    def average_bytes(self, run: RunConfig) -> int:
        """Returns the bytes of the moving average of the weights, fp32 of each number held here."""
        averaged = averaging_callback(run.callbacks) is not None
        return averaged * AVERAGED_BYTES * self.numbers(self.parameters, trained=True)

    @property
    def streamed(self) -> bool:
        """Returns whether weights go to the host and back to be stepped, one after the other."""
        return self.states_on_host and self.zero is None and not self.parameters_on_host

    @property
    def largest(self) -> int:
        """Returns the numbers of the largest weight that is trained."""
        each = (*self.block, *self.rest)
        return max((w.share(self.states) for w in each if w.trainable), default=0)

    def scratch_bytes(self, run: RunConfig) -> int:
        """Returns the most bytes that stepping one weight takes."""
        held, each = run.precision.parameters.bytes, (*self.block, *self.rest)
        found = (run.optimizer.scratch_bytes(w, self.states, held) for w in each if w.trainable)
        return max(found, default=0)


def replicated_memory(run: RunConfig) -> RankMemory:
    """Returns the share of a rank that works with every weight on whole rows."""
    layers = run.model.layers
    block, rest = run.census_by_kind()
    return RankMemory(
        (StageSlice(range(layers)),),
        forward_spec(run, run.sequences_per_pass, run.data.sequence),
        block,
        rest,
        states_on_host=run.optimizer.offload and run.hardware.device is DeviceKind.cuda,
        states_paged=run.optimizer.pages and run.hardware.device is DeviceKind.cuda,
    )


def forward_spec(run: RunConfig, rows: int, tokens: int, *, cast: bool = False) -> ForwardSpec:
    """Returns the formats and sizes of a pass; ``cast``: whether weights come in its format."""
    precision = run.precision
    held = precision.compute.bytes if cast else precision.parameters.bytes
    return ForwardSpec(
        rows=rows,
        tokens=tokens,
        stream=held,
        compute=precision.compute.bytes,
        held=held,
        casts=precision.compute.bytes < held,
        on_cpu=run.hardware.device == "cpu",
        loss_chunk=run.objective.loss_chunk or 0,
        loss_in_forward=run.objective.in_forward(run),
        table=precision.parameters.bytes,
        frozen=run.is_frozen,
        whole=run.adapter.whole(run.model),
        adapted=run.adapter.adapted(run.model),
        rank=run.adapter.rank,
        dropout=run.adapter.dropout,
        magnitudes=run.adapter.magnitudes,
        scaled=run.adapter.scaled(run.model),
        packed=run.quantization.packed(run.model),
        scale_bytes=run.quantization.scale_bytes,
        packing=run.data.packing,
        ahead=run.adapter.ahead,
        before=run.adapter.before,
        in_fp8=precision.in_fp8(run.model),
        fake_quantized=run.quantization.fake_quantized(run.model),
        group=run.quantization.group,
        rounds_inputs=run.quantization.rounds_inputs,
        compiled=run.compile.scope is not CompileScope.none,
    )


def shard_elements(weights: Iterable[Weight], ranks: int = 1, *, trained: bool = False) -> int:
    """Returns the numbers that one of ``ranks`` holds of weights cut by their rows."""
    return sum(weight.share(ranks) for weight in weights if weight.trainable or not trained)


def shard_bytes(weights: Iterable[Weight], held: int, ranks: int = 1) -> int:
    """Returns the bytes that one of ``ranks`` holds of them; ``held``: of a number."""
    return sum(weight.size(held, ranks) for weight in weights)
