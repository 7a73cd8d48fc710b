"""Planned memory of transformers models compared with measured memory and traces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.hf_checkpoints import DECODER_MODELS, NO_SEQUENCE_PARALLEL, HFCheckpoints
from fixtures.job_runner import JobRunner
from fixtures.strategies import mesh, needs_deepspeed

from scalewise import compose
from scalewise.bench.deepspeed_accuracy_runs import ZERO
from scalewise.hardware import DeviceKind
from scalewise.models.op_graph import Recompute
from scalewise.planner import host_memory, peak_memory
from scalewise.planner.activation_liveness import offloaded_bytes
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.strategies.activation_offload import SavedStorage, TensorsOnDisk
from scalewise.strategies.single import SingleDevice
from scalewise.tracing.step_trace import rejection_reason, trace_run

EXHAUSTIVE = pytest.mark.exhaustive
FULL_CHECKPOINTING, LORA = "memory=checkpoint_full", ("adapter=lora", "adapter.rank=4")
OFFLOAD = "memory=offload_activations"
OFFLOAD_ALL = (OFFLOAD, "memory.recompute=nothing")
IN_BACKWARD = ("optimizer.in_backward=true", "trainer.clip_norm=null")
FP8 = ("precision=fp8", "precision.compute=fp32", FULL_CHECKPOINTING)
QAT = "quantization=qat_8da4w"
FSDP = ("parallelism=fsdp", "trainer.micro_batch=4")
SINGLE_DEVICE_CASES: tuple[tuple[str, ...], ...] = (
    (),
    (FULL_CHECKPOINTING,),
    LORA,
    ("adapter=ia3", "adapter.trained=[.*norm|.*ln_.]"),
    ("adapter=dora", "adapter.dropout=0.1", FULL_CHECKPOINTING),
    ("objective.loss_chunk=128",),
    ("memory=checkpoint_selective",),
    ("memory=checkpoint_every_n", "memory.every=2"),
    ("precision=bf16_mixed",),
    ("trainer.global_batch=16",),
    ("parallelism=ddp", "trainer.micro_batch=4"),
    FSDP,
    (*FSDP, "precision=bf16_mixed", FULL_CHECKPOINTING),
    (*FSDP, *LORA, FULL_CHECKPOINTING),
    ("parallelism=hsdp", "parallelism.shards=2", "trainer.micro_batch=2"),
    (*LORA, "quantization=nf4"),
    (*LORA, "quantization=fp4", "quantization.double=false", "precision=bf16_mixed"),
    (*LORA, "quantization=int8", FULL_CHECKPOINTING),
    (*FSDP, *LORA, "quantization=nf4"),
    (*FSDP, *LORA, "quantization=nf4", "precision=bf16_true", FULL_CHECKPOINTING),
)
OFFLOAD_CASES: tuple[tuple[str, ...], ...] = (
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
    (*IN_BACKWARD, FULL_CHECKPOINTING),
    (*IN_BACKWARD, OFFLOAD, "optimizer=adamw_8bit"),
    (*IN_BACKWARD, "optimizer=adafactor", "precision=bf16_mixed", "objective.loss_chunk=128"),
    (*IN_BACKWARD, *LORA),
    (*IN_BACKWARD, *FSDP),
    (*IN_BACKWARD, "parallelism=hsdp", "parallelism.shards=2", "trainer.micro_batch=2"),
    FP8,
    ("precision=fp8", FULL_CHECKPOINTING),
    ("precision=fp8", "precision.recipe=rowwise", "memory=checkpoint_selective"),
    ("precision=fp8", *OFFLOAD_ALL),
    ("precision=fp8", *IN_BACKWARD),
    (*FSDP, "precision=fp8", FULL_CHECKPOINTING),
    ("parallelism=ddp", "trainer.micro_batch=4", *FP8),
)
QAT_CASES: tuple[tuple[str, ...], ...] = (
    (QAT,),
    (QAT, FULL_CHECKPOINTING),
    (QAT, "memory=checkpoint_selective", "precision=bf16_mixed"),
    ("quantization=qat_int4", "quantization.group=16", "trainer.micro_batch=1"),
    (QAT, *OFFLOAD_ALL),
    (QAT, FULL_CHECKPOINTING, *IN_BACKWARD),
    (*FSDP, QAT, "precision=bf16_mixed"),
    ("parallelism=ddp", "trainer.micro_batch=4", QAT, FULL_CHECKPOINTING),
)
TENSOR = ("parallelism=tensor", NO_SEQUENCE_PARALLEL)
TENSOR_CASES: tuple[tuple[str, ...], ...] = (
    TENSOR,
    (*TENSOR, FULL_CHECKPOINTING),
    (*TENSOR, "memory=checkpoint_selective"),
    (*TENSOR, "precision=bf16_mixed"),
    (*TENSOR, "parallelism.loss_parallel=false"),
    (*TENSOR, "objective.loss_chunk=128"),
    (*TENSOR, "parallelism.loss_parallel=false", "objective.loss_chunk=128"),
    (*TENSOR, "trainer.global_batch=16"),
    (*mesh(shards=2, tensor=2), NO_SEQUENCE_PARALLEL, "trainer.micro_batch=4"),
    (*mesh(shards=2, tensor=2), NO_SEQUENCE_PARALLEL, "trainer.micro_batch=4", FULL_CHECKPOINTING),
    (*TENSOR, OFFLOAD),
    (*TENSOR, *OFFLOAD_ALL),
    (*TENSOR, *IN_BACKWARD),
    (*mesh(shards=2, tensor=2), NO_SEQUENCE_PARALLEL, "trainer.micro_batch=4", *OFFLOAD_ALL),
    (*mesh(shards=2, tensor=2), NO_SEQUENCE_PARALLEL, "trainer.micro_batch=4", *IN_BACKWARD),
)
PACKING_CASES: tuple[tuple[str, ...], ...] = (
    ("data.packing=true",),
    ("data.packing=true", "precision=bf16_mixed", FULL_CHECKPOINTING),
    (*FSDP, "data.packing=true"),
)
TABLES = (
    (("llama", "gpt2", "wide"), PACKING_CASES),
    (DECODER_MODELS, SINGLE_DEVICE_CASES),
    ((*DECODER_MODELS, "wide"), OFFLOAD_CASES),
    (("llama", "wide"), QAT_CASES),
    (("llama", "wide", "qwen2"), TENSOR_CASES),
)
CI_CASES = (
    ("llama", ("data.packing=true",)),
    ("llama", FSDP),
    ("gpt2", LORA),
    ("llama", OFFLOAD_ALL),
    ("wide", (*IN_BACKWARD, FULL_CHECKPOINTING)),
    ("wide", FP8),
    ("wide", (QAT, FULL_CHECKPOINTING)),
)
BUCKET_CASES = [
    case_overrides
    for case_overrides in ZERO
    if "precision=bf16_mixed" not in case_overrides and any("bucket" in s for s in case_overrides)
]
"""With one bucket for all gradients, the peak depends on when gloo releases its copy."""


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("hf_memory"), shared_cache)


def small_model(folder: Path, *overrides: str) -> tuple[str, ...]:
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
    ("family", "case_overrides"),
    [
        pytest.param(
            family, case_overrides, marks=() if (family, case_overrides) in CI_CASES else EXHAUSTIVE
        )
        for families, override_lists in TABLES
        for family in families
        for case_overrides in override_lists
    ],
    ids=str,
)
def test_hf_peak_memory_equals_prediction(
    family: str, case_overrides: tuple[str, ...], hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    overrides = small_model(hf_checkpoint(family), *case_overrides)
    predicted = peak_memory.worst_rank_breakdown(compose(overrides))
    peak_bytes = run_job.without_defaults(*overrides).summary["metrics"]["memory/peak_bytes"]
    error = predicted.peak / peak_bytes - 1
    print(f"{family} {' '.join(case_overrides)}: {error:+.2%} at {predicted.peak_phase}")
    assert abs(error) < 0.02


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("family", DECODER_MODELS)
def test_hf_offloaded_bytes_equal_prediction(
    family: str, recompute: Recompute, hf_checkpoint: HFCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traffic counts each byte twice: offloaded and loaded."""
    run = compose(small_model(hf_checkpoint(family), OFFLOAD, f"memory.recompute={recompute}"))
    storage_bytes: list[int] = []
    save = TensorsOnDisk._save

    def count_storage(saved: TensorsOnDisk, contents: torch.Tensor) -> SavedStorage:
        storage_bytes.append(len(contents))
        return save(saved, contents)

    monkeypatch.setattr(TensorsOnDisk, "_save", count_storage)
    module = SingleDevice(DeviceKind.cpu).build(run)
    module(torch.randint(256, (8, 64))).sum().backward()
    total_bytes, rank_memory = sum(storage_bytes), build_rank_memory(run.parallelism, run)
    assert total_bytes == offloaded_bytes(run, rank_memory) > 0
    assert host_memory.rank_traffic(run, rank_memory).activations == 2 * total_bytes


