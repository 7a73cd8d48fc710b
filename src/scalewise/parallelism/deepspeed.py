"""ZeRO by DeepSpeed: optimizer state, gradients and weights shared out, on the host, on a disk."""

from __future__ import annotations

import ctypes.util
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from scalewise.config.registry import option_name, register_option
from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind
from scalewise.optimizers import AdamWConfig
from scalewise.parallelism.base import DEFAULT_CPU_RANKS, ParallelismConfig
from scalewise.precision import FloatFormat
from scalewise.torch_compile import CompileScope
from scalewise.typed_override import format_override
from scalewise.units import MIB

if TYPE_CHECKING:
    from scalewise.parallelism.communication import Collective
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig
    from scalewise.strategies.base import ParallelStrategy


LIVE = 1_000_000_000
"""Numbers that stage 3 leaves whole between two uses: ``max_live_parameters`` by default."""


class OffloadTarget(StrEnum):
    """Storage of offloaded tensors."""

    none = "none"
    """Device memory: no offload."""
    cpu = "cpu"
    """Host memory."""
    nvme = "nvme"
    """Files on a disk; stage 3 only."""


@register_option("parallelism", "deepspeed")
@dataclass(frozen=True)
class DeepSpeedConfig(ParallelismConfig):
    """DeepSpeed ZeRO: data-parallel ranks partition the training state (Rajbhandari et al., 2020).

    Offload is ZeRO-Offload (Ren et al., 2021) and ZeRO-Infinity (Rajbhandari et al., 2021).
    """

    flattens_parameters = True

    stage: int = 2
    """What is partitioned: 1 optimizer state, 2 gradients as well, 3 parameters as well."""
    replicas: int | None = None
    """Number of ranks; null: all devices of the machine, or two ranks on the CPU."""
    offload_optimizer: OffloadTarget = OffloadTarget.none
    """Where optimizer state is stored; the CPU then updates the parameters. nvme: stage 3 only."""
    offload_parameters: OffloadTarget = OffloadTarget.none
    """Where parameter partitions are stored; stage 3 only."""
    nvme_path: str | None = None
    """Folder on a fast disk for ``nvme``; null: a folder in scalewise's cache."""
    bucket_mib: float = 200.0
    """Bucket size of gradient reduction and parameter gathering, in MiB of fp32."""
    overlap_comm: bool = True
    """Whether gradient reduction overlaps with backward."""
    contiguous_gradients: bool = True
    """Whether gradients are copied into one buffer to avoid fragmentation."""
    keep_whole_below: int = 100_000
    """Stage 3: parameters smaller than this stay unsharded on every rank, in elements."""
    hierarchical: int = 1
    """ZeRO++ (Wang et al., 2023): size of the group that stores a second copy for backward, in
    ranks."""
    quantized_weights: bool = False
    """ZeRO++: whether parameters are gathered as int8; CUDA only, lossy."""
    quantized_gradients: bool = False
    """ZeRO++: whether gradients are reduced as int4; CUDA only, lossy."""

    @property
    def world_size(self) -> int:
        """Returns the number of replicas."""
        return self.replicas or DEFAULT_CPU_RANKS

    @property
    def backward_follows_forward(self) -> bool:
        """Returns whether weights stay between forward and backward, as stage 3's do not."""
        return self.stage < 3

    @property
    def native_extensions(self) -> tuple[str, ...]:
        """Returns the native code of DeepSpeed that has to be compiled for this layout."""
        optimizer, parameters = self.offload_optimizer, self.offload_parameters
        on_disk = OffloadTarget.nvme in (optimizer, parameters)
        return ("cpu_adam",) * (optimizer is not OffloadTarget.none) + ("async_io",) * on_disk

    def resolve(self, devices: int | None) -> Self:
        """Returns the layout with ``replicas`` filled in."""
        if self.replicas is not None:
            return self
        return replace(self, replicas=DEFAULT_CPU_RANKS if devices is None else devices)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields sizes that are no layout, and what only stage 3 can do."""
        if self.stage not in (1, 2, 3):
            yield ConfigIssue("parallelism.stage", self.stage, "ZeRO has stages 1, 2 and 3")
            return
        for key in ("replicas", "hierarchical"):
            value = getattr(self, key)
            if value is not None and value < 1:
                yield ConfigIssue(f"parallelism.{key}", value, "must be 1 or more")
                return
        if not self.bucket_mib >= 1:
            yield ConfigIssue("parallelism.bucket_mib", self.bucket_mib, "must be 1 or more")
        if self.keep_whole_below < 0:
            key = "parallelism.keep_whole_below"
            yield ConfigIssue(key, self.keep_whole_below, "must be 0 or more")
        if self.world_size % self.hierarchical:
            yield ConfigIssue(
                "parallelism.hierarchical",
                self.hierarchical,
                f"does not divide the {self.world_size} replicas",
                "set parallelism.hierarchical=1",
            )
        if self.stage < 3:
            yield from self._validate_lower_stages()

    def _validate_lower_stages(self) -> Iterator[ConfigIssue]:
        if self.offload_optimizer is OffloadTarget.nvme:
            reason = f"stage {self.stage} keeps optimizer state in memory"
            fix = "set parallelism.stage=3, or parallelism.offload_optimizer=cpu"
            yield ConfigIssue("parallelism.offload_optimizer", "nvme", reason, fix)
        untouched = {
            "offload_parameters": OffloadTarget.none,
            "hierarchical": 1,
            "quantized_weights": False,
            "quantized_gradients": False,
        }
        for key, none in untouched.items():
            if (value := getattr(self, key)) != none:
                reason = f"stage {self.stage} keeps every rank's weights whole"
                fix = f"set parallelism.stage=3, or {format_override(f'parallelism.{key}', none)}"
                yield ConfigIssue(f"parallelism.{key}", value, reason, fix)

    def validate_on_device(self, device: DeviceKind) -> Iterator[ConfigIssue]:
        """Yields kernels that the CPU lacks."""
        for key in ("quantized_weights", "quantized_gradients"):
            if getattr(self, key) and device is DeviceKind.cpu:
                reason = "DeepSpeed has kernels that quantize for CUDA alone"
                yield ConfigIssue(
                    f"parallelism.{key}", True, reason, f"set parallelism.{key}=false"
                )

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields numbers, optimizers and callbacks that DeepSpeed cannot carry."""
        yield from super().validate_with(run)
        if self.stage == 3 and run.compile.scope is not CompileScope.none:
            yield ConfigIssue(
                "compile.scope",
                run.compile.scope.value,
                "torch cannot trace DeepSpeed's hooks that gather the weights of stage 3",
                "set compile=none, or parallelism=fsdp or deepspeed_zero2",
            )
        if run.precision.compute is FloatFormat.fp16:
            yield ConfigIssue(
                "precision",
                run.choices.get("precision", "fp16"),
                "DeepSpeed keeps its loss scale to itself, so that no checkpoint could resume it",
                "set precision=bf16_mixed, or parallelism=ddp",
            )
        offloaded = self.offload_optimizer
        steps_elsewhere = run.optimizer.elementwise and not isinstance(run.optimizer, AdamWConfig)
        if offloaded is not OffloadTarget.none and steps_elsewhere:
            yield ConfigIssue(
                "optimizer",
                run.choices.get("optimizer", option_name(run.optimizer)),
                f"offload_optimizer={offloaded} steps with DeepSpeedCPUAdam, which is AdamW",
                "set optimizer=adamw, or parallelism.offload_optimizer=none",
            )
        yield from self.validate_on_device(run.hardware.device)

    @property
    def averaging_conflict(self) -> tuple[str, str] | None:
        """Returns that DeepSpeed steps masters of its own, and a strategy that does not."""
        reason = "averages the weights of the module, and DeepSpeed's masters would undo it"
        return reason, f"set parallelism={'fsdp' if self.stage == 3 else 'ddp'}"

    def validate_machine(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what has to be installed first."""
        if importlib.util.find_spec("deepspeed") is None:
            chosen = run.choices.get("parallelism", "deepspeed")
            fix = "pip install 'scalewise[deepspeed]'"
            yield ConfigIssue("parallelism", chosen, "deepspeed is not installed", fix)
        if "async_io" in self.native_extensions and ctypes.util.find_library("aio") is None:
            key = "offload_optimizer"
            if self.offload_optimizer is not OffloadTarget.nvme:
                key = "offload_parameters"
            fix = f"apt-get install libaio-dev, or set parallelism.{key}=cpu"
            yield ConfigIssue(f"parallelism.{key}", "nvme", "needs libaio", fix)

    def collectives(self, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
        """Returns the gradients' way to their owners, and the weights' way back.

        Stage 1 reduces once a step, 2 and 3 each micro batch; 3 gathers weights before each
        forward and backward, the others once (Rajbhandari et al., 2020, section 7).
        """
        from scalewise.parallelism.communication import Collective, CollectiveKind

        if self.world_size == 1:
            return ()
        passes, precision = run.accumulation, run.precision
        trained = whole = run.trainable_parameters
        if self.stage == 3:
            whole = sum(weight.numel for weight in run.weight_census())
        sent = trained * precision.parameters.bytes
        if self.quantized_gradients:
            sent = trained // 2  # int4
        gathered = whole * (1 if self.quantized_weights else precision.compute.bytes)
        reduced = passes if self.stage > 1 else 1
        gathers = 2 * passes if self.stage == 3 else 1
        axes, late = ("replicate",), self.stage == 3
        return (
            Collective(
                CollectiveKind.reduce_scatter,
                axes,
                sent,
                reduced,
                "gradients",
                overlaps=self.overlap_comm,
            ),
            Collective(
                CollectiveKind.all_gather, axes, gathered, gathers, "weights", overlaps=late
            ),
        )

    def rank_memory(self, run: RunConfig, rank: int = 0) -> RankMemory:
        """Returns everything that the stage does not share out."""
        from scalewise.parallelism.rank_memory import ZeroMemory, forward_spec, replicated_memory

        ranks, stage, precision = self.world_size, self.stage, run.precision
        summed = precision.compute if stage == 1 else precision.parameters
        buckets = 2 if self.overlap_comm and stage < 3 else 1
        if not self.contiguous_gradients:  # gradients wait where they are; stage 3 joins them
            buckets = 2 if stage == 3 else 1
        return replace(
            replicated_memory(run),
            forward_spec=forward_spec(
                run, run.sequences_per_forward, run.data.sequence, casts_weights=True
            ),
            zero=ZeroMemory(
                stage,
                weight_element_bytes=precision.compute.bytes,
                master_element_bytes=precision.parameters.bytes,
                gradient_element_bytes=summed.bytes,
                bucket_elements=self._bucket_elements(run.trainable_parameters),
                num_buckets=buckets,
                max_live_elements=LIVE if stage == 3 else 0,
                persistence_threshold=self.keep_whole_below if stage == 3 else 0,
            ),
            state_shards=ranks,
            gradient_shards=ranks if stage >= 2 else 1,
            parameter_shards=ranks if stage == 3 else 1,
            states_on_host=self.offload_optimizer is not OffloadTarget.none,
            parameters_on_host=self.offload_parameters is not OffloadTarget.none,
            states_on_disk=self.offload_optimizer is OffloadTarget.nvme,
            parameters_on_disk=self.offload_parameters is OffloadTarget.nvme,
        )

    def build_config(
        self, run: RunConfig, nvme_folder: str, num_parameters: int, num_trained: int
    ) -> dict[str, Any]:
        """Returns what DeepSpeed calls its JSON config; ``nvme_folder`` is this rank's own folder.

        ``num_parameters`` are the numbers of the model, ``num_trained`` those that have gradients.

        The layout scales losses itself: DeepSpeed is told of accumulation and divides by nothing.
        """
        elements = self._bucket_elements(num_trained)
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": self.overlap_comm,
            "contiguous_gradients": self.contiguous_gradients,
            "reduce_bucket_size": elements,
            "allgather_bucket_size": elements + elements % 2,  # DeepSpeed aligns to pairs
        }
        if self.stage == 3:
            zero |= {
                "stage3_prefetch_bucket_size": self._bucket_elements(num_parameters),
                "stage3_param_persistence_threshold": self.keep_whole_below,
                "memory_efficient_linear": False,  # would replace torch's linear for good
                "zero_hpz_partition_size": self.hierarchical,
                "zero_quantized_weights": self.quantized_weights,
                "zero_quantized_gradients": self.quantized_gradients,
            }
        for key, place in (
            ("offload_optimizer", self.offload_optimizer),
            ("offload_param", self.offload_parameters),
        ):
            if place is not OffloadTarget.none:
                zero[key] = {"device": place.value, "nvme_path": nvme_folder}
        if self.offload_parameters is OffloadTarget.nvme:  # DeepSpeed's default buffers take 2 GB
            zero["offload_param"]["buffer_size"] = max(
                weight.numel for weight in run.weight_census()
            )
        return {
            "train_micro_batch_size_per_gpu": run.micro_batch,
            "gradient_accumulation_steps": run.accumulation,
            "gradient_clipping": run.trainer.clip_norm or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            **self._dtype_config(run),
        }

    def _bucket_elements(self, num_parameters: int) -> int:
        return min(int(self.bucket_mib * MIB / 4), max(num_parameters, 1024))

    def _dtype_config(self, run: RunConfig) -> Mapping[str, Any]:
        """Returns the formats: bf16 weights with fp32 masters, or bf16 throughout.

        Micro batches are summed up in fp32, but in bf16 by stage 1: DeepSpeed would otherwise
        take another optimizer there, which keeps every rank's gradients whole.
        """
        if run.precision.compute is not FloatFormat.bf16:
            return {}
        throughout = run.precision.parameters is FloatFormat.bf16
        bf16 = {
            "enabled": True,
            "bf16_master_weights_and_grads": throughout,
            "bf16_optimizer_states": throughout,
            "check_grad_overflow": True,
        }
        travels = "bf16" if throughout else "fp32"
        summed = "bf16" if throughout or self.stage == 1 else "fp32"
        return {
            "bf16": bf16,
            "communication_data_type": travels,
            "data_types": {"grad_accum_dtype": summed},
        }

    def prepare(self, run: RunConfig) -> None:
        """Compiles DeepSpeed's native code where this machine has not done so yet."""
        if self.native_extensions:
            from scalewise.strategies import deepspeed_ops

            for name in self.native_extensions:
                deepspeed_ops.build_extension(name, run.hardware.device)

    def build_strategy(self, device: DeviceKind) -> ParallelStrategy:
        """Returns Lightning's DeepSpeed strategy, on CUDA or the CPU."""
        from scalewise.strategies.deepspeed import ScalewiseDeepSpeedStrategy

        return ScalewiseDeepSpeedStrategy(self, device)
