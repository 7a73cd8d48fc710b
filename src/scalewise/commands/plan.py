"""``scalewise plan``: predicted memory, step time and price of a run, before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from scalewise import plain_console
from scalewise.commands import plan_json, show, show_limits, show_plan, show_search
from scalewise.config.app import run_command
from scalewise.config.command import Command, JobOutcome, SweepJob
from scalewise.console import print_lines
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, this_machine
from scalewise.launch import sweep_resume
from scalewise.launch.config_hash import config_hash
from scalewise.launch.sweep_resume import ResumeRequest
from scalewise.plan_config import MemoryMethod, PlanSearch
from scalewise.planner import peak_memory
from scalewise.planner.fit_check import compare_with_hardware
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryBreakdown, MemoryEntry
from scalewise.planner.plan import Plan, build_plan, padding_notes, sum_plans, training_seconds
from scalewise.planner.search import search_runs
from scalewise.run_config import RunConfig
from scalewise.sweep_question import SweepQuestion


class PlanCommand(Command):
    """Print the plan of a run, or one table for a sweep."""

    checks_machine = False

    def __init__(
        self, resume_request: ResumeRequest | None = None, *, as_json: bool = False
    ) -> None:
        self._resume_request, self._as_json = resume_request, as_json
        self.rejected_jobs = []

    def run_single(self, run: RunConfig, folder: Path) -> int:
        """Print memory breakdown, fit, suggested fix and step time, or the result of a search."""
        if self._resume_request is not None:
            self._resume_request.reject_single_run()
        if self._as_json:
            return _print_json(run)
        if run.plan.search.is_limit:
            return 3 if show_limits.print_limit(run) is None else 0
        if run.plan.search is not PlanSearch.none:
            with plain_console.get_console().status("searching") as status:
                result = search_runs(run, lambda count: status.update(f"{count:,} runs tried"))
            show_search.print_search(result)
            if result.best is None:
                return 3
            if run.plan.method is not MemoryMethod.trace:
                return 0
            plan = _with_trace(result.best)
            show_plan.print_fit(plan)
            return 3 if plan.fit.status.is_out_of_memory else 0
        if run.objective.trace_only and run.plan.method is MemoryMethod.trace:
            plan = _plan_user_module(run)  # its data loaders are not built for a plan
            show_plan.print_fit(plan)
            return 3 if plan.fit.status.is_out_of_memory else 0
        plan = build_plan(run)
        if run.plan.method is MemoryMethod.trace:
            plan = _with_trace(plan)
        show_plan.print_plan(plan)
        _print_padding(plan.run)
        return 3 if plan.fit.status.is_out_of_memory else 0

    def run_sweep(
        self,
        jobs: Sequence[SweepJob],
        folder: Path,
        question: SweepQuestion,
        launcher_options: Mapping[str, object],
    ) -> list[JobOutcome]:
        """Print one row per job; with ``plan.search``, the best run of each job.

        Rejected jobs follow the table with their issues. Jobs of a resumed sweep that ``train``
        would not run again are left out.
        """
        if self._as_json:
            for job in jobs:
                _reject_traced_json(job.run)
        plans, rejected = [_plan_job(job.run) for job in jobs], self.rejected_jobs or ()
        finished = self._finished_jobs(jobs, plans, folder)
        remaining = [
            (job.varied, plan) for job, plan in zip(jobs, plans, strict=True) if job not in finished
        ]
        passed: dict[str, bool] = {}
        if self._as_json:
            plan_json.print_json(plan_json.sweep_content(remaining, rejected))
        elif remaining:
            if jobs[0].expectation is None:
                show_plan.print_plan_table(remaining)
            else:
                passed = _grade_plans(jobs, plans, question)
            remaining_plans = [plan for _, plan in remaining]
            show_plan.print_totals(
                sum_plans(remaining_plans), _packed_makespan(remaining_plans, launcher_options)
            )
        if not self._as_json:
            show_plan.print_rejected(rejected)
        return [
            JobOutcome(
                int(not passed[job.run.name])
                if passed
                else 3 * (plan.fit.status.is_out_of_memory and job not in finished),
                plan.step_time.seconds if plan.step_time else float(plan.fit.breakdown.peak),
            )
            for job, plan in zip(jobs, plans, strict=True)
        ]

    def _finished_jobs(
        self, jobs: Sequence[SweepJob], plans: Sequence[Plan], folder: Path
    ) -> list[SweepJob]:
        """Return the finished jobs of the resumed sweep, and print how many there are."""
        if self._resume_request is None:
            return []
        sweep_folder = sweep_resume.resumed_folder(self._resume_request.sweep, folder)
        earlier_jobs = sweep_resume.earlier_jobs(sweep_folder, self._resume_request.retry)
        runs = [
            plan.run if job.run.plan.search is PlanSearch.none else job.run
            for job, plan in zip(jobs, plans, strict=True)
        ]
        job_keys = [(config_hash(run), job.varied) for run, job in zip(runs, jobs, strict=True)]
        matches = zip(jobs, sweep_resume.match_jobs(job_keys, earlier_jobs), strict=True)
        finished = [job for job, earlier in matches if earlier is not None and earlier.result]
        if not self._as_json:
            show.print_resume_summary(len(jobs), len(finished), sweep_folder)
        return finished


def _grade_plans(
    jobs: Sequence[SweepJob], plans: Sequence[Plan], question: SweepQuestion
) -> dict[str, bool]:
    """Print the grades of the plans of cases; return whether each is as expected, by name."""
    from scalewise.commands import show_grades  # imports numpy

    expectations, outcomes = {}, {}
    for job, plan in zip(jobs, plans, strict=True):
        assert job.expectation is not None
        expectations[job.run.name] = job.expectation
        outcomes[job.run.name] = show_grades.plan_outcome(plan)
    return show_grades.grade_plans(expectations, outcomes, question.answer)


def _print_json(run: RunConfig) -> int:
    """Print the plan of a run, or the result of its search, as JSON; return the exit code."""
    _reject_traced_json(run)
    if run.plan.search.is_limit:
        limits = plan_json.limit_content(run)
        plan_json.print_json(limits)
        return 3 if limits["limit"] is None else 0
    if run.plan.search is not PlanSearch.none:
        result = search_runs(run)
        plan_json.print_json(plan_json.search_content(result))
        return 3 if result.best is None else 0
    plan = build_plan(run)
    plan_json.print_json(plan_json.plan_content(plan))
    return 3 if plan.fit.status.is_out_of_memory else 0


def _reject_traced_json(run: RunConfig) -> None:
    if run.plan.method is MemoryMethod.trace:  # it prints its own lines
        fix = "leave out --json, or set plan.method=ledger"
        raise ConfigError.for_key("plan.method", "trace", "has no JSON output", fix)


def _packed_makespan(
    plans: Sequence[Plan], launcher_options: Mapping[str, object]
) -> tuple[int, float] | None:
    """Return the slots of a packed sweep and its makespan in seconds; None for other executors."""
    if launcher_options.get("engine") != "packed":
        return None
    from scalewise.launch import packed_executor

    hardware = plans[0].run.hardware
    on_cuda = hardware.device is DeviceKind.cuda
    slots = cast(int | None, launcher_options["slots"]) or (
        hardware.total_devices if on_cuda else None
    )
    machine = packed_executor.machine_slots(this_machine(), slots, on_cuda=on_cuda)
    jobs = [
        (packed_executor.job_demand(plan.run, machine), seconds)
        for plan in plans
        if not plan.fit.status.is_out_of_memory and (seconds := training_seconds(plan)) is not None
    ]
    if on_cuda:  # main memory of the target machine is unknown
        machine = replace(machine, memory=sum(demand.memory for demand, _ in jobs))
    return len(machine.slots), packed_executor.makespan(jobs, machine)


def _plan_job(run: RunConfig) -> Plan:
    if run.objective.trace_only and run.plan.method is MemoryMethod.trace:
        return _plan_user_module(run)
    best: Plan | None = None
    if run.plan.search.is_limit:
        limit = show_limits.find_limit(run)[1]
        best = None if limit is None else limit.plan
    elif run.plan.search is not PlanSearch.none:
        best = search_runs(run).best
    plan = best or build_plan(run)
    return _with_trace(plan) if run.plan.method is MemoryMethod.trace else plan


def _print_padding(run: RunConfig) -> None:
    for note in padding_notes(run):
        print_lines(note)


def _plan_user_module(run: RunConfig) -> Plan:
    """Return the memory plan of a user-defined module; its step time is None."""
    from scalewise.tracing import user_module_trace  # imports torch

    with plain_console.get_console().status("tracing"):
        trace = user_module_trace.trace_user_module(run)
    show_plan.print_user_trace(run, trace)
    entry = MemoryEntry(
        "traced", dict.fromkeys(ALL_PHASES, trace["memory/peak_bytes"]), "", "one traced step"
    )
    return Plan(run, compare_with_hardware(run, MemoryBreakdown((entry,))), None)


def _load_cuda_operators(run: RunConfig) -> None:
    """Load the fake device on which a trace runs CUDA operators; must precede imports of torch."""
    from scalewise.tracing.fake_cuda import FakeCudaError, load_fake_cuda

    if run.hardware.device is DeviceKind.cuda:
        try:
            load_fake_cuda()
        except FakeCudaError as error:
            print_lines(f"The trace runs CPU operators: {error}")


def _with_trace(plan: Plan) -> Plan:
    """Return the plan with the traced peak; print the reason if the run cannot be traced.

    If a trace runs CPU operators for CUDA, or a compiled run in eager mode, the analytic model adds
    the difference.
    """
    _load_cuda_operators(plan.run)
    from scalewise.tracing import step_trace  # imports torch

    if (reason := step_trace.rejection_reason(plan.run)) is not None:
        print_lines(f"Analytic prediction only, no trace: {reason}")
        return plan
    with plain_console.get_console().status("tracing"):
        trace = step_trace.trace_run(plan.run, full_depth=plan.run.plan.full_depth)
    if plan.run.is_compiled:
        print_lines(
            "The trace runs in eager mode; the analytic model adds the effect of torch.compile"
        )
    traced_run = step_trace.with_traced_operators(plan.run)
    predicted_peak = peak_memory.worst_rank_breakdown(traced_run).peak
    show_plan.print_trace(trace, predicted_peak)
    traced_peak = plan.fit.breakdown.peak + trace.peak - predicted_peak
    return replace(plan, fit=replace(plan.fit, traced_peak=traced_peak))


def main(arguments: Sequence[str]) -> int:
    """Run ``scalewise plan`` or ``scalewise plan explain`` and return the exit code."""
    if arguments[:1] == ["explain"]:
        from scalewise.commands import compare_runs

        return compare_runs.main(arguments[1:])
    others = [argument for argument in arguments if argument != "--json"]
    resume_request, rest = sweep_resume.parse_resume_request(others)
    return run_command(PlanCommand(resume_request, as_json=len(others) < len(arguments)), rest)