@pytest.mark.parametrize("family", DECODER_MODELS)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        *(
            pytest.param(trace_overrides, marks=EXHAUSTIVE)
            for trace_overrides in (
                LORA,
                (*LORA, "quantization=nf4"),
                FSDP,
                (*FSDP, FULL_CHECKPOINTING),
            )
        ),
    ],
)
def test_hf_memory_breakdown_equals_trace(
    family: str, overrides: tuple[str, ...], hf_checkpoint: HFCheckpoints
) -> None:
    run = compose(
        small_model(hf_checkpoint(family), *overrides, "model.init=random", "model.depth=8")
    )
    assert rejection_reason(run) is None
    assert peak_memory.worst_rank_breakdown(run).peak == pytest.approx(
        trace_run(run).peak, rel=0.02
    )


@needs_deepspeed
@EXHAUSTIVE
@pytest.mark.parametrize("case_overrides", BUCKET_CASES)
def test_hf_zero_peak_is_near_prediction(
    case_overrides: tuple[str, ...], hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    extra_overrides = (override for override in case_overrides if not override.startswith("model."))
    overrides = small_model(hf_checkpoint("wide"), "trainer.micro_batch=1", *extra_overrides)
    predicted = peak_memory.worst_rank_breakdown(compose(overrides)).peak
    peak_bytes = run_job.without_defaults(*overrides).summary["metrics"]["memory/peak_bytes"]
    print(f"{' '.join(case_overrides)}: {predicted / peak_bytes - 1:+.2%}")
    assert abs(predicted / peak_bytes - 1) < 0.025
