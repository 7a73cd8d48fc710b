"""Planned memory of transformers models compared with measured memory and traces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.hf_checkpoints import DECODER_MODELS, NO_SEQUENCE_PARALLEL, HFCheckpoints
from fixtures.job_runner import JobRunner
from fixtures.strategies import mesh, needs_deepspeed

from scalewise import compose
from scalewise.bench.memory_accuracy_runs import ZERO
from scalewise.hardware import DeviceKind
from scalewise.models.op_graph import Recompute
from scalewise.planner import host_memory, peak_memory
from scalewise.planner.activation_liveness import offloaded_bytes
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.strategies.activation_checkpointing import OffloadedStorages, Restore
from scalewise.strategies.single import SingleDevice
from scalewise.tracing.step_trace import rejection_reason, trace_run

LONG = pytest.mark.exhaustive
FULL, LORA = "memory=checkpoint_full", ("adapter=lora", "adapter.rank=4")
OFFLOAD = "memory=offload_activations"
OFFLOAD_ALL = (OFFLOAD, "memory.recompute=nothing")
IN_BACKWARD = ("optimizer.in_backward=true", "trainer.clip_norm=null")
FP8 = ("precision=fp8", "precision.compute=fp32", FULL)
QAT = "quantization=qat_8da4w"
FSDP = ("parallelism=fsdp", "trainer.micro_batch=4")
LINES: tuple[tuple[str, ...], ...] = (
    (),
    (FULL,),
    LORA,
    ("adapter=ia3", "adapter.trained=[.*norm|.*ln_.]"),
    ("adapter=dora", "adapter.dropout=0.1", FULL),
    ("objective.loss_chunk=128",),
    ("memory=checkpoint_selective",),
    ("memory=checkpoint_every_n", "memory.every=2"),
    ("precision=bf16_mixed",),
    ("trainer.global_batch=16",),
    ("parallelism=ddp", "trainer.micro_batch=4"),
    FSDP,
    (*FSDP, "precision=bf16_mixed", FULL),
    (*FSDP, *LORA, FULL),
    ("parallelism=hsdp", "parallelism.shards=2", "trainer.micro_batch=2"),
    (*LORA, "quantization=nf4"),
    (*LORA, "quantization=fp4", "quantization.double=false", "precision=bf16_mixed"),
    (*LORA, "quantization=int8", FULL),
    (*FSDP, *LORA, "quantization=nf4"),
    (*FSDP, *LORA, "quantization=nf4", "precision=bf16_true", FULL),
)
WIDER: tuple[tuple[str, ...], ...] = (
    (OFFLOAD,),
    (OFFLOAD, "memory.recompute=selective", "precision=bf16_mixed"),
    OFFLOAD_ALL,
    (*OFFLOAD_ALL, *LORA),
    (*OFFLOAD_ALL, *LORA, "quantization=nf4"),
    (*OFFLOAD_ALL, "precision=bf16_mixed", "objective.loss_chunk=128"),
    ("parallelism=ddp", "trainer.micro_batch=4", *OFFLOAD_ALL),
    (*FSDP, *OFFLOAD_ALL),
    (*FSDP, OFFLOAD, "precision=bf16_mixed"),
    IN_BACKWARD,
    (*IN_BACKWARD, FULL),
    (*IN_BACKWARD, OFFLOAD, "optimizer=adamw_8bit"),
    (*IN_BACKWARD, "optimizer=adafactor", "precision=bf16_mixed", "objective.loss_chunk=128"),
    (*IN_BACKWARD, *LORA),
    (*IN_BACKWARD, *FSDP),
    (*IN_BACKWARD, "parallelism=hsdp", "parallelism.shards=2", "trainer.micro_batch=2"),
    FP8,
    ("precision=fp8", FULL),
    ("precision=fp8", "precision.recipe=rowwise", "memory=checkpoint_selective"),
    ("precision=fp8", *OFFLOAD_ALL),
    ("precision=fp8", *IN_BACKWARD),
    (*FSDP, "precision=fp8", FULL),
    ("parallelism=ddp", "trainer.micro_batch=4", *FP8),
)
ROUNDED: tuple[tuple[str, ...], ...] = (
    (QAT,),
    (QAT, FULL),
    (QAT, "memory=checkpoint_selective", "precision=bf16_mixed"),
    ("quantization=qat_int4", "quantization.group=16", "trainer.micro_batch=1"),
    (QAT, *OFFLOAD_ALL),
    (QAT, FULL, *IN_BACKWARD),
    (*FSDP, QAT, "precision=bf16_mixed"),
    ("parallelism=ddp", "trainer.micro_batch=4", QAT, FULL),
)
TENSOR = ("parallelism=tensor", NO_SEQUENCE_PARALLEL)
SPLIT: tuple[tuple[str, ...], ...] = (
    TENSOR,
    (*TENSOR, FULL),
    (*TENSOR, "memory=checkpoint_selective"),
    (*TENSOR, "precision=bf16_mixed"),
    (*TENSOR, "parallelism.loss_parallel=false"),
    (*TENSOR, "objective.loss_chunk=128"),
    (*TENSOR, "parallelism.loss_parallel=false", "objective.loss_chunk=128"),
    (*TENSOR, "trainer.global_batch=16"),
    (*mesh(shards=2, tensor=2), NO_SEQUENCE_PARALLEL, "trainer.micro_batch=4"),
    (*mesh(shards=2, tensor=2), NO_SEQUENCE_PARALLEL, "trainer.micro_batch=4", FULL),
    (*TENSOR, OFFLOAD),
    (*TENSOR, *OFFLOAD_ALL),
    (*TENSOR, *IN_BACKWARD),
    (*mesh(shards=2, tensor=2), NO_SEQUENCE_PARALLEL, "trainer.micro_batch=4", *OFFLOAD_ALL),
    (*mesh(shards=2, tensor=2), NO_SEQUENCE_PARALLEL, "trainer.micro_batch=4", *IN_BACKWARD),
)
TABLES = (
    (DECODER_MODELS, LINES),
    ((*DECODER_MODELS, "wide"), WIDER),
    (("llama", "wide"), ROUNDED),
    (("llama", "wide", "qwen2"), SPLIT),
)
USUAL = (
    ("llama", FSDP),
    ("gpt2", LORA),
    ("llama", OFFLOAD_ALL),
    ("wide", (*IN_BACKWARD, FULL)),
    ("wide", FP8),
    ("wide", (QAT, FULL)),
)
FEW = [
    line for line in ZERO if "precision=bf16_mixed" not in line and any("bucket" in s for s in line)
]
"""What one bucket of all gradients holds depends on when gloo lets go of its copy."""


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("hf_memory"), shared_cache)


def small(folder: Path, *overrides: str) -> tuple[str, ...]:
    return (
        "model=hf",
        f"model.path={folder}",
        "data=synthetic",
        "data.sequence=64",
        "tracking=none",
        "callbacks=[none]",
        "checkpoint=none",
        "trainer.max_steps=3",
        "trainer.log_every=3",
        "trainer.micro_batch=8",
        "schedule.warmup_steps=1",
        "launch.isolation=process",
        *overrides,
    )


@pytest.mark.parametrize(
    ("family", "line"),
    [
        pytest.param(family, line, marks=() if (family, line) in USUAL else LONG)
        for families, lines in TABLES
        for family in families
        for line in lines
    ],
    ids=str,
)
def test_hf_peak_memory_equals_prediction(
    family: str, line: tuple[str, ...], hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    overrides = small(hf_checkpoint(family), *line)
    predicted = peak_memory.worst_rank_breakdown(compose(overrides))
    found = run_job.without_defaults(*overrides).summary["metrics"]["memory/peak_bytes"]
    error = predicted.peak / found - 1
    print(f"{family} {' '.join(line)}: {error:+.2%} at {predicted.peak_phase}")
    assert abs(error) < 0.02


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("family", DECODER_MODELS)
def test_hf_offloaded_bytes_equal_prediction(
    family: str, recompute: Recompute, hf_checkpoint: HFCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And brought back: traffic counts it twice."""
    run = compose(small(hf_checkpoint(family), OFFLOAD, f"memory.recompute={recompute}"))
    gone: list[int] = []
    put = OffloadedStorages._offload

    def counted(away: OffloadedStorages, storage: torch.UntypedStorage) -> Restore:
        gone.append(storage.nbytes())
        return put(away, storage)

    monkeypatch.setattr(OffloadedStorages, "_offload", counted)
    module = SingleDevice(DeviceKind.cpu).build(run)
    module(torch.randint(256, (8, 64))).sum().backward()
    found, rank_memory = sum(gone), build_rank_memory(run.parallelism, run)
    assert found == offloaded_bytes(run, rank_memory) > 0
    assert host_memory.rank_traffic(run, rank_memory).activations == 2 * found


