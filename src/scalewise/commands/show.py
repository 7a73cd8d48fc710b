"""Terminal output of training jobs, sweeps and hyperparameter searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scalewise.console import MISSING, print_lines
from scalewise.failures import report_errors
from scalewise.launch import signals
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import JobSpec, Result
from scalewise.metric_names import METRICS
from scalewise.plain_console import get_console, styled_text
from scalewise.plan_config import UnfitPolicy
from scalewise.planner.auto_settings import MicroBatchChoice
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json
from scalewise.torch_compile import CompileScope
from scalewise.tracking import tables
from scalewise.trainer_config import AUTO, MICRO_BATCH_KEY
from scalewise.typed_override import command_line
from scalewise.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from scalewise.hpo.optuna_study import OptunaSearch

_STYLES = {"ok": "green", "pruned": "green", "interrupted": "yellow", "refused": "yellow"}
MAX_TRIALS = 12
"""Maximum number of trials in the output."""


def print_heading(job_spec: JobSpec) -> None:
    """Print the run that starts, and a warning if its precision is slow."""
    run = job_spec.run
    if run.objective.is_user_defined:
        print_lines(f"{run.name}: user-defined module on {_ranks_text(job_spec)}")
        return
    census = run.adapter.weights(run.model)
    trained = sum(weight.numel for weight in census if weight.trainable)
    total = sum(weight.numel for weight in census)
    trained_text = f" ({format_count(trained)} trained)" if trained < total else ""
    print_lines(
        f"{run.name}: {format_count(total)} parameters{trained_text} on {_ranks_text(job_spec)}"
    )
    data_ranks, micro_batch = run.parallelism.data_parallel_size, run.micro_batch
    bound = "" if data_ranks * micro_batch * run.accumulation == run.global_batch else "at most "
    print_lines(
        f"{run.batch_description} per step ({bound}micro-batch {micro_batch}"
        f" x {data_ranks} data-parallel ranks of {run.world_size}"
        f" x {run.accumulation} accumulation steps)",
    )
    if stages := run.samples_per_step.stages:
        texts = [f"{samples} samples until step {until_step:,}" for until_step, samples in stages]
        print_lines(f"Batch warm-up: {', '.join(texts)}")
    if stages := run.sequence_per_step.stages:
        texts = [f"{tokens} tokens until step {until_step:,}" for until_step, tokens in stages]
        print_lines(f"Sequence warm-up: {', '.join(texts)}")
    if run.precision.compute is FloatFormat.bf16 and run.hardware.emulates_bf16:
        print_lines("Slow: this CPU has no bf16 instructions; set precision=fp32")
    if run.compile.scope is CompileScope.auto and run.is_compiled:
        print_lines("compile=auto: block; the first steps compile the blocks")


def print_auto_choices(
    requested_run: RunConfig, run: RunConfig, micro_batch_choice: MicroBatchChoice | None
) -> None:
    """Print the values chosen for ``auto`` in ``plan.fit``, ``memory`` or the micro-batch size."""
    known_overrides = requested_run.overrides
    if micro_batch_choice is not None:
        print_lines(
            f"{MICRO_BATCH_KEY}={AUTO}: "
            f"{micro_batch_choice.micro_batch} ({micro_batch_choice.description})"
        )
        known_overrides += micro_batch_choice.overrides
    if overrides := [it for it in run.overrides if it not in known_overrides]:
        key = "memory=auto" if requested_run.plan.fit is UnfitPolicy.none else "plan.fit=auto"
        print_lines(f"{key}: {' '.join(overrides)}")


def print_job_start(task: SweepTask, count: int) -> None:
    """Print the job of a sweep that starts."""
    varied = "  ".join(f"{key}={value}" for key, value in task.job_spec.varied.items())
    print_lines("", f"job {task.number} ({count} jobs)  {varied}")
    print_heading(task.job_spec)


def print_resume_summary(num_jobs: int, num_finished: int, folder: Path) -> None:
    """Print the number of finished and remaining jobs of a resumed sweep."""
    print_lines(
        f"Resuming {_short_text(folder)}: {num_finished} of {num_jobs} jobs have ended, "
        f"{num_jobs - num_finished} to run"
    )


def print_job_outcome(task: SweepTask, result: Result) -> None:
    """Print the status of a sweep job that did not succeed."""
    if result.status != "ok":
        print_lines(f"job {task.number} {result.status}: {result.reason}")


def finish_job(result: Result) -> None:
    """Write the report of a job and print its status and path."""
    if result.status != "ok":
        print_lines(f"{result.status}: {result.reason}")
    if text := tables.comparison_text(result.summary.get("metrics") or {}):
        print_lines(text)
    _write_reports([result.folder])


def finish_sweep(results: Sequence[Result], folder: Path) -> None:
    """Write the reports of a sweep and print the path of its report."""
    _write_reports([*(result.folder for result in results if result.folder.is_dir()), folder])


def print_job_table(tasks: Sequence[SweepTask], results: Sequence[Result]) -> None:
    """Print a table with status and metrics, one row per job."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("job", justify="right")
    keys = list(dict.fromkeys(key for task in tasks for key in task.job_spec.varied))
    for key in keys:
        table.add_column(key, overflow="fold")
    table.add_column("status")
    for name in ("first loss", "loss", "val loss", "tok/s", "step time", "peak memory"):
        table.add_column(name, justify="right")
    for task, result in zip(tasks, results, strict=True):
        metrics = result.summary.get("metrics") or {}
        status = styled_text((result.status, _STYLES.get(result.status, "red")))
        cells = (
            _format_number(metrics.get("train/loss_first"), "{:.4f}"),
            _format_number(metrics.get("train/loss"), "{:.4f}"),
            _format_number(metrics.get("val/loss"), "{:.4f}"),
            _format_number(metrics.get("throughput/tokens_per_s"), "{:,.0f}"),
            format_seconds(metrics["time/step_s"]) if metrics.get("time/step_s") else MISSING,
            format_bytes(metrics["memory/peak_bytes"])
            if metrics.get("memory/peak_bytes")
            else MISSING,
        )
        varied = [task.job_spec.varied.get(key, "") for key in keys]
        table.add_row(str(task.number), *varied, status, *cells)
    print_lines()
    get_console().print(table)


