"""Cases of ``scalewise bench gpu``: MFU, memory and time against the plan, QLoRA and offload."""

from __future__ import annotations

from collections.abc import Mapping

from scalewise.bench.component_cases import CheckpointCase
from scalewise.bench.suite import Case, Suite, SuiteOptions
from scalewise.bench.suite_table import Aim, Entries, gpu_table
from scalewise.bench.training_case import TrainingCase
from scalewise.hardware import DeviceKind

OPTIONS = SuiteOptions
RUNS: Mapping[str, tuple[str, ...]] = {"machine": ("tracking=none",)}
"""Run whose hardware the record is named after."""

_BASE = (
    "data=synthetic",
    "tracking=none",
    "checkpoint=none",
    "compile=none",
    "memory=none",
    "schedule.warmup_steps=1",
    "trainer.validate_every=null",
    "trainer.log_every=100",
)
_MIXED, _BF16 = "precision=bf16_mixed", "precision=bf16_true"
_BLOCK, _WHOLE = "compile=block", "compile=whole"
_FULL, _LORA, _NF4 = "memory=checkpoint_full", "adapter=lora", "quantization=nf4"

_MFU_1B = ("model=tinyllama_1b", "data.sequence=2048", "trainer.max_steps=12")
_MFU_8B = ("model=llama3_8b", "model.layers=4", "data.sequence=4096", "trainer.max_steps=12")
_MFU_8B_DEEP = (*_MFU_8B, _BLOCK, "trainer.micro_batch=4", "model.layers=12")
"""Twelve of the 32 blocks, with 80 GiB: at four, 38 % of the matmuls are those of the bf16 head."""
_MEMORY = (
    *("model=llama3_8b", "model.layers=4", "data.sequence=2048"),
    *("trainer.micro_batch=4", "trainer.max_steps=7"),
)
_MEMORY_160M = (
    *("model=llama_160m", "data.sequence=2048", "trainer.micro_batch=8", "trainer.max_steps=7"),
)
_QLORA_7B = (
    *("model=openllama_7b", "data.sequence=1024", "trainer.micro_batch=2", "trainer.max_steps=7"),
    *(_LORA, _NF4, _FULL),
)
_SAVED = (*_BASE, "model=llama_160m", "data.sequence=2048", _MIXED)
"""Run whose weights and optimizer state are saved, of 1.9 GB."""


def _case(name: str, seconds: float, *overrides: str) -> TrainingCase:
    return TrainingCase(name, seconds, (*_BASE, *overrides))


