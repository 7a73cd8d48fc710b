"""What ``train`` prints around its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalewise import console
from scalewise.console import print_lines
from scalewise.failures import report_errors
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import JobSpec, Result
from scalewise.plain_console import styled_text
from scalewise.planner.auto_micro_batch import MicroBatchChoice
from scalewise.planner.config import UnfitPolicy
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.tracking import planned_vs_measured
from scalewise.trainer_config import AUTO, SIZE
from scalewise.units import format_bytes, format_count, format_seconds

_STYLES = {"ok": "green", "pruned": "green", "interrupted": "yellow", "refused": "yellow"}


def print_heading(job_spec: JobSpec) -> None:
    """Prints what is about to run, and what makes it slow."""
    run = job_spec.run
    if run.objective.is_user_defined:
        print_lines(f"{run.name}: a module of yours on {_folder_text(job_spec)}")
        return
    census = run.adapter.weights(run.model)
    trained = sum(weight.numel for weight in census if weight.trainable)
    held = sum(weight.numel for weight in census)
    few = f" ({format_count(trained)} of them trained)" if trained < held else ""
    print_lines(f"{run.name}: {format_count(held)} parameters{few} on {_folder_text(job_spec)}")
    readers, micro_batch = run.parallelism.data_parallel_size, run.micro_batch
    most = "" if readers * micro_batch * run.accumulation == run.global_batch else "at most "
    print_lines(
        f"{run.batch_description} a step ({most}{micro_batch} a pass"
        f" x {readers} of {run.world_size} ranks x {run.accumulation} passes)",
    )
    if run.precision.compute is FloatFormat.bf16 and run.hardware.emulates_bf16:
        print_lines("slow: this processor has no bf16 instructions; precision=fp32 is faster")


def print_auto_choices(
    requested_run: RunConfig, run: RunConfig, micro_batch_choice: MicroBatchChoice | None
) -> None:
    """Prints what was chosen for an ``auto`` of ``plan.fit``, ``memory`` or the micro batch."""
    known = requested_run.overrides
    if micro_batch_choice is not None:
        print_lines(
            f"{SIZE}={AUTO}: {micro_batch_choice.rows} rows a pass "
            f"({micro_batch_choice.description})"
        )
        known += micro_batch_choice.overrides
    if told := [line for line in run.overrides if line not in known]:
        asked_for = "memory=auto" if requested_run.plan.fit is UnfitPolicy.none else "plan.fit=auto"
        print_lines(f"{asked_for}: {' '.join(told)}")


def print_job_start(task: SweepTask, count: int) -> None:
    """Prints which job of a sweep begins."""
    varied = "  ".join(f"{key}={value}" for key, value in task.job_spec.varied.items())
    print_lines("", f"job {task.number} ({count} in all)  {varied}")
    print_heading(task.job_spec)


def print_resume_summary(num_jobs: int, num_finished: int, folder: Path) -> None:
    """Prints what of a sweep is left to do."""
    print_lines(
        f"going on in {_short_text(folder)}: {num_finished} of {num_jobs} jobs have ended, "
        f"{num_jobs - num_finished} to run"
    )


def print_job_outcome(task: SweepTask, result: Result) -> None:
    """Prints how a job of a sweep ended, if not well."""
    if result.status != "ok":
        print_lines(f"job {task.number} {result.status}: {result.reason}")


def finish_job(result: Result) -> None:
    """Writes a job's report, and prints how it ended and where it is."""
    if result.status != "ok":
        print_lines(f"{result.status}: {result.reason}")
    if told := planned_vs_measured.comparison_text(result.summary.get("metrics") or {}):
        print_lines(told)
    _write_reports([result.folder])


def finish_sweep(results: Sequence[Result], folder: Path) -> None:
    """Writes the reports of a sweep and prints where it is."""
    _write_reports([*(result.folder for result in results if result.folder.is_dir()), folder])


def print_job_table(tasks: Sequence[SweepTask], results: Sequence[Result]) -> None:
    """Prints one row a job: how it ended, and what it measured."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("job", justify="right")
    keys = list(dict.fromkeys(key for task in tasks for key in task.job_spec.varied))
    for key in keys:
        shown.add_column(key, overflow="fold")
    shown.add_column("status")
    for name in ("first loss", "loss", "val loss", "tok/s", "step", "peak memory"):
        shown.add_column(name, justify="right")
    for task, result in zip(tasks, results, strict=True):
        metrics = result.summary.get("metrics") or {}
        status = styled_text((result.status, _STYLES.get(result.status, "red")))
        numbers = (
            _format_number(metrics.get("train/loss_first"), "{:.4f}"),
            _format_number(metrics.get("train/loss"), "{:.4f}"),
            _format_number(metrics.get("val/loss"), "{:.4f}"),
            _format_number(metrics.get("throughput/tokens_per_s"), "{:,.0f}"),
            format_seconds(metrics["time/step_s"])
            if metrics.get("time/step_s")
            else console.MISSING,
            format_bytes(metrics["memory/peak_bytes"])
            if metrics.get("memory/peak_bytes")
            else console.MISSING,
        )
        varied = [task.job_spec.varied.get(key, "") for key in keys]
        shown.add_row(str(task.number), *varied, status, *numbers)
    print_lines()
    console.get_console().print(shown)


def _format_number(value: float | None, template: str) -> str:
    return console.MISSING if value is None else template.format(value)


def _folder_text(job_spec: JobSpec) -> str:
    run = job_spec.run
    device = run.hardware.match or run.hardware.device.value.upper()
    return f"{run.world_size} {device} rank{'s' if run.world_size > 1 else ''}"


def _write_reports(folders: Sequence[Path]) -> None:
    """Writes the reports of these folders and prints where the last one's is."""
    with report_errors("no report"):
        from scalewise.reports import files

        for page in files.write_reports(folders)[-1:]:
            print_lines(f"report {_short_text(page)}")


def _short_text(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