def _format_number(value: float | None, template: str) -> str:
    return MISSING if value is None else template.format(value)


def _ranks_text(job_spec: JobSpec) -> str:
    run = job_spec.run
    device = run.hardware.match or run.hardware.device.value.upper()
    return f"{run.world_size} {device} rank{'s' if run.world_size > 1 else ''}"


def _write_reports(folders: Sequence[Path]) -> None:
    """Write the reports of ``folders`` and print the path of the last one."""
    command = command_line("report", (_short_text(folders[-1]),))
    with (
        signals.raise_on_signals(f"before the report was written; {command} writes it"),
        report_errors("no report"),
    ):
        from scalewise.reports import html_report

        for page in html_report.write_reports(folders)[-1:]:
            print_lines(f"report {_short_text(page)}")


def _short_text(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def print_search_start(optuna_search: OptunaSearch, reclaimed: Sequence[FrozenTrial]) -> None:
    """Print the number of remaining trials and the trials of an earlier sweep."""
    finished = len(optuna_search.finished_trials)
    if finished or reclaimed:
        print_lines(
            f"study {optuna_search.study.study_name}: {finished} of "
            f"{optuna_search.num_trials} trials are finished"
        )
    for trial in reclaimed:
        print_lines(f"trial {trial.number} was running when its sweep ended")


def print_rejected_trial(number: int, params: Mapping[str, object], reason: str) -> None:
    """Print a trial whose configuration is rejected."""
    print_lines("", f"trial {number} rejected  {_point_text(params)}", f"  {reason}")


def print_search_result(record: Mapping[str, Any], folder: Path) -> None:
    """Print the outcomes of the trials, the best trials and the command of each."""
    trials = {trial["number"]: trial for trial in record["trials"]}
    states = [trial["state"] for trial in trials.values()]
    state_counts = [f"{states.count(s)} {s}" for s in dict.fromkeys(states)]
    print_lines("", f"{record['study']}: {', '.join(state_counts)} of {record['wanted']} trials")
    best = [trials[number] for number in record["best"]]
    if not best:
        print_lines("no best trial: no trial finished within the constraints")
        return
    is_multi_objective = len(record["objectives"]) > 1
    title = (
        f"best in one of {len(record['objectives'])} objectives" if is_multi_objective else "best"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("trial", *best[0]["params"], *record["objectives"]):
        table.add_column(name, justify="right")
    for trial in best[:MAX_TRIALS]:
        params = [_value_text(value) for value in trial["params"].values()]
        values = map(_measured_text, record["objectives"], trial["values"])
        table.add_row(str(trial["number"]), *params, *values)
    console = get_console()
    console.print(styled_text((title, "bold"), f", first {MAX_TRIALS}" * (len(best) > MAX_TRIALS)))
    console.print(table)
    for trial in best[:MAX_TRIALS]:
        command = read_json(folder / str(trial["folder"]) / "status.json").get("command")
        console.print(str(command), soft_wrap=True, style="cyan")
    for key, shares in record["importance"].items():
        importance = ", ".join(f"{axis} {share:.0%}" for axis, share in shares.items())
        console.print(f"importance for {key}: {importance}")


def _point_text(params: Mapping[str, object]) -> str:
    return "  ".join(f"{key}={_value_text(value)}" for key, value in params.items())


def _value_text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _measured_text(key: str, value: float) -> str:
    unit = METRICS[key].unit
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
