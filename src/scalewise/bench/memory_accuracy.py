"""Accuracy of the predicted peak memory, compared with small runs and with traces of large runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scalewise.bench import memory_accuracy_runs as small_runs
from scalewise.bench import options
from scalewise.bench.compare_published import error_summary
from scalewise.bench.deepspeed_accuracy_runs import ZERO
from scalewise.bench.memory_accuracy_runs import (
    BF16,
    DORA,
    DROPOUT,
    EVERYWHERE,
    FP8_MIXED,
    FULL,
    IA3,
    LORA,
    MIXED,
    MIXTURE,
    PACKING,
    PAIRS,
    QAT,
    QAT_INT4,
    SELECTIVE,
    Overrides,
    fsdp_overrides,
    mesh_overrides,
)
from scalewise.console import print_lines
from scalewise.errors import Interrupted, ScalewiseError
from scalewise.launch.job import JobSpec, execute
from scalewise.planner import peak_memory
from scalewise.run_config import RunConfig
from scalewise.tracing.step_trace import trace_run, with_cpu_operators
from scalewise.units import format_bytes

LARGE = (
    "model=llama3_8b",
    "hardware=h100_8x4",
    "data=synthetic",
    "data.sequence=4096",
    "trainer.micro_batch=1",
)
"""Overrides of all runs that are traced."""
ACCUMULATION = "trainer.global_batch=32"


def pipeline_overrides(schedule: str = "one_f_one_b", **sizes: int) -> Overrides:
    """Overrides of a pipeline of two stages, or of ``sizes`` of a mesh."""
    return (
        *mesh_overrides(**({"pipeline": 2} | sizes)),
        f"parallelism.pipeline_schedule={schedule}",
        "trainer.micro_batch=4",
    )


TRACED: tuple[Overrides, ...] = (
    (MIXED,),
    (MIXED, *fsdp_overrides(128), FULL),
    (MIXED, *mesh_overrides(shards=16, tensor=8), FULL),
    (MIXED, *fsdp_overrides(8), LORA),
    (BF16, *mesh_overrides(tensor=8)),
    (MIXED, *fsdp_overrides(8), "objective.loss_chunk=1024"),
    (LORA, "objective.loss_chunk=1024"),
)
TRACED_SELDOM: tuple[Overrides, ...] = (
    (DROPOUT, *PACKING),
    (*QAT, MIXED, *fsdp_overrides(8), FULL),
    (*QAT_INT4, MIXED, *fsdp_overrides(8)),
    (FP8_MIXED, *fsdp_overrides(8), FULL),
    (FP8_MIXED, *mesh_overrides(replicate=2, shards=8), ACCUMULATION),
    (MIXED, *pipeline_overrides(shards=4), FULL),
    (),
    (BF16,),
    (MIXED, FULL),
    (MIXED, LORA),
    (BF16, LORA, FULL),
    (MIXED, *fsdp_overrides(8), DORA, *EVERYWHERE),
    (BF16, *mesh_overrides(tensor=8), DORA, *EVERYWHERE),
    (MIXED, *fsdp_overrides(8), IA3),
    (MIXED, *fsdp_overrides(8), LORA, "quantization=nf4"),
    (BF16, LORA, "quantization=fp4", "quantization.double=false", FULL),
    (MIXED, *mesh_overrides(shards=4, context=2), LORA, "quantization=int8"),
    (MIXED, *fsdp_overrides(8)),
    (MIXED, *fsdp_overrides(8), LORA, *PAIRS),
    (MIXED, *fsdp_overrides(8), ACCUMULATION),
    (MIXED, *fsdp_overrides(8), ACCUMULATION, "parallelism.reduce_each_micro_batch=false"),
    (MIXED, *fsdp_overrides(32), "parallelism.reshard_after_forward=false"),
    (MIXED, *fsdp_overrides(8), ACCUMULATION, "parallelism.shard=gradients"),
    (MIXED, *mesh_overrides(shards=4, tensor=2), ACCUMULATION, "parallelism.shard=optimizer"),
    (MIXED, *fsdp_overrides(128), SELECTIVE),
    (MIXED, *fsdp_overrides(128), *MIXTURE),
    (MIXED, *mesh_overrides(replicate=2, shards=8), ACCUMULATION),
    (MIXED, *mesh_overrides(tensor=8)),
    (MIXED, *mesh_overrides(context=8)),
    (MIXED, FULL, *fsdp_overrides(32), "model=llama3_70b"),
    (MIXED, FULL, *mesh_overrides(shards=4, tensor=8), "model=llama3_70b"),
    ("model=gpt2_124m", "data.sequence=1024", "trainer.micro_batch=8"),
    (MIXED, *fsdp_overrides(4), "model=openllama_7b", "data.sequence=2048"),
    (MIXED, *pipeline_overrides(), LORA),
    (MIXED, *pipeline_overrides("gpipe"), ACCUMULATION),
    (MIXED, *pipeline_overrides(tensor=4)),
    (MIXED, *pipeline_overrides(pipeline=4, replicate=2)),
    (MIXED, *pipeline_overrides("interleaved_1f1b"), "parallelism.stages_per_rank=2"),
    (MIXED, *pipeline_overrides("interleaved_1f1b", shards=2), "parallelism.stages_per_rank=2"),
    (*pipeline_overrides(), "model=gpt2_124m", "data.sequence=1024"),
    (MIXED, SELECTIVE, *pipeline_overrides(context=2, tensor=4)),
)
"""Run of the exhaustive tests only."""


def _named_runs(
    name: str, base_overrides: small_runs.Overrides, variants: Iterable[small_runs.Overrides]
) -> dict[str, small_runs.Overrides]:
    return {" ".join((name, *overrides)): (*base_overrides, *overrides) for overrides in variants}


_TRAINED = _named_runs("small", small_runs.SMALL, (*small_runs.TRAINED, *small_runs.TRAINED_SELDOM))
_ZERO = _named_runs("small", small_runs.SMALL, ZERO if find_spec("deepspeed") else ())
RUNS: Mapping[str, tuple[str, ...]] = _TRAINED | _ZERO
WORLDS: Mapping[str, tuple[str, ...]] = _named_runs("large", LARGE, (*TRACED, *TRACED_SELDOM))


@dataclass(frozen=True)
class MemoryAccuracyOptions(options.BenchOptions):
    """Options of the memory accuracy benchmark."""

    traced: bool = True
    """Whether large runs are also traced, which takes some minutes."""


OPTIONS = MemoryAccuracyOptions


@dataclass(frozen=True)
class MemoryAccuracyRow:
    """Predicted and measured peak memory of one run. Field names are those of the record."""

    line: str
    """Overrides of the run."""
    foreseen: int
    """Predicted peak memory, in bytes."""
    found: int
    """Measured peak memory, in bytes."""
    fullest: str
    """Phase of the step with the predicted peak."""

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive: too high."""
        return self.foreseen / self.found - 1


