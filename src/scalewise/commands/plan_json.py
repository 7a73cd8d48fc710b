"""JSON output of ``scalewise plan --json``, for programs: bytes, seconds and US dollars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from scalewise.commands import show_limits
from scalewise.config.command import RejectedJob
from scalewise.console import print_lines
from scalewise.planner.plan import Plan, dollars_per_billion_tokens, plan_record
from scalewise.planner.search_result import SearchResult
from scalewise.run_config import RunConfig


def print_json(content: Mapping[str, object]) -> None:
    """Print one JSON object to stdout."""
    print_lines(*json.dumps(content, indent=2).splitlines())


def plan_content(plan: Plan) -> dict[str, object]:
    """Fit, time and price of a run, and what ``plan.json`` of a run folder contains.

    Values that the hardware profile lacks rates or prices for are null.
    """
    fit, run = plan.fit, plan.run
    fix = plan.suggested_fix
    return {
        "run": run.name,
        "world_size": run.world_size,
        "tokens_per_step": run.tokens_per_step,
        "changes": list(plan.overrides),
        "fit": fit.status.value,
        "suggested_fix": None if fix is None else list(fix.overrides),
        "reserved_bytes": dict(zip(("low", "typical", "high"), fit.reserved, strict=True)),
        "step_s_range": plan.step_seconds_range,
        "batch_warmup": [
            {
                "until_step": until_step,
                "global_batch": samples,
                "step_s": plan.step_seconds_at(until_step),
            }
            for until_step, samples in run.samples_per_step.stages
        ],
        "sequence_warmup": [
            {
                "until_step": until_step,
                "sequence": tokens,
                "step_s": plan.step_seconds_at(until_step),
            }
            for until_step, tokens in run.sequence_per_step.stages
        ],
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "mfu_palm": plan.mfu_palm,
        "dollars_per_billion_tokens": dollars_per_billion_tokens(run, plan.tokens_per_s),
        **plan_record(run),
        "plan/peak_bytes": fit.peak,
    }


def search_content(result: SearchResult) -> dict[str, object]:
    """Best run of a search, null if none can fit, and the runs on its Pareto front."""
    front = (*result.pareto_front, *result.changed_training_front)
    return {
        "tried": len(result.candidates),
        "best": None if result.best is None else plan_content(result.best),
        "pareto_front": [plan_content(candidate) for candidate in front],
    }


def limit_content(run: RunConfig) -> dict[str, object]:
    """Limit that a search finds, null if nothing fits, and the values that it tried."""
    rows, limit = show_limits.find_limit(run)
    return {
        "key": show_limits.KEYS[run.plan.search],
        "limit": None if limit is None else limit.value,
        "tried": [{"value": row.value, **plan_content(row.plan)} for row in rows],
    }


def sweep_content(
    jobs: Sequence[tuple[Mapping[str, str], Plan]], rejected: Sequence[RejectedJob]
) -> dict[str, object]:
    """Plans of the jobs of a sweep with their varied values, and issues of rejected jobs."""
    return {
        "jobs": [{"varied": dict(varied), **plan_content(plan)} for varied, plan in jobs],
        "rejected": [
            {"varied": dict(job.varied), "issues": [str(issue) for issue in job.error.issues]}
            for job in rejected
        ],
    }