CASES: tuple[Case, ...] = (
    _case("mfu_1b/eager", 20, *_MFU_1B, _MIXED),
    _case("mfu_1b/eager_bf16_true", 6, *_MFU_1B, _BF16),
    _case("mfu_1b/block", 20, *_MFU_1B, _MIXED, _BLOCK),
    _case("mfu_1b/block_chunk", 10, *_MFU_1B, _MIXED, _BLOCK, "objective.loss_chunk=4096"),
    _case("mfu_1b/block_16", 17, *_MFU_1B, _MIXED, _BLOCK, "trainer.micro_batch=16"),
    _case(
        "mfu_1b/block_16_x4",  # 131k tokens a step: few optimizer steps, as in pre-training
        30,
        *(*_MFU_1B, _MIXED, _BLOCK, "trainer.micro_batch=16", "trainer.global_batch=64"),
    ),
    _case("mfu_1b/block_16_bf16_true", 17, *_MFU_1B, _BF16, _BLOCK, "trainer.micro_batch=16"),
    _case("mfu_1b/fp8", 27, *_MFU_1B, "precision=fp8", _BLOCK),
    _case("mfu_1b/whole", 20, *_MFU_1B, _MIXED, _WHOLE),
    _case("mfu_8b/block_1", 25, *_MFU_8B, _MIXED, _BLOCK, "trainer.micro_batch=1"),
    _case("mfu_8b/block_2", 20, *_MFU_8B, _MIXED, _BLOCK, "trainer.micro_batch=2"),
    _case("mfu_8b/block_4", 20, *_MFU_8B, _MIXED, _BLOCK, "trainer.micro_batch=4"),
    _case("mfu_8b/block_8", 20, *_MFU_8B, _MIXED, _BLOCK, "trainer.micro_batch=8"),
    _case("mfu_8b/fp8_4", 30, *_MFU_8B, "precision=fp8", _BLOCK, "trainer.micro_batch=4"),
    _case(
        "mfu_8b/fp8_rowwise_4",
        30,
        *(*_MFU_8B, "precision=fp8", "precision.recipe=rowwise", _BLOCK, "trainer.micro_batch=4"),
    ),
    _case("mfu_8b/block_4_deep", 30, *_MFU_8B_DEEP, _MIXED),
    _case("mfu_8b/fp8_4_deep", 40, *_MFU_8B_DEEP, "precision=fp8"),
    _case("memory/none", 8, *_MEMORY, _MIXED),
    _case("memory/selective", 8, *_MEMORY, _MIXED, "memory=checkpoint_selective"),
    _case("memory/full", 8, *_MEMORY, _MIXED, _FULL),
    _case("memory/loss_chunk", 8, *_MEMORY, _MIXED, "objective.loss_chunk=1024"),
    _case(
        "memory/in_backward",
        8,
        *(*_MEMORY, _MIXED, "optimizer.in_backward=true", "trainer.clip_norm=null"),
    ),
    _case("memory/adamw_8bit", 15, *_MEMORY, _MIXED, "optimizer=adamw_8bit"),
    _case("memory/lora", 8, *_MEMORY, _MIXED, _LORA),
    _case("memory/dora", 8, *_MEMORY, _MIXED, "adapter=dora"),
    _case("memory/packing", 10, *_MEMORY, _MIXED, "data.packing=true"),
    _case("memory/prefix", 8, *_MEMORY, _MIXED, "adapter=prefix"),
    _case("memory/offload_activations", 10, *_MEMORY, _MIXED, "memory=offload_activations"),
    _case("memory/fp8", 30, *_MEMORY, "precision=fp8", _BLOCK),
    _case("memory/fp8_selective", 15, *_MEMORY, "precision=fp8", "memory=checkpoint_selective"),
    _case("memory/block", 20, *_MEMORY, _MIXED, _BLOCK),
    _case("memory/bf16_true", 8, *_MEMORY, _BF16),
    _case("memory/fp32", 20, *_MEMORY, "precision=fp32"),
    _case("memory/qlora", 12, *_MEMORY, _MIXED, _LORA, _NF4),
    _case("memory_160m/none", 6, *_MEMORY_160M, _MIXED),
    _case("memory_160m/full", 6, *_MEMORY_160M, _MIXED, _FULL),
    _case("memory_160m/fp32", 8, *_MEMORY_160M, "precision=fp32"),
    _case("memory_160m/block", 18, *_MEMORY_160M, _MIXED, _BLOCK),
    _case("qlora_7b/bf16_mixed", 25, *_QLORA_7B, _MIXED),
    _case("qlora_7b/bf16_true", 20, *_QLORA_7B, _BF16),
    _case("offload/optimizer", 30, *_MEMORY, _MIXED, "optimizer.offload=true"),
    CheckpointCase("checkpoint/sync", 40, _SAVED, 3),
    CheckpointCase("checkpoint/background", 40, (*_SAVED, "checkpoint.background=true"), 3),
)
"""Cases in the order in which they are measured: those that matter most come first."""


def _figures(entries: Entries, group: str, key: str) -> list[float]:
    """Figures of the successful cases of the groups whose names start with ``group``."""
    return [
        float(entry[key])
        for name, entry in entries.items()
        if name.startswith(group) and entry["status"] == "ok" and entry[key] is not None
    ]


def _best_mfu(entries: Entries, group: str) -> float | None:
    bf16 = {name: entry for name, entry in entries.items() if "/fp8" not in name}
    return max(_figures(bf16, group, "mfu"), default=None)


def _worst_error(entries: Entries, key: str) -> float | None:
    errors = [abs(error) for error in _figures(entries, "memory", key)]
    return max(errors, default=None)


def _fp8_speedup(entries: Entries) -> float | None:
    """Speed of fp8, with the most blocks that were measured: the head is not in fp8."""
    for suffix in ("_deep", ""):
        fp8, bf16 = (
            entries.get(f"mfu_8b/{name}{suffix}", {}).get("tokens_per_s")
            for name in ("fp8_4", "block_4")
        )
        if fp8 and bf16:
            return float(fp8 / bf16)
    return None


AIMS = (
    Aim("MFU at 1.1B parameters, bf16, at least", 0.52, lambda it: _best_mfu(it, "mfu_1b/")),
    Aim("MFU at the width of 8B, bf16, at least", 0.55, lambda it: _best_mfu(it, "mfu_8b/")),
    Aim("tokens/s of fp8 relative to bf16, at least", 1.25, _fp8_speedup),
    Aim(
        "largest error of planned memory, at most",
        0.05,
        lambda it: _worst_error(it, "peak_error"),
        is_minimum=False,
    ),
    Aim(
        "largest error of planned step time, at most",
        0.10,
        lambda it: _worst_error(it, "step_error"),
        is_minimum=False,
    ),
    Aim(
        "background checkpoint relative to `torch.save`, at most",
        0.05,
        lambda it: max(_figures(it, "checkpoint/background", "figure"), default=None),
        is_minimum=False,
    ),
    Aim(
        "largest share of the step that waits for data, at most",
        0.01,
        lambda it: max(_figures(it, "mfu", "data_share"), default=None),
        is_minimum=False,
    ),
)

SUITE = Suite(CASES, AIMS, gpu_table, DeviceKind.cuda)
