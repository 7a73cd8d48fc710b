"""Rules between the parallelism strategy and the other parts of a run."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from functools import singledispatch

from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind
from scalewise.models.op_graph import Recompute
from scalewise.objectives import CausalLM
from scalewise.optimizers import AdamWConfig
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.ddp import CommHook, DDPConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig, OffloadTarget
from scalewise.parallelism.mesh import MeshConfig
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.validation.expert_rules import expert_parallel_issues


@singledispatch
def parallelism_issues(parallelism: ParallelismConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for each part of ``run`` that the strategy does not support."""
    yield from _optimizer_issues(parallelism, run)


@parallelism_issues.register(DDPConfig)
def _ddp_issues(parallelism: DDPConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for hooks that the device or the optimizer does not support."""
    yield from _optimizer_issues(parallelism, run)
    yield from parallelism.validate_on_device(run.hardware.device)
    hook = parallelism.comm_hook
    if hook is CommHook.post_local_sgd and run.optimizer.shard:
        yield ConfigIssue(
            "optimizer.shard",
            True,
            "post_local_sgd would update each parameter from the samples of one rank only",
            "set optimizer.shard=false, or another parallelism.comm_hook",
        )
    if parallelism.static_graph and run.accumulation > 1:
        yield ConfigIssue(
            "parallelism.static_graph",
            True,
            f"fails with {run.accumulation} micro-batches per step in torch's DDP",
            "set parallelism.static_graph=false, or "
            f"trainer.global_batch={run.samples_per_forward}",
        )


@parallelism_issues.register(DeepSpeedConfig)
def _deepspeed_issues(parallelism: DeepSpeedConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for each part of ``run`` that DeepSpeed does not support."""
    yield from _optimizer_issues(parallelism, run)
    if run.is_compiled and not parallelism.supports_compile:
        yield ConfigIssue(
            "compile.scope",
            run.compile.scope.value,
            "is not supported with stage 3: torch cannot trace its parameter hooks",
            "set compile=none, or parallelism=fsdp or deepspeed_zero2",
        )
    if run.precision.compute is FloatFormat.fp16:
        yield ConfigIssue(
            "precision",
            run.option("precision"),
            "is not supported: DeepSpeed's loss scale is not part of a checkpoint",
            "set precision=bf16_mixed, or parallelism=ddp",
        )
    offloaded = parallelism.offload_optimizer
    steps_elsewhere = run.optimizer.elementwise and not isinstance(run.optimizer, AdamWConfig)
    if offloaded is not OffloadTarget.none and steps_elsewhere:
        yield ConfigIssue(
            "optimizer",
            run.option("optimizer"),
            f"is not supported with offload_optimizer={offloaded}, which uses DeepSpeedCPUAdam",
            "set optimizer=adamw, or parallelism.offload_optimizer=none",
        )
    yield from parallelism.validate_on_device(run.hardware.device)


def _optimizer_issues(parallelism: ParallelismConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for each option of the optimizer that the strategy does not support."""
    if run.optimizer.in_backward and parallelism.reduces_after_backward:
        reason = "requires complete gradients in backward; this strategy reduces them later"
        fix = "set optimizer.in_backward=false, or parallelism=fsdp"
        yield ConfigIssue("optimizer.in_backward", True, reason, fix)
    if run.optimizer.shard and not parallelism.supports_optimizer_sharding:
        reason = "requires replicas that partition optimizer state; this strategy has none"
        fix = "set optimizer.shard=false, or parallelism=ddp"
        yield ConfigIssue("optimizer.shard", True, reason, fix)
    if run.optimizer.offload and not parallelism.supports_optimizer_offload:
        reason = "requires unsharded parameters; this strategy has its own offload option"
        option = "offload_optimizer=cpu" if parallelism.flattens_parameters else "cpu_offload=true"
        fix = f"set optimizer.offload=false parallelism.{option}"
        yield ConfigIssue("optimizer.offload", True, reason, fix)
    gathered = run.optimizer.gathers_shards and parallelism.has_gatherable_shards
    needs_unsharded = (
        run.optimizer.uses_whole_weights and parallelism.shards_parameters and not gathered
    )
    if needs_unsharded or (parallelism.flattens_parameters and not run.optimizer.elementwise):
        chosen = run.option("optimizer")
        reason = "requires unsharded parameters; this strategy shards them"
        if not needs_unsharded:
            reason = "requires separate parameters; this strategy updates one flat vector"
        better = "fsdp" if run.optimizer.gathers_shards else "ddp"
        fix = f"set optimizer=adamw, or parallelism={better}"
        yield ConfigIssue("optimizer", chosen, reason, fix)


@singledispatch
def parallelism_machine_issues(
    parallelism: ParallelismConfig, run: RunConfig
) -> Iterator[ConfigIssue]:
    """Yield an issue for each requirement of the strategy that this machine does not meet."""
    yield from ()


@parallelism_machine_issues.register(DeepSpeedConfig)
def _deepspeed_machine_issues(
    parallelism: DeepSpeedConfig, run: RunConfig
) -> Iterator[ConfigIssue]:
    """Yield an issue for each package or library that is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        chosen = run.option("parallelism")
        fix = "pip install 'scalewise[deepspeed]'"
        yield ConfigIssue("parallelism", chosen, "deepspeed is not installed", fix)
    if "async_io" in parallelism.native_extensions and ctypes.util.find_library("aio") is None:
        key = "offload_optimizer"
        if parallelism.offload_optimizer is not OffloadTarget.nvme:
            key = "offload_parameters"
        fix = f"apt-get install libaio-dev, or set parallelism.{key}=cpu"
        yield ConfigIssue(f"parallelism.{key}", "nvme", "requires libaio", fix)


@parallelism_machine_issues.register(MeshConfig)
def _mesh_machine_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue if FSDP cannot shard experts over another mesh than the rest of a block."""
    version = importlib.metadata.version("torch")
    if mesh.expert > 1 and tuple(map(int, version.split(".")[:2])) < (2, 12):
        reason = f"requires torch 2.12 or newer, and {version} is installed"
        fix = "pip install 'torch>=2.12', or set parallelism.expert=1"
        yield ConfigIssue("parallelism.expert", mesh.expert, reason, fix)


@parallelism_issues.register(MeshConfig)
def _mesh_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for sizes that do not divide the model or the data, and for unsupported axes."""
    yield from _optimizer_issues(mesh, run)
    sizes, on_cpu = mesh.sizes, run.hardware.device is DeviceKind.cpu
    yield from _tensor_issues(mesh, run)
    yield from _context_issues(mesh, run)
    yield from expert_parallel_issues(mesh, run)
    yield from _pipeline_issues(mesh, run)
    yield from _pair_issues(mesh, run)
    yield from _prompt_issues(mesh, run)
    yield from _rollout_issues(mesh, run)
    yield from _classification_issues(mesh, run)
    if run.precision.compute is FloatFormat.fp16:
        yield ConfigIssue(
            "precision",
            run.option("precision"),
            "is not supported on a mesh: Lightning does not scale fp16 gradients there",
            "set precision=bf16_mixed, or parallelism=ddp",
        )
    sharded = max(sizes["shards"], sizes["replicate"], sizes["context"]) > 1
    if mesh.cpu_offload and not sharded:
        reason = "offloads sharded parameters, and no axis shards them"
        yield ConfigIssue("parallelism.cpu_offload", True, reason, "set parallelism.shards=2")
    if sizes["tensor"] > 1 and on_cpu and run.is_compiled:
        yield ConfigIssue(
            "compile.scope",
            run.compile.scope.value,
            "is not supported with tensor parallelism on the CPU by torch",
            "set compile=none",
        )
    if mesh.async_tensor:
        key, reason = "parallelism.async_tensor", "is not implemented: no collective would overlap"
        yield ConfigIssue(key, True, reason, f"set {key}=false")


def _prompt_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a config issue for axes that split the sequences or layers with adapter tokens."""
    prompt_tokens, prefix_tokens = run.adapter.prompt_tokens, run.adapter.prefix_tokens
    pipeline_reason = (
        "trains prompt tokens of the first stage only, and each pipeline rank has an optimizer"
    )
    context_reason = (
        "is not supported with parallelism.context, which splits sequences without the prompt"
    )
    for axis, tokens, reason in (
        ("pipeline", prompt_tokens, pipeline_reason),
        ("context", prompt_tokens or prefix_tokens, context_reason),
    ):
        if tokens and mesh.sizes[axis] > 1:
            chosen = run.option("adapter")
            fix = f"set parallelism=fsdp parallelism.{axis}=1, or adapter=lora"
            yield ConfigIssue("adapter", chosen, reason, fix)


def _tensor_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    ranks = mesh.sizes["tensor"]
    if ranks == 1:
        return
    for name, size in run.model.tensor_parallel_sizes().items():
        if size % ranks:
            yield ConfigIssue(
                "parallelism.tensor",
                ranks,
                f"does not divide model.{name}={size}",
                f"set parallelism.tensor={_largest_divisor(size, ranks)}",
            )
    for key, length in run.sequence_lengths.items():
        tokens = run.adapter.prompt_tokens + length // mesh.sizes["context"]
        if mesh.sequence_parallel and tokens % ranks:
            unit = "tokens, with adapter.tokens," if run.adapter.prompt_tokens else "tokens"
            stage = "" if key == "data.sequence" else f" with {key}={length}"
            yield ConfigIssue(
                "parallelism.tensor",
                ranks,
                f"does not divide the {tokens} {unit} of a sequence on a rank{stage}",
                "set parallelism.sequence_parallel=false",
            )
    has_smoothing = isinstance(run.objective, CausalLM) and run.objective.label_smoothing
    if mesh.loss_parallel and has_smoothing:
        yield ConfigIssue(
            "parallelism.loss_parallel",
            True,
            "is not supported with objective.label_smoothing by torch's parallel loss",
            "set parallelism.loss_parallel=false",
        )


def _context_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    ranks = mesh.sizes["context"]
    if ranks == 1:
        return
    num_chunks = ranks * (2 if mesh.balanced else 1)
    for key, length in run.sequence_lengths.items():
        if length % num_chunks:
            reason = (
                f"is not a multiple of {num_chunks}, the number of chunks for {ranks} context ranks"
            )
            fix = f"set {key}={max(1, length // num_chunks) * num_chunks}"
            yield ConfigIssue(key, length, reason, fix)
    heads = run.model.heads // mesh.sizes["tensor"]
    if mesh.attention == "ulysses" and heads % ranks:
        yield ConfigIssue(
            "parallelism.context",
            ranks,
            f"does not divide the {heads} heads that Ulysses splits",
            "set parallelism.attention=gather",
        )


def _pipeline_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    if mesh.sizes["pipeline"] == 1:
        return
    layers = run.model.layers
    if mesh.num_stages > layers:
        yield ConfigIssue(
            "parallelism.pipeline",
            mesh.sizes["pipeline"],
            f"requires {mesh.num_stages} stages, and the model has {layers} layers",
            "set parallelism.pipeline="
            f"{max(1, layers * mesh.sizes['pipeline'] // mesh.num_stages)}",
        )
        return
    if mesh.num_pipeline_micro_batches < mesh.num_stages:
        yield ConfigIssue(
            "parallelism.pipeline_micro_batches",
            mesh.num_pipeline_micro_batches,
            f"is less than the {mesh.num_stages} stages",
            f"set parallelism.pipeline_micro_batches={mesh.num_stages}",
        )
    if run.micro_batch % mesh.num_pipeline_micro_batches:
        yield ConfigIssue(
            "trainer.micro_batch",
            run.micro_batch,
            f"is not a multiple of the {mesh.num_pipeline_micro_batches} pipeline micro-batches",
            f"set trainer.micro_batch={mesh.num_pipeline_micro_batches}",
        )
    if mesh.splits_backward:
        yield from _split_backward_issues(mesh, run)
    if run.is_compiled and not mesh.supports_compile:
        yield ConfigIssue(
            "compile.scope",
            run.compile.scope.value,
            f"compiles a backward pass as one graph, and {mesh.pipeline_schedule.name} splits it",
            "set compile=none, or parallelism.pipeline_schedule=interleaved_1f1b",
        )


def _split_backward_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for recomputation, which torch repeats for each part of a split backward."""
    reasons = {
        Recompute.selective: "saves outputs for one backward pass, and {} runs two",
        Recompute.full: "recomputes a block once for each group of its weights with {}",
    }
    for recompute in run.memory.count_by_recompute(run.model.layers):
        if recompute in reasons:
            yield ConfigIssue(
                "memory.recompute",
                recompute.value,
                reasons[recompute].format(mesh.pipeline_schedule.name),
                "set memory=none, or parallelism.pipeline_schedule=interleaved_1f1b",
            )


def _pair_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    if not run.objective.pairs:
        return
    chosen = run.option("objective")
    reasons = {
        "context": "requires the log-probability of whole answers; context ranks have a part each",
        "pipeline": "requires reference log-probabilities, which pipeline stages do not pass on",
    }
    yield from _unsupported_axis_issues(mesh, reasons, "objective", chosen)


def _classification_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    if not run.model.classes:
        return
    reason = "is a head with few rows, which tensor parallelism cannot shard"
    yield from _unsupported_axis_issues(
        mesh, {"tensor": reason}, "model.classes", run.model.classes
    )
    if mesh.sizes["pipeline"] > 1 and mesh.pipeline_schedule.splits_backward:
        schedule = mesh.pipeline_schedule.value
        reason = "supports a loss only, and classification counts correct samples too"
        fix = "set parallelism.pipeline_schedule=interleaved_1f1b"
        yield ConfigIssue("parallelism.pipeline_schedule", schedule, reason, fix)


def _rollout_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    if not run.objective.rollouts_per_sample:
        return
    chosen = run.option("objective")
    reasons = {
        "tensor": "samples from complete logits; tensor ranks have a part each",
        "context": "generates from complete sequences; context ranks have a part each",
        "pipeline": "generates token by token; pipeline stages process whole batches",
    }
    yield from _unsupported_axis_issues(mesh, reasons, "objective", chosen)


def _unsupported_axis_issues(
    mesh: MeshConfig, reason_by_axis: Mapping[str, str], key: str, value: object
) -> Iterator[ConfigIssue]:
    """Yield a config issue for each used axis that the value of ``key`` does not support."""
    for axis, reason in reason_by_axis.items():
        if mesh.sizes[axis] > 1:
            yield ConfigIssue(key, value, reason, f"set parallelism=fsdp parallelism.{axis}=1")


def _largest_divisor(size: int, limit: int) -> int:
    return max(n for n in range(1, limit + 1) if size % n == 0)