def measure(
    runs: Mapping[str, RunConfig], options: MemoryAccuracyOptions, folder: Path
) -> dict[str, object]:
    """Train the small runs and trace the large ones; print and return predictions and errors."""
    result: dict[str, object] = {}
    for title, names in (("trained", _TRAINED), ("deepspeed", _ZERO)):
        if names:
            named_runs = {name: runs[name] for name in names}
            result[title] = _print_rows(title, _train_and_measure(named_runs, folder))
    if options.traced:
        result["traced"] = _print_rows("traced", _trace({name: runs[name] for name in WORLDS}))
    return result


def _train_and_measure(runs: Mapping[str, RunConfig], folder: Path) -> Iterator[MemoryAccuracyRow]:
    for name, run in runs.items():
        predicted = peak_memory.worst_rank_breakdown(run)
        yield MemoryAccuracyRow(
            name, predicted.peak, _measured_peak(name, run, folder), predicted.peak_phase
        )


def _measured_peak(name: str, run: RunConfig, folder: Path) -> int:
    """Measured peak memory of the rank with the largest peak, in bytes."""
    result = execute(JobSpec(run), folder / "run")
    if result.status == "interrupted":
        raise Interrupted(result.exit_code - 128, f"{result.reason}; nothing was written")
    if result.status != "ok":
        raise ScalewiseError(f"{name}: {result.status}: {result.reason}")
    shutil.rmtree(result.folder)
    return int(result.summary["metrics"]["memory/peak_bytes"])


def _trace(runs: Mapping[str, RunConfig]) -> Iterator[MemoryAccuracyRow]:
    for name, run in runs.items():
        predicted = peak_memory.worst_rank_breakdown(with_cpu_operators(run))
        yield MemoryAccuracyRow(name, predicted.peak, trace_run(run).peak, predicted.peak_phase)


def _print_rows(title: str, rows: Iterator[MemoryAccuracyRow]) -> dict[str, object]:
    """Print each row when it is measured; return all rows and a summary of their errors."""
    print_lines(f"{title}:", f"{'predicted':>11}{'measured':>11}{'error':>9}  overrides")
    finished = []
    for row in rows:
        finished.append(row)
        predicted, measured = format_bytes(row.foreseen), format_bytes(row.found)
        print_lines(f"{predicted:>11}{measured:>11}{row.error:>+9.2%}  {row.line}")
    errors = error_summary([abs(row.error) for row in finished])
    print_lines("{rows} runs: median {median:.2%}, worst {worst:.2%}".format(**errors), "")
    return {"errors": errors, "rows": [vars(row) | {"error": row.error} for row in finished]}
