"""``scalewise plan``: what a run will need and take, before it starts and without its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from scalewise import console
from scalewise.commands import show, show_plan, show_search
from scalewise.config.app import Command, JobOutcome, SweepJob, run_command
from scalewise.console import print_lines
from scalewise.data import padding
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, this_machine
from scalewise.launch import sweep_resume
from scalewise.launch.config_hash import config_hash
from scalewise.launch.sweep_resume import ResumeRequest
from scalewise.planner import worst_rank
from scalewise.planner.config import MemoryMethod, PlanSearch
from scalewise.planner.fit_check import compare_with_hardware
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryBreakdown, MemoryEntry
from scalewise.planner.plan import Plan, build_plan
from scalewise.planner.search import search_runs
from scalewise.planner.sweep_totals import sum_plans, training_tokens
from scalewise.run_config import RunConfig


class PlanCommand(Command):
    """Prints a run's plan, or one table for the grid of a sweep."""

    checks_machine = False

    def __init__(self, resume_request: ResumeRequest | None = None) -> None:
        self._resume_request = resume_request

    def run_single(self, run: RunConfig, folder: Path) -> int:
        """Prints the ledger, the verdict and its cure, and the time; or what a search found."""
        if self._resume_request is not None:
            self._resume_request.reject_single_run()
        if run.plan.search is not PlanSearch.none:
            with console.get_console().status("searching") as status:
                found = search_runs(run, lambda count: status.update(f"{count:,} runs tried"))
            show_search.print_search(found)
            if found.best is None:
                return 3
            if run.plan.method is not MemoryMethod.trace:
                return 0
            plan = _with_trace(found.best)
            show_plan.print_fit(plan)
            return 3 if plan.fit.status.is_out_of_memory else 0
        if run.objective.trace_only and run.plan.method is MemoryMethod.trace:
            plan = _plan_by_trace(run)
            show_plan.print_fit(plan)
            if not run.objective.is_user_defined:  # whose loaders a plan does not ask
                _padding(run)
            return 3 if plan.fit.status.is_out_of_memory else 0
        plan = build_plan(run)
        if run.plan.method is MemoryMethod.trace:
            plan = _with_trace(plan)
        show_plan.print_plan(plan)
        _padding(plan.run)
        return 3 if plan.fit.status.is_out_of_memory else 0

    def run_sweep(
        self,
        jobs: Sequence[SweepJob],
        folder: Path,
        question: str,
        launcher_options: Mapping[str, object],
    ) -> list[JobOutcome]:
        """Prints a row a job; of a job with a search the best that it finds.

        Of a sweep that is to go on, jobs that ``train`` would not run again get no row.
        """
        plans = [_plan_job(job.run) for job in jobs]
        kept = self._finished_jobs(jobs, plans, folder)
        left = [
            (job.varied, plan) for job, plan in zip(jobs, plans, strict=True) if job not in kept
        ]
        if left:
            show_plan.print_plan_table(left)
            planned = [plan for _, plan in left]
            show_plan.print_totals(sum_plans(planned), _packed_makespan(planned, launcher_options))
        return [
            JobOutcome(
                3 if plan.fit.status.is_out_of_memory and job not in kept else 0,
                plan.step_time.seconds if plan.step_time else float(plan.fit.breakdown.peak),
            )
            for job, plan in zip(jobs, plans, strict=True)
        ]

    def _finished_jobs(
        self, jobs: Sequence[SweepJob], plans: Sequence[Plan], folder: Path
    ) -> list[SweepJob]:
        """Returns the jobs of which the sweep that is to go on has the end, and says how many."""
        if self._resume_request is None:
            return []
        found = sweep_resume.resumed_folder(self._resume_request.sweep, folder)
        known = sweep_resume.earlier_jobs(found, self._resume_request.retry)
        runs = [
            plan.run if job.run.plan.search is PlanSearch.none else job.run
            for job, plan in zip(jobs, plans, strict=True)
        ]
        wanted = [(config_hash(run), job.varied) for run, job in zip(runs, jobs, strict=True)]
        before = zip(jobs, sweep_resume.match_jobs(wanted, known), strict=True)
        kept = [job for job, earlier in before if earlier is not None and earlier.result]
        show.print_resume_summary(len(jobs), len(kept), found)
        return kept