@pytest.mark.parametrize("family", DECODER_MODELS)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        *(
            pytest.param(each, marks=LONG)
            for each in (LORA, (*LORA, "quantization=nf4"), FSDP, (*FSDP, FULL))
        ),
    ],
)
def test_hf_memory_breakdown_equals_trace(
    family: str, overrides: tuple[str, ...], hf_checkpoint: HFCheckpoints
) -> None:
    run = compose(small(hf_checkpoint(family), *overrides, "model.init=random", "model.depth=8"))
    assert rejection_reason(run) is None
    assert peak_memory.worst_rank_breakdown(run).peak == pytest.approx(
        trace_run(run).peak, rel=0.02
    )


@needs_deepspeed
@LONG
@pytest.mark.parametrize("line", FEW)
def test_hf_zero_peak_is_near_prediction(
    line: tuple[str, ...], hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    further = (each for each in line if not each.startswith("model."))
    overrides = small(hf_checkpoint("wide"), "trainer.micro_batch=1", *further)
    predicted = peak_memory.worst_rank_breakdown(compose(overrides)).peak
    found = run_job.without_defaults(*overrides).summary["metrics"]["memory/peak_bytes"]
    print(f"{' '.join(line)}: {predicted / found - 1:+.2%}")
    assert abs(predicted / found - 1) < 0.05
