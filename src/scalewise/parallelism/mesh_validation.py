"""What a mesh can cut of a model, of its rows and of its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import Recompute
from scalewise.config.registry import option_name
from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind
from scalewise.objectives import CausalLM
from scalewise.precision import FloatFormat
from scalewise.torch_compile import CompileScope

if TYPE_CHECKING:
    from scalewise.parallelism.mesh import MeshConfig
    from scalewise.run_config import RunConfig


def mesh_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields what ``mesh`` cannot do with the other parts of ``run``."""
    sizes, on_cpu = mesh.sizes, run.hardware.device is DeviceKind.cpu
    yield from _tensor_issues(mesh, run)
    yield from _context_issues(mesh, run)
    yield from _pipeline_issues(mesh, run)
    yield from _pair_issues(mesh, run)
    yield from _prompt_issues(mesh, run)
    yield from _rollout_issues(mesh, run)
    yield from _classification_issues(mesh, run)
    if run.precision.compute is FloatFormat.fp16:
        yield ConfigIssue(
            "precision",
            run.choices.get("precision", "fp16"),
            "Lightning scales no fp16 gradients over a mesh",
            "set precision=bf16_mixed, or parallelism=ddp",
        )
    sharded = max(sizes["shards"], sizes["replicate"], sizes["context"]) > 1
    if mesh.cpu_offload and not sharded:
        reason = "shards are what is offloaded, and nothing is sharded"
        yield ConfigIssue("parallelism.cpu_offload", True, reason, "set parallelism.shards=2")
    if sizes["tensor"] > 1 and on_cpu and run.compile.scope is not CompileScope.none:
        yield ConfigIssue(
            "compile.scope",
            run.compile.scope.value,
            "torch cannot compile the gradients of matrices cut over CPU ranks",
            "set compile=none",
        )
    if mesh.async_tensor and on_cpu:
        key, reason = "parallelism.async_tensor", "needs CUDA's symmetric memory"
        yield ConfigIssue(key, True, reason, f"set {key}=false")


def _prompt_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields axes that share out rows or layers, which an adapter puts vectors before."""
    ahead, before = run.adapter.prompt_tokens, run.adapter.prefix_tokens
    alone = "trains vectors of the first stage alone, and each pipeline rank takes steps"
    apart = "parallelism.context shares rows out without the vectors before them"
    for axis, tokens, reason in (("pipeline", ahead, alone), ("context", ahead or before, apart)):
        if tokens and mesh.sizes[axis] > 1:
            chosen = run.choices.get("adapter", option_name(run.adapter))
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
    tokens = run.adapter.prompt_tokens + run.data.sequence // mesh.sizes["context"]
    if mesh.sequence_parallel and tokens % ranks:
        counted = "tokens, with adapter.tokens," if run.adapter.prompt_tokens else "tokens"
        yield ConfigIssue(
            "parallelism.tensor",
            ranks,
            f"does not divide the {tokens} {counted} of a row on a rank",
            "set parallelism.sequence_parallel=false",
        )
    smooths = isinstance(run.objective, CausalLM) and run.objective.label_smoothing
    if mesh.loss_parallel and smooths:
        yield ConfigIssue(
            "parallelism.loss_parallel",
            True,
            "torch's parallel loss knows no label smoothing",
            "set parallelism.loss_parallel=false",
        )


def _context_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    ranks = mesh.sizes["context"]
    if ranks == 1:
        return
    pieces = ranks * (2 if mesh.balanced else 1)
    if run.data.sequence % pieces:
        yield ConfigIssue(
            "data.sequence",
            run.data.sequence,
            f"is not a multiple of {pieces}, the pieces that {ranks} context ranks cut a row into",
            f"set data.sequence={max(1, run.data.sequence // pieces) * pieces}",
        )
    heads = run.model.heads // mesh.sizes["tensor"]
    if mesh.attention == "ulysses" and heads % ranks:
        yield ConfigIssue(
            "parallelism.context",
            ranks,
            f"does not divide the {heads} heads that Ulysses shares out",
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
            f"makes {mesh.num_stages} stages of {layers} layers",
            "set parallelism.pipeline="
            f"{max(1, layers * mesh.sizes['pipeline'] // mesh.num_stages)}",
        )
        return
    if mesh.num_pipeline_micro_batches < mesh.num_stages:
        yield ConfigIssue(
            "parallelism.pipeline_micro_batches",
            mesh.num_pipeline_micro_batches,
            f"cannot fill {mesh.num_stages} stages",
            f"set parallelism.pipeline_micro_batches={mesh.num_stages}",
        )
    if run.micro_batch % mesh.num_pipeline_micro_batches:
        yield ConfigIssue(
            "trainer.micro_batch",
            run.micro_batch,
            f"does not fall into {mesh.num_pipeline_micro_batches} pieces for the pipeline",
            f"set trainer.micro_batch={mesh.num_pipeline_micro_batches}",
        )
    selective = Recompute.selective in run.memory.count_by_recompute(run.model.layers)
    if selective and mesh.pipeline_schedule.splits_backward:
        yield ConfigIssue(
            "memory.recompute",
            "selective",
            f"keeps its results for one backward, and {mesh.pipeline_schedule.name} makes two",
            "set memory=checkpoint_full, or parallelism.pipeline_schedule=interleaved_1f1b",
        )
    if run.compile.scope is not CompileScope.none and mesh.pipeline_schedule.splits_backward:
        yield ConfigIssue(
            "compile.scope",
            run.compile.scope.value,
            f"compiles a backward pass as one graph, and {mesh.pipeline_schedule.name} splits it",
            "set compile=none, or parallelism.pipeline_schedule=interleaved_1f1b",
        )


def _pair_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    if not run.objective.pairs:
        return
    chosen = run.choices.get("objective", option_name(run.objective))
    reasons = {
        "context": "asks how likely a whole answer is, of which each context rank has some tokens",
        "pipeline": "compares a batch with what a reference said of it, which no stage passes on",
    }
    yield from _without(mesh, reasons, "objective", chosen)


def _classification_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    if not run.model.classes:
        return
    reason = "is a head of a few rows, which tensor ranks cannot share out"
    yield from _without(mesh, {"tensor": reason}, "model.classes", run.model.classes)
    if mesh.sizes["pipeline"] > 1 and mesh.pipeline_schedule.splits_backward:
        schedule = mesh.pipeline_schedule.value
        reason = "takes a loss alone, and classes are counted beside it"
        fix = "set parallelism.pipeline_schedule=interleaved_1f1b"
        yield ConfigIssue("parallelism.pipeline_schedule", schedule, reason, fix)


def _rollout_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    if not run.objective.rollouts_per_sample:
        return
    chosen = run.choices.get("objective", option_name(run.objective))
    reasons = {
        "tensor": "draws the next token from all its logits, of which each tensor rank has some",
        "context": "reads all of an answer so far, of which each context rank has some tokens",
        "pipeline": "writes answers token by token, and a pipeline passes whole batches on",
    }
    yield from _without(mesh, reasons, "objective", chosen)


def _without(
    mesh: MeshConfig, reason_by_axis: Mapping[str, str], key: str, value: object
) -> Iterator[ConfigIssue]:
    """Yields why each axis does not go with what ``key`` chooses."""
    for axis, reason in reason_by_axis.items():
        if mesh.sizes[axis] > 1:
            yield ConfigIssue(key, value, reason, f"set parallelism=fsdp parallelism.{axis}=1")


def _largest_divisor(size: int, limit: int) -> int:
    return max(n for n in range(1, limit + 1) if size % n == 0)