def _packed_makespan(
    plans: Sequence[Plan], launcher_options: Mapping[str, object]
) -> tuple[int, float] | None:
    """Returns the slots of a packed sweep and the time until its last job ends; None elsewhere."""
    if launcher_options.get("engine") != "packed":
        return None
    from scalewise.launch import slot_scheduler

    hardware = plans[0].run.hardware
    on_cuda = hardware.device is DeviceKind.cuda
    slots = cast(int | None, launcher_options["slots"]) or (
        hardware.total_devices if on_cuda else None
    )
    room = slot_scheduler.machine_slots(this_machine(), slots, on_cuda=on_cuda)
    jobs = [
        (slot_scheduler.job_demand(plan.run, room), plan.seconds_for(tokens) or 0.0)
        for plan in plans
        if not plan.fit.status.is_out_of_memory and (tokens := training_tokens(plan)) is not None
    ]
    if on_cuda:  # the main memory of that machine is not known
        room = replace(room, memory=sum(demand.memory for demand, _ in jobs))
    return len(room.slots), slot_scheduler.makespan(jobs, room)


def _plan_job(run: RunConfig) -> Plan:
    if run.objective.trace_only and run.plan.method is MemoryMethod.trace:
        return _plan_by_trace(run)
    best = None if run.plan.search is PlanSearch.none else search_runs(run).best
    plan = best or build_plan(run)
    return _with_trace(plan) if run.plan.method is MemoryMethod.trace else plan


def _plan_by_trace(run: RunConfig) -> Plan:
    """Returns the plan of what the ledger does not know: what a step of it holds, and no time."""
    return _plan_user_module(run) if run.objective.is_user_defined else _plan_stacks(run)


def _padding(run: RunConfig) -> None:
    for note in padding.padding_notes(run):
        print_lines(note)


def _plan_user_module(run: RunConfig) -> Plan:
    """Returns the plan of a user's module."""
    from scalewise.training import user_module_trace  # imports torch

    with console.get_console().status("tracing"):
        found = user_module_trace.trace_user_module(run)
    show_plan.print_user_trace(run, found)
    line = MemoryEntry(
        "traced", dict.fromkeys(ALL_PHASES, found["memory/peak_bytes"]), "", "a step of it"
    )
    return Plan(run, compare_with_hardware(run, MemoryBreakdown((line,))), None)


def _plan_stacks(run: RunConfig) -> Plan:
    """Returns the plan of a model of several stacks.

    Raises ``ConfigError`` for what a trace cannot follow.
    """
    from scalewise.training import fake_tensor_trace  # imports torch
    from scalewise.training.trace_fit_check import TraceFitCheck

    if (reason := fake_tensor_trace.rejection_reason(run)) is not None:
        raise ConfigError.for_key("plan.method", "trace", reason, "set parallelism=fsdp, or single")
    with console.get_console().status("tracing"):
        found = fake_tensor_trace.trace_run(run, full_depth=True)
    plan = Plan(
        run,
        compare_with_hardware(run, found.build_breakdown()),
        None,
        trace_fit_check=TraceFitCheck(),
    )
    show_plan.print_stacks_trace(plan, found)
    return plan


def _with_trace(plan: Plan) -> Plan:
    """Returns a plan whose memory was traced, or the plan as it is, and says why.

    A trace runs the operators of the CPU; what those of CUDA hold otherwise, the ledger says.
    """
    from scalewise.training import fake_tensor_trace  # imports torch

    if (reason := fake_tensor_trace.rejection_reason(plan.run)) is not None:
        print_lines(f"the ledger alone, no trace: {reason}")
        return plan
    with console.get_console().status("tracing"):
        found = fake_tensor_trace.trace_run(plan.run, full_depth=plan.run.plan.full_depth)
    beside = worst_rank.worst_rank_breakdown(fake_tensor_trace.with_cpu_operators(plan.run)).peak
    show_plan.print_trace(found, beside)
    traced = plan.fit.breakdown.peak + found.peak - beside
    return replace(plan, fit=replace(plan.fit, traced_peak=traced))


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of ``scalewise plan ARGUMENTS``, or of ``plan explain ONE OTHER``."""
    if arguments[:1] == ["explain"]:
        from scalewise.commands import compare_runs

        return compare_runs.main(arguments[1:])
    resumption, rest = sweep_resume.parse_resume_request(arguments)
    return run_command(PlanCommand(resumption), rest)
