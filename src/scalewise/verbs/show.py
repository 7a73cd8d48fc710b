"""What ``train`` prints around its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalewise import output
from scalewise.failures import survived
from scalewise.launch.engine import Task
from scalewise.launch.job import Order, Result
from scalewise.output import print_lines
from scalewise.plain_console import styled
from scalewise.plan.sizing import Sizing
from scalewise.plan.spec import Fitting
from scalewise.precision import Number
from scalewise.run import Run
from scalewise.tracking import beside
from scalewise.trainer import AUTO, SIZE
from scalewise.units import bytes_text, count_text, seconds_text

_STYLES = {"ok": "green", "pruned": "green", "interrupted": "yellow", "refused": "yellow"}


def heading(order: Order) -> None:
    """Prints what is about to run, and what makes it slow."""
    run = order.run
    if run.objective.of_user:
        print_lines(f"{run.name}: a module of yours on {_place(order)}")
        return
    census = run.adapter.weights(run.model)
    trained = sum(weight.count for weight in census if weight.trainable)
    held = sum(weight.count for weight in census)
    few = f" ({count_text(trained)} of them trained)" if trained < held else ""
    print_lines(f"{run.name}: {count_text(held)} parameters{few} on {_place(order)}")
    readers, micro_batch = run.parallelism.data_parallel_size, run.micro_batch
    most = "" if readers * micro_batch * run.accumulation == run.global_batch else "at most "
    print_lines(
        f"{run.rows_text} a step ({most}{micro_batch} a pass"
        f" x {readers} of {run.world_size} ranks x {run.accumulation} passes)",
    )
    if run.precision.compute is Number.bf16 and run.hardware.emulates_bf16:
        print_lines("slow: this processor has no bf16 instructions; precision=fp32 is faster")


def refitted(asked: Run, run: Run, sizing: Sizing | None) -> None:
    """Prints what was chosen for an ``auto`` of ``plan.fit``, ``memory`` or the micro batch."""
    known = asked.overrides
    if sizing is not None:
        print_lines(f"{SIZE}={AUTO}: {sizing.rows} rows a pass ({sizing.how})")
        known += sizing.told
    if told := [line for line in run.overrides if line not in known]:
        asked_for = "memory=auto" if asked.plan.fit is Fitting.none else "plan.fit=auto"
        print_lines(f"{asked_for}: {' '.join(told)}")


def announce(task: Task, count: int) -> None:
    """Prints which job of a sweep begins."""
    varied = "  ".join(f"{key}={value}" for key, value in task.order.varied.items())
    print_lines("", f"job {task.number} ({count} in all)  {varied}")
    heading(task.order)


def resumed(jobs: int, kept: int, folder: Path) -> None:
    """Prints what of a sweep is left to do."""
    print_lines(
        f"going on in {_short(folder)}: {kept} of {jobs} jobs have ended, {jobs - kept} to run"
    )


def outcome(task: Task, result: Result) -> None:
    """Prints how a job of a sweep ended, if not well."""
    if result.status != "ok":
        print_lines(f"job {task.number} {result.status}: {result.reason}")


def ended(result: Result) -> None:
    """Writes a job's report, and prints how it ended and where it is."""
    if result.status != "ok":
        print_lines(f"{result.status}: {result.reason}")
    if told := beside.told(result.summary.get("metrics") or {}):
        print_lines(told)
    _report([result.folder])


def sweep_ended(results: Sequence[Result], folder: Path) -> None:
    """Writes the reports of a sweep and prints where it is."""
    _report([*(result.folder for result in results if result.folder.is_dir()), folder])


def table(tasks: Sequence[Task], results: Sequence[Result]) -> None:
    """Prints one row a job: how it ended, and what it measured."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("job", justify="right")
    keys = list(dict.fromkeys(key for task in tasks for key in task.order.varied))
    for key in keys:
        shown.add_column(key, overflow="fold")
    shown.add_column("status")
    for name in ("first loss", "loss", "val loss", "tok/s", "step", "peak memory"):
        shown.add_column(name, justify="right")
    for task, result in zip(tasks, results, strict=True):
        metrics = result.summary.get("metrics") or {}
        status = styled((result.status, _STYLES.get(result.status, "red")))
        numbers = (
            _number(metrics.get("train/loss_first"), "{:.4f}"),
            _number(metrics.get("train/loss"), "{:.4f}"),
            _number(metrics.get("val/loss"), "{:.4f}"),
            _number(metrics.get("throughput/tokens_per_s"), "{:,.0f}"),
            seconds_text(metrics["time/step_s"]) if metrics.get("time/step_s") else output.ABSENT,
            bytes_text(metrics["memory/peak_bytes"])
            if metrics.get("memory/peak_bytes")
            else output.ABSENT,
        )
        varied = [task.order.varied.get(key, "") for key in keys]
        shown.add_row(str(task.number), *varied, status, *numbers)
    print_lines()
    output.console().print(shown)


def _number(value: float | None, form: str) -> str:
    return output.ABSENT if value is None else form.format(value)


def _place(order: Order) -> str:
    run = order.run
    device = run.hardware.match or run.hardware.device.value.upper()
    return f"{run.world_size} {device} rank{'s' if run.world_size > 1 else ''}"


def _report(folders: Sequence[Path]) -> None:
    """Writes the reports of these folders and prints where the last one's is."""
    with survived("no report"):
        from scalewise.reports import files

        for page in files.write(folders)[-1:]:
            print_lines(f"report {_short(page)}")


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
