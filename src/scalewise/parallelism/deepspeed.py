"""DeepSpeed ZeRO: partitioned optimizer state, gradients and parameters, with offload."""

from __future__ import annotations

import ctypes.util
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind
from scalewise.optimizers import AdamWConfig
from scalewise.parallelism.base import DEFAULT_CPU_RANKS, ParallelismConfig
from scalewise.precision import FloatFormat
from scalewise.registry import option_name, register_option
from scalewise.torch_compile import CompileScope
from scalewise.typed_override import format_override
from scalewise.units import MIB

if TYPE_CHECKING:
    from scalewise.parallelism.communication import Collective
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig
    from scalewise.strategies.base import ParallelStrategy


MAX_LIVE_ELEMENTS = 1_000_000_000
"""Maximum number of gathered elements in stage 3: DeepSpeed's default ``max_live_parameters``."""


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
        """Number of replicas."""
        return self.replicas or DEFAULT_CPU_RANKS

    @property
    def backward_follows_forward(self) -> bool:
        """Whether parameters stay gathered between forward and backward, as before stage 3."""
        return self.stage < 3

    @property
    def native_extensions(self) -> tuple[str, ...]:
        """DeepSpeed extensions that this config compiles."""
        optimizer, parameters = self.offload_optimizer, self.offload_parameters
        on_disk = OffloadTarget.nvme in (optimizer, parameters)
        return ("cpu_adam",) * (optimizer is not OffloadTarget.none) + ("async_io",) * on_disk

    def resolve(self, devices: int | None) -> Self:
        """Return the config with ``replicas`` filled in."""
        if self.replicas is not None:
            return self
        return replace(self, replicas=DEFAULT_CPU_RANKS if devices is None else devices)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield a config issue for each invalid size, and for options that require stage 3."""
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
        defaults = {
            "offload_parameters": OffloadTarget.none,
            "hierarchical": 1,
            "quantized_weights": False,
            "quantized_gradients": False,
        }
        for key, default in defaults.items():
            if (value := getattr(self, key)) != default:
                reason = f"requires stage 3; stage {self.stage} keeps parameters unsharded"
                unset = format_override(f"parallelism.{key}", default)
                fix = f"set parallelism.stage=3, or {unset}"
                yield ConfigIssue(f"parallelism.{key}", value, reason, fix)

    def validate_on_device(self, device: DeviceKind) -> Iterator[ConfigIssue]:
        """Yield a config issue for each kernel that the CPU does not have."""
        for key in ("quantized_weights", "quantized_gradients"):
            if getattr(self, key) and device is DeviceKind.cpu:
                reason = "requires CUDA: DeepSpeed has no CPU kernel for quantization"
                yield ConfigIssue(
                    f"parallelism.{key}", True, reason, f"set parallelism.{key}=false"
                )

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield a config issue for each part of ``run`` that DeepSpeed does not support."""
        yield from super().validate_with(run)
        if self.stage == 3 and run.compile.scope is not CompileScope.none:
            yield ConfigIssue(
                "compile.scope",
                run.compile.scope.value,
                "is not supported with stage 3: torch cannot trace its parameter hooks",
                "set compile=none, or parallelism=fsdp or deepspeed_zero2",
            )
        if run.precision.compute is FloatFormat.fp16:
            yield ConfigIssue(
                "precision",
                run.choices.get("precision", "fp16"),
                "is not supported: DeepSpeed's loss scale is not part of a checkpoint",
                "set precision=bf16_mixed, or parallelism=ddp",
            )
        offloaded = self.offload_optimizer
        steps_elsewhere = run.optimizer.elementwise and not isinstance(run.optimizer, AdamWConfig)
        if offloaded is not OffloadTarget.none and steps_elsewhere:
            yield ConfigIssue(
                "optimizer",
                run.choices.get("optimizer", option_name(run.optimizer)),
                f"is not supported with offload_optimizer={offloaded}, which uses DeepSpeedCPUAdam",
                "set optimizer=adamw, or parallelism.offload_optimizer=none",
            )
        yield from self.validate_on_device(run.hardware.device)

    @property
    def averaging_conflict(self) -> tuple[str, str] | None:
        """Conflict of weight averages with the master weights of DeepSpeed, and a fix."""
        reason = "averages the weights of the module, which DeepSpeed's master weights overwrite"
        return reason, f"set parallelism={'fsdp' if self.stage == 3 else 'ddp'}"

    def validate_machine(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield a config issue for each package or library that is not installed."""
        if importlib.util.find_spec("deepspeed") is None:
            chosen = run.choices.get("parallelism", "deepspeed")
            fix = "pip install 'scalewise[deepspeed]'"
            yield ConfigIssue("parallelism", chosen, "deepspeed is not installed", fix)
        if "async_io" in self.native_extensions and ctypes.util.find_library("aio") is None:
            key = "offload_optimizer"
            if self.offload_optimizer is not OffloadTarget.nvme:
                key = "offload_parameters"
            fix = f"apt-get install libaio-dev, or set parallelism.{key}=cpu"
            yield ConfigIssue(f"parallelism.{key}", "nvme", "requires libaio", fix)

    def collectives(self, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
        """Return the gradient reduction and the parameter gathering of a step.

        Stage 1 reduces once per step, stages 2 and 3 once per micro-batch. Stage 3 gathers
        parameters before each forward and backward, stages 1 and 2 once per step (Rajbhandari et
        al., 2020, section 7).
        """
        from scalewise.parallelism.communication import Collective, CollectiveKind

        if self.world_size == 1:
            return ()
        passes, precision = run.accumulation, run.precision
        num_trained = num_parameters = run.trainable_parameters
        if self.stage == 3:
            num_parameters = sum(weight.numel for weight in run.weight_census())
        reduced_bytes = num_trained * precision.parameters.bytes
        if self.quantized_gradients:
            reduced_bytes = num_trained // 2  # int4
        gathered_bytes = num_parameters * (1 if self.quantized_weights else precision.compute.bytes)
        num_reductions = passes if self.stage > 1 else 1
        num_gathers = 2 * passes if self.stage == 3 else 1
        axes, gathers_overlap = ("replicate",), self.stage == 3
        return (
            Collective(
                CollectiveKind.reduce_scatter,
                axes,
                reduced_bytes,
                num_reductions,
                "gradients",
                overlaps=self.overlap_comm,
            ),
            Collective(
                CollectiveKind.all_gather,
                axes,
                gathered_bytes,
                num_gathers,
                "weights",
                overlaps=gathers_overlap,
            ),
        )

    def rank_memory(self, run: RunConfig, rank: int = 0) -> RankMemory:
        """Return the memory of a rank after the partitioning of the stage."""
        from scalewise.parallelism.rank_memory import ZeroMemory, forward_spec, replicated_memory

        ranks, stage, precision = self.world_size, self.stage, run.precision
        accumulation_format = precision.compute if stage == 1 else precision.parameters
        num_buckets = 2 if self.overlap_comm and stage < 3 else 1
        if not self.contiguous_gradients:  # gradients stay in place; stage 3 concatenates them
            num_buckets = 2 if stage == 3 else 1
        return replace(
            replicated_memory(run),
            forward_spec=forward_spec(
                run, run.sequences_per_forward, run.data.sequence, casts_weights=True
            ),
            zero=ZeroMemory(
                stage,
                weight_element_bytes=precision.compute.bytes,
                master_element_bytes=precision.parameters.bytes,
                gradient_element_bytes=accumulation_format.bytes,
                bucket_elements=self._bucket_elements(run.trainable_parameters),
                num_buckets=num_buckets,
                max_live_elements=MAX_LIVE_ELEMENTS if stage == 3 else 0,
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
        """Return the DeepSpeed config.

        The strategy divides the loss by the accumulation steps; DeepSpeed does not.

        Args:
            run: Run to train.
            nvme_folder: Offload folder of this rank.
            num_parameters: Number of parameters.
            num_trained: Number of trained parameters.
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
                "memory_efficient_linear": False,  # would patch torch's linear permanently
                "zero_hpz_partition_size": self.hierarchical,
                "zero_quantized_weights": self.quantized_weights,
                "zero_quantized_gradients": self.quantized_gradients,
            }
        for key, target in (
            ("offload_optimizer", self.offload_optimizer),
            ("offload_param", self.offload_parameters),
        ):
            if target is not OffloadTarget.none:
                zero[key] = {"device": target.value, "nvme_path": nvme_folder}
        if self.offload_parameters is OffloadTarget.nvme:  # the default buffers take 2 GB
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
        """Return the data types: bf16 with fp32 master weights, or bf16 throughout.

        Gradients accumulate in fp32, except in stage 1, which accumulates in bf16: with fp32,
        DeepSpeed would select an optimizer that keeps gradients unsharded on every rank.
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
        communication_dtype = "bf16" if throughout else "fp32"
        accumulation_dtype = "bf16" if throughout or self.stage == 1 else "fp32"
        return {
            "bf16": bf16,
            "communication_data_type": communication_dtype,
            "data_types": {"grad_accum_dtype": accumulation_dtype},
        }

    def prepare(self, run: RunConfig) -> None:
        """Compile the DeepSpeed extensions that this machine has not compiled yet."""
        if self.native_extensions:
            from scalewise.strategies import deepspeed_ops

            for name in self.native_extensions:
                deepspeed_ops.build_extension(name, run.hardware.device)

    def build_strategy(self, device: DeviceKind) -> ParallelStrategy:
        """Return the DeepSpeed strategy of Lightning, for CUDA or the CPU."""
        from scalewise.strategies.deepspeed import ScalewiseDeepSpeedStrategy

        return ScalewiseDeepSpeedStrategy(self, device)
