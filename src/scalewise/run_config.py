"""Run configuration: one config per group, and derived sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

from scalewise.adapters.config import AdapterConfig
from scalewise.checkpoint_config import CheckpointConfig
from scalewise.data.base import DataConfig
from scalewise.hardware import (
    DeviceKind,
    Hardware,
    launched_world_size,
    resolve_for_machine,
    this_machine,
)
from scalewise.launch_config import Launch
from scalewise.lr_schedules import ScheduleConfig
from scalewise.memory_config import ActivationCheckpointing
from scalewise.models.base import AttentionFlops, ModelConfig, Weight
from scalewise.objectives import ObjectiveConfig
from scalewise.optimizers import OptimizerConfig
from scalewise.parallelism.base import ParallelismConfig
from scalewise.plan_config import PlanConfig
from scalewise.precision import FloatFormat, Precision
from scalewise.quantization.config import (
    NoQuantizationConfig,
    QuantizationConfig,
    has_frozen_weights,
    weight_census,
    weight_census_by_kind,
)
from scalewise.registry import option_name, plain_value, with_fields
from scalewise.step_counts import StepCounts
from scalewise.torch_compile import Compile, CompileScope
from scalewise.tracking_config import WandbConfig
from scalewise.trainer_config import TrainerConfig
from scalewise.verify_config import VerifyConfig


@dataclass(frozen=True)
class RunConfig:
    """Configuration of one job: one config per group. Immutable and picklable."""

    model: ModelConfig
    """Architecture and initial weights."""
    data: DataConfig
    """Training and validation data, and their tokenization."""
    objective: ObjectiveConfig
    """Training loss."""
    parallelism: ParallelismConfig
    """How parameters, activations and data are sharded over ranks."""
    precision: Precision
    """Data types of parameters and matmuls."""
    optimizer: OptimizerConfig
    """Optimizer, learning rate and weight decay."""
    schedule: ScheduleConfig
    """Learning rate schedule."""
    adapter: AdapterConfig
    """Parameter-efficient fine-tuning (PEFT): LoRA and others."""
    memory: ActivationCheckpointing
    """Activation checkpointing and activation offload."""
    compile: Compile
    """Compilation by torch.compile."""
    trainer: TrainerConfig
    """Training length, batch sizes, clipping and validation."""
    checkpoint: CheckpointConfig
    """When checkpoints are written and which are kept."""
    tracking: WandbConfig
    """Weights & Biases: mode, project and uploads."""
    launch: Launch
    """Processes, timeouts, restarts and memory limits."""
    hardware: Hardware
    """Devices that a run is planned for and runs on."""
    quantization: QuantizationConfig = field(default_factory=NoQuantizationConfig)
    """Bit width of frozen weights, or quantization-aware training."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Memory prediction, and search for a better configuration."""
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """Comparison of the strategy with one device."""
    name: str = "run"
    """Name of the run: its folder below runs/ and its W&B name; by default composed from the
    overrides."""
    seed: int = 1
    """Seed of initial weights, data order and dropout."""
    question: str = ""
    """Question that the run answers; the title of its report."""
    resume: str | None = None
    """Checkpoint or run folder to resume from, ``last`` or ``auto``; null: from scratch."""
    callbacks: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Lightning callbacks by name, each with a ``_target_``."""
    trusted_packages: tuple[str, ...] = ()
    """Packages from which ``callbacks`` and user-defined modules may be imported."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """Option chosen in each group; recorded by scalewise."""
    overrides: tuple[str, ...] = ()
    """Overrides of the command line; recorded by scalewise."""

    def option(self, group: str) -> str:
        """Name of the option chosen in ``group``; without ``choices``, one with the same class."""
        return self.choices.get(group) or option_name(getattr(self, group))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.parallelism.world_size

    @cached_property
    def global_batch(self) -> int:
        """Global batch size: samples of one optimizer step over all ranks, after any warm-up."""
        return self.trainer.global_batch or self.samples_per_forward

    @cached_property
    def samples_per_step(self) -> StepCounts:
        """Global batch size of each optimizer step, with ``trainer.batch_warmup``."""
        return self.trainer.samples_per_step(self.global_batch)

    @cached_property
    def micro_batches_per_step(self) -> StepCounts:
        """Number of micro-batches that each rank accumulates in each optimizer step."""
        size = self.samples_per_forward
        return self.samples_per_step.convert(lambda samples: ceil(samples / size))

    @cached_property
    def sequence_per_step(self) -> StepCounts:
        """Sequence length of each optimizer step, in tokens, with ``trainer.sequence_warmup``."""
        return self.trainer.sequence_per_step(self.data.sequence)

    @cached_property
    def sequence_lengths(self) -> Mapping[str, int]:
        """Sequence lengths of the run by key: of the data, and of the stages of a warm-up."""
        stages = self.trainer.sorted_sequence_stages
        lengths = {f"trainer.sequence_warmup.{name}.sequence": it.sequence for name, it in stages}
        return {"data.sequence": self.data.sequence, **lengths}

    @cached_property
    def warmup_runs(self) -> Mapping[int, RunConfig]:
        """Runs of the stages of a warm-up, and this run after them, by tokens of a step.

        A stage's run has its batch size and sequence length in all steps.
        """
        stages = {tokens: self._at_step(end - 1) for end, tokens in self.tokens_in_step.stages}
        return {**stages, self.tokens_per_step: self}

    def _at_step(self, step: int) -> RunConfig:
        samples, length = self.samples_per_step.at(step), self.sequence_per_step.at(step)
        trainer = replace(self.trainer, global_batch=samples, batch_warmup={}, sequence_warmup={})
        return replace(self, trainer=trainer, data=with_fields(self.data, sequence=length))

    @cached_property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks, after any warm-up."""
        return self.tokens_in_step.final

    @cached_property
    def tokens_in_step(self) -> StepCounts:
        """Tokens of each optimizer step over all ranks."""
        sequences = self.samples_per_step.convert(lambda it: it * self.sequences_per_sample)
        return sequences.multiply(self.sequence_per_step)

    @cached_property
    def micro_batch(self) -> int:
        """Micro-batch size: samples of one forward pass on one rank.

        With ``trainer.micro_batch=auto``, the whole batch of a rank until a size is chosen.
        """
        size = self.trainer.micro_batch
        if isinstance(size, int):
            return size
        return ceil((self.trainer.global_batch or 1) / self.parallelism.data_parallel_size)

    @cached_property
    def samples_per_forward(self) -> int:
        """Samples of one forward pass over all ranks."""
        return self.micro_batch * self.parallelism.data_parallel_size

    @cached_property
    def accumulation(self) -> int:
        """Number of micro-batches that each rank accumulates in a step, after any warm-up.

        It is also the factor by which Lightning divides the loss of each micro-batch, in any step.
        """
        return ceil(self.global_batch / self.samples_per_forward)

    @cached_property
    def sequences_per_sample(self) -> int:
        """Sequences per sample: 2 for preference pairs, the sampled answers for GRPO, else 1."""
        return 2 if self.objective.pairs else max(1, self.objective.rollouts_per_sample)

    @property
    def sequences_per_forward(self) -> int:
        """Sequences of one forward pass on one rank."""
        return self.micro_batch * self.sequences_per_sample

    @property
    def batch_description(self) -> str:
        """Batch of one optimizer step, in words."""
        rollout_text = f"prompts with {self.objective.rollouts_per_sample} answers each in"
        samples = "pairs of 2 x" if self.objective.pairs else "sequences of"
        samples = rollout_text if self.objective.rollouts_per_sample else samples
        return f"{self.global_batch} {samples} {self.data.sequence} tokens"

    @cached_property
    def runs_reference_forward(self) -> bool:
        """Whether each forward pass first evaluates the reference model, with the adapter off.

        If training started from another model, its log-probabilities are stored instead.
        """
        adapter = self.adapter
        starts_from_base = adapter.can_disable and not (adapter.trained or adapter.resume)
        return self.objective.reference_objective is not None and starts_from_base

    @cached_property
    def applied_compile(self) -> Compile:
        """Compilation that is applied: ``compile`` with ``auto`` resolved.

        ``auto`` is ``block`` on CUDA if all parts of the run support it, else ``none``.
        """
        if self.compile.scope is not CompileScope.auto:
            return self.compile
        parts = (self.objective, self.quantization, self.memory, self.parallelism)
        compiles = (
            self.hardware.device is DeviceKind.cuda
            and all(part.supports_compile for part in parts)
            and self.model.has_equal_blocks
            and not self.shards_experts
        )
        return replace(self.compile, scope=CompileScope.block if compiles else CompileScope.none)

    @property
    def shards_experts(self) -> bool:
        """Whether tensor-parallel ranks store a part of each expert of the decoder."""
        ranks = getattr(self.parallelism, "sizes", {}).get("tensor", 1)
        return ranks > 1 and bool(self.model.expert_layers)

    @property
    def is_compiled(self) -> bool:
        """Whether the model, or each of its blocks, is compiled."""
        return self.applied_compile.scope is not CompileScope.none

    @cached_property
    def cuda_compile(self) -> Compile | None:
        """Config by which parts outside of the model are compiled as well; None: they are not.

        They are on CUDA, if the model is compiled.
        """
        on_cuda = self.hardware.device is DeviceKind.cuda
        return self.applied_compile if on_cuda and self.is_compiled else None

    @cached_property
    def loss_compile(self) -> Compile | None:
        """Config by which the loss is compiled, with the model on CUDA.

        None: eager, as on logits that tensor parallelism shards along the vocabulary.
        """
        has_sharded_logits = getattr(self.parallelism, "sizes", {}).get("tensor", 1) > 1
        return None if has_sharded_logits else self.cuda_compile

    @property
    def sequence_loss_weight(self) -> float:
        """Weight of one sequence in losses inside of the model, such as those of routers.

        They are averaged over the sequences of the global batch; gradients over ranks. Each context
        rank has the mean over its tokens, of which the average over these ranks is that of all.
        """
        sequences = self.global_batch * self.sequences_per_sample
        return self.parallelism.data_parallel_size / sequences

    @property
    def computes_loss_gradients_in_forward(self) -> bool:
        """Whether the gradients of a chunked loss are computed in the forward pass.

        This avoids recomputing the logits. It requires a strategy that runs backward directly
        after forward, and does not work with fp16 loss scaling or a fully compiled model.
        """
        return (
            self.objective.loss_chunk is not None
            and self.objective.is_scalar
            and self.parallelism.backward_follows_forward
            and self.precision.compute is not FloatFormat.fp16
            and self.applied_compile.scope is not CompileScope.whole
        )

    @property
    def extra_forward_passes(self) -> int:
        """Number of forward-only passes before each forward and backward pass.

        One per generated token, without a KV cache, and one of the reference model.
        """
        generated = self.data.answer_length if self.objective.rollouts_per_sample else 0
        return generated + self.runs_reference_forward

    @cached_property
    def flops_per_token(self) -> float:
        """Model FLOPs per token: 6 per weight and causal attention, without recomputation."""
        return self.count_flops(AttentionFlops.causal)

    def count_flops(self, attention: AttentionFlops) -> float:
        """Return the FLOPs of one token's forward and backward pass.

        A forward-only pass counts as a third of the model's FLOPs.

        Args:
            attention: Convention by which attention is counted.
        """
        sequence, target = self.data.sequence, self.data.target_length
        forward_only = self.model.flops(sequence, 0, attention) / 3 * self.extra_forward_passes
        return self.adapter.flops(self.model, sequence, target, attention) + forward_only

    @cached_property
    def flops_per_step(self) -> float:
        """Model FLOPs of one optimizer step over all ranks."""
        return self.flops_per_token * self.tokens_per_step

    @cached_property
    def palm_to_causal_flops(self) -> float:
        """Ratio of the FLOPs by PaLM's convention, where attention is not causal, to model FLOPs.

        It is also the ratio of the two conventions of model FLOPs utilization (MFU).
        """
        return self.count_flops(AttentionFlops.palm) / self.flops_per_token

    def weight_census(self) -> tuple[Weight, ...]:
        """All parameter tensors of the model and its adapter."""
        return weight_census(self.quantization, self.adapter, self.model)

    def weight_census_by_kind(self) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Parameter tensors of one block, and those outside of blocks."""
        return weight_census_by_kind(self.quantization, self.adapter, self.model)

    @property
    def trainable_parameters(self) -> int:
        """Number of trained parameters, those of the adapter included."""
        return sum(weight.numel for weight in self.weight_census() if weight.trainable)

    @property
    def has_frozen_weights(self) -> bool:
        """Whether most parameters of the model are frozen and an adapter is trained instead."""
        return has_frozen_weights(self.quantization, self.adapter, self.model)

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that a forkserver may import before the ranks start.

        None on CUDA: a library that queries CUDA devices on import breaks forked processes.
        """
        if self.hardware.device is not DeviceKind.cpu:
            return ()
        return (*self.adapter.imports, *self.model.imports, *self.parallelism.imports)

    def num_steps(self, samples: int) -> int:
        """Optimizer steps of this run over a training split of ``samples`` samples."""
        return self.trainer.num_steps(self.tokens_in_step, self.global_batch, samples)

    def resolve(self) -> RunConfig:
        """Resolve hardware, mesh sizes and adapter checkpoint for this machine."""
        hardware = resolve_for_machine(self.hardware)
        on_cuda = hardware.device is DeviceKind.cuda
        present = max(1, len(this_machine().gpus)) if on_cuda else None
        devices = launched_world_size() or hardware.total_devices or present
        parallelism, adapter = self.parallelism.resolve(devices), self.adapter.resolve()
        return replace(self, hardware=hardware, parallelism=parallelism, adapter=adapter)

    @property
    def applied_choices(self) -> dict[str, str]:
        """``choices``, with the compilation that is applied instead of ``auto``."""
        choices = dict(self.choices)
        if "compile" in choices and self.compile.scope is CompileScope.auto:
            choices["compile"] = self.applied_compile.scope.value
        return choices

    def as_dict(self, *, resolve_compile: bool = True) -> dict[str, object]:
        """Convert the run to nested dicts and lists, each option with its ``_target_``.

        ``resolve_compile`` replaces ``compile=auto`` by the compilation that is applied.
        """
        run = self
        if resolve_compile:
            run = replace(self, compile=self.applied_compile, choices=self.applied_choices)
        plain = plain_value(run)
        assert isinstance(plain, dict)
        return {key: value for key, value in plain.items() if key != "_target_"}
