"""``scalewise plan``: what a run will need and take, before it starts and without its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from scalewise import output
from scalewise.config.door import End, Job, Verb, open_door
from scalewise.data import padding
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, this_machine
from scalewise.launch import resumed_sweep
from scalewise.launch.config_hash import config_hash
from scalewise.launch.resumed_sweep import Resumption
from scalewise.output import print_lines
from scalewise.plan import memory
from scalewise.plan.ledger import EVERY, Ledger, Line
from scalewise.plan.plan import Plan, planned
from scalewise.plan.search import searched
from scalewise.plan.spec import Method, Search
from scalewise.plan.total import tokens_of, total
from scalewise.plan.verdict import against
from scalewise.run import Run
from scalewise.verbs import show, show_plan, show_search


class Planner(Verb):
    """Prints a run's plan, or one table for the grid of a sweep."""

    here = False

    def __init__(self, resumption: Resumption | None = None) -> None:
        self._resumption = resumption

    def one(self, run: Run, folder: Path) -> int:
        """Prints the ledger, the verdict and its cure, and the time; or what a search found."""
        if self._resumption is not None:
            self._resumption.refuse_run()
        if run.plan.search is not Search.none:
            with output.console().status("searching") as status:
                found = searched(run, lambda count: status.update(f"{count:,} runs tried"))
            show_search.one(found)
            if found.best is None:
                return 3
            if run.plan.method is not Method.trace:
                return 0
            plan = _traced(found.best)
            show_plan.verdict(plan)
            return 3 if plan.fit.verdict.bad else 0
        if run.objective.by_trace and run.plan.method is Method.trace:
            plan = _by_trace(run)
            show_plan.verdict(plan)
            if not run.objective.of_user:  # whose loaders a plan does not ask
                _padding(run)
            return 3 if plan.fit.verdict.bad else 0
        plan = planned(run)
        if run.plan.method is Method.trace:
            plan = _traced(plan)
        show_plan.one(plan)
        _padding(plan.run)
        return 3 if plan.fit.verdict.bad else 0

    def many(
        self, jobs: Sequence[Job], folder: Path, question: str, engine: Mapping[str, object]
    ) -> list[End]:
        """Prints a row a job; of a job with a search the best that it finds.

        Of a sweep that is to go on, jobs that ``train`` would not run again get no row.
        """
        plans = [_of_job(job.run) for job in jobs]
        kept = self._kept(jobs, plans, folder)
        left = [
            (job.varied, plan) for job, plan in zip(jobs, plans, strict=True) if job not in kept
        ]
        if left:
            show_plan.table(left)
            planned = [plan for _, plan in left]
            show_plan.summed(total(planned), _wall(planned, engine))
        return [
            End(
                3 if plan.fit.verdict.bad and job not in kept else 0,
                plan.step.seconds if plan.step else float(plan.fit.ledger.peak),
            )
            for job, plan in zip(jobs, plans, strict=True)
        ]

    def _kept(self, jobs: Sequence[Job], plans: Sequence[Plan], folder: Path) -> list[Job]:
        """Returns the jobs of which the sweep that is to go on has the end, and says how many."""
        if self._resumption is None:
            return []
        found = resumed_sweep.folder_of(self._resumption.sweep, folder)
        known = resumed_sweep.earlier(found, self._resumption.retry)
        runs = [
            plan.run if job.run.plan.search is Search.none else job.run
            for job, plan in zip(jobs, plans, strict=True)
        ]
        wanted = [(config_hash(run), job.varied) for run, job in zip(runs, jobs, strict=True)]
        before = zip(jobs, resumed_sweep.matched(wanted, known), strict=True)
        kept = [job for job, earlier in before if earlier is not None and earlier.result]
        show.resumed(len(jobs), len(kept), found)
        return kept


def _wall(plans: Sequence[Plan], engine: Mapping[str, object]) -> tuple[int, float] | None:
    """Returns the slots of a packed sweep and the time until its last job ends; None elsewhere."""
    if engine.get("engine") != "packed":
        return None
    from scalewise.launch import packing

    hardware = plans[0].run.hardware
    on_cuda = hardware.device is DeviceKind.cuda
    slots = cast(int | None, engine["slots"]) or (hardware.devices if on_cuda else None)
    room = packing.seats(this_machine(), slots, on_cuda=on_cuda)
    jobs = [
        (packing.demand(plan.run, room), plan.seconds_for(tokens) or 0.0)
        for plan in plans
        if not plan.fit.verdict.bad and (tokens := tokens_of(plan)) is not None
    ]
    if on_cuda:  # the main memory of that machine is not known
        room = replace(room, memory=sum(demand.memory for demand, _ in jobs))
    return len(room.slots), packing.makespan(jobs, room)


def _of_job(run: Run) -> Plan:
    if run.objective.by_trace and run.plan.method is Method.trace:
        return _by_trace(run)
    best = None if run.plan.search is Search.none else searched(run).best
    plan = best or planned(run)
    return _traced(plan) if run.plan.method is Method.trace else plan


def _by_trace(run: Run) -> Plan:
    """Returns the plan of what the ledger does not know: what a step of it holds, and no time."""
    return _of_user(run) if run.objective.of_user else _of_stacks(run)


def _padding(run: Run) -> None:
    for note in padding.run_notes(run):
        print_lines(note)


def _of_user(run: Run) -> Plan:
    """Returns the plan of a user's module."""
    from scalewise.training import user_trace  # imports torch

    with output.console().status("tracing"):
        found = user_trace.traced(run)
    show_plan.user(run, found)
    line = Line("traced", dict.fromkeys(EVERY, found["memory/peak_bytes"]), "", "a step of it")
    return Plan(run, against(run, Ledger((line,))), None)


def _of_stacks(run: Run) -> Plan:
    """Returns the plan of a model of several stacks.

    Raises ``ConfigError`` for what a trace cannot follow.
    """
    from scalewise.training import trace  # imports torch
    from scalewise.training.trace_judge import TraceJudge

    if (reason := trace.refusal(run)) is not None:
        raise ConfigError.one("plan.method", "trace", reason, "set parallelism=fsdp, or single")
    with output.console().status("tracing"):
        found = trace.traced(run, whole=True)
    plan = Plan(run, against(run, found.ledger()), None, tracer=TraceJudge())
    show_plan.stacks(plan, found)
    return plan


def _traced(plan: Plan) -> Plan:
    """Returns a plan whose memory was traced, or the plan as it is, and says why.

    A trace runs the operators of the CPU; what those of CUDA hold otherwise, the ledger says.
    """
    from scalewise.training import trace  # imports torch

    if (reason := trace.refusal(plan.run)) is not None:
        print_lines(f"the ledger alone, no trace: {reason}")
        return plan
    with output.console().status("tracing"):
        found = trace.traced(plan.run, whole=plan.run.plan.full_depth)
    beside = memory.worst(trace.on_cpu(plan.run)).peak
    show_plan.trace(found, beside)
    traced = plan.fit.ledger.peak + found.peak - beside
    return replace(plan, fit=replace(plan.fit, traced=traced))


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of ``scalewise plan ARGUMENTS``, or of ``plan explain ONE OTHER``."""
    if arguments[:1] == ["explain"]:
        from scalewise.verbs import explain

        return explain.main(arguments[1:])
    resumption, rest = resumed_sweep.asked(arguments)
    return open_door(Planner(resumption), rest)
