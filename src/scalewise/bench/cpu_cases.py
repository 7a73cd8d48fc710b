"""Cases of ``scalewise bench all``: scalewise next to baselines, on any machine."""

from __future__ import annotations

from collections.abc import Mapping

from scalewise.bench import parallel, sweep
from scalewise.bench.component_cases import CheckpointCase, LoaderCase, PlannerCase
from scalewise.bench.process_cases import CommandCase, ResumeCase, WarmJobCase
from scalewise.bench.scaling_cases import ScalingCase
from scalewise.bench.step_cases import ParallelCase, StepCase
from scalewise.bench.suite import Case, Suite, SuiteOptions
from scalewise.bench.suite_table import Aim, Entries, figure_table

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
)
_TINY = (
    *_BASE,
    *("model.layers=2", "model.width=64", "model.heads=2", "model.feedforward=192"),
    *("model.vocabulary=256", "data.sequence=64", "trainer.micro_batch=2"),
)
_SMALL = (
    *_BASE,
    *("model.layers=6", "model.width=384", "model.heads=6", "model.feedforward=1024"),
    *("model.vocabulary=4096", "data.sequence=256", "trainer.micro_batch=2"),
)
_SCALED = (
    *_BASE,
    *("model.layers=4", "model.width=256", "model.heads=4", "model.feedforward=768"),
    *("model.vocabulary=1024", "data.sequence=256", "trainer.micro_batch=2"),
)
_BF16, _BLOCK = "precision=bf16_mixed", "compile=block"
_LARGE = (
    *_BASE,
    *("model=llama3_8b", "parallelism=fsdp", "parallelism.shards=4", "data.sequence=4096"),
    *("hardware.memory_gb_per_s=100", "hardware.link_gb_per_s=10", "hardware.link_latency_us=10"),
)

CASES: tuple[Case, ...] = (
    StepCase("overhead/scalewise", 20, _TINY, 300),
    StepCase("overhead/lightning", 20, _TINY, 300, "lightning"),
    StepCase("overhead/hugging_face", 30, _TINY, 300, "hugging_face"),
    StepCase("overhead/litgpt", 30, _TINY, 300, "litgpt"),
    StepCase("step/fp32", 60, _SMALL, 40),
    StepCase("step/bf16", 40, (*_SMALL, _BF16), 40),
    StepCase("step/bf16_lightning", 40, (*_SMALL, _BF16), 40, "lightning"),
    StepCase("step/bf16_hugging_face", 40, (*_SMALL, _BF16), 40, "hugging_face"),
    StepCase("step/bf16_litgpt", 40, (*_SMALL, _BF16), 40, "litgpt"),
    StepCase("step/fp32_compiled", 150, (*_SMALL, _BLOCK), 40),
    StepCase("step/bf16_compiled", 130, (*_SMALL, _BF16, _BLOCK), 40),
    CommandCase("startup/help", 40, (), ("--help",), 7),
    CommandCase("startup/config", 50, _TINY, ("train", "--cfg", "job"), 7),
    CommandCase(
        "startup/first_step",
        60,
        (*_TINY, "schedule.warmup_steps=0", "trainer.max_steps=1"),
        ("train",),
        4,
    ),
    WarmJobCase("launch/warm_job", 90, sweep.RUNS["job"], 6),
    LoaderCase(
        "loader/corpus",
        40,
        (*_BASE, "data=corpus", "data.sequence=1024", "model.context=1024"),
        15,
    ),
    CheckpointCase("checkpoint/sync", 30, _SMALL, 8),
    CheckpointCase("checkpoint/background", 30, (*_SMALL, "checkpoint.background=true"), 8),
    ParallelCase("parallel/ddp", 70, parallel.RUNS["ddp"], 40),
    ParallelCase("parallel/fsdp", 70, parallel.RUNS["fsdp"], 40),
    PlannerCase("planner/plans", 20, _LARGE, 12, 20),
    ResumeCase("resume/job", 30, _SMALL, 6),
    ScalingCase("scaling/depth", 50, _SCALED, "depth", (2, 4, 8, 16), 8),
    ScalingCase("scaling/width", 60, _SCALED, "width", (128, 256, 512), 8),
    ScalingCase("scaling/sequence", 60, _SCALED, "sequence", (128, 256, 512, 1024), 8),
    ScalingCase("scaling/ranks", 90, (*_SCALED, "parallelism=ddp"), "ranks", (1, 2, 4), 12),
)
"""Cases in the order in which they are measured."""


def _at_most(text: str, bound: float, case: str) -> Aim:
    """Aim of the figure of one case."""

    def read_figure(entries: Entries) -> float | None:
        entry = entries.get(case, {})
        return float(entry["figure"]) if entry.get("status") == "ok" else None

    return Aim(f"{text}, at most", bound, read_figure, is_minimum=False)


AIMS = (
    _at_most("step of a tiny model relative to a hand-written loop", 1.10, "overhead/scalewise"),
    _at_most("step in bf16 relative to a hand-written loop", 1.00, "step/bf16"),
    _at_most("compiled step relative to a compiled loop", 1.03, "step/bf16_compiled"),
    _at_most("`scalewise --help` relative to `import torch`", 0.40, "startup/help"),
    _at_most("`scalewise train --cfg job` relative to `import torch`", 0.50, "startup/config"),
    _at_most("job of a sweep relative to a fresh process", sweep.BOUND, "launch/warm_job"),
    _at_most("loading relative to a map-style DataLoader", 0.33, "loader/corpus"),
    _at_most("background checkpoint relative to `torch.save`", 0.15, "checkpoint/background"),
    _at_most("step of ddp relative to a hand-written loop", parallel.BOUND, "parallel/ddp"),
    _at_most("step of fsdp relative to a hand-written loop", parallel.BOUND, "parallel/fsdp"),
)

SUITE = Suite(CASES, AIMS, figure_table)
