"""Plans of the cases that ``scalewise bench gpu`` has recorded, next to their measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from scalewise.bench.profile import StepScale, fit_step_scale
from scalewise.bench.suite import Compose
from scalewise.planner.peak_memory import worst_rank_breakdown
from scalewise.planner.step_time import predict_step_time
from scalewise.units import format_count


@dataclass(frozen=True)
class CaseAccuracy:
    """Measured figures of a case, relative to a plan by the current profile."""

    name: str
    """Name of the case."""
    memory: float
    """Planned over measured peak memory, minus 1."""
    time: float
    """Planned over measured step time, minus 1."""
    unscaled: float
    """Measured step time over the planned one without ``hardware.step_scale``."""


def compare_cases(record: Path, compose: Compose) -> list[CaseAccuracy]:
    """Plan the successful cases of a record again; the folder's name is that of the profile.

    Args:
        record: File of the record.
        compose: Function that composes a run from overrides without checks of this machine.
    """
    rows = []
    for name, case in json.loads(record.read_text("utf-8"))["cases"].items():
        if case["status"] != "ok" or "step_s" not in case:  # checkpoint cases have no step
            continue
        overrides = (*case["overrides"], f"hardware={record.parent.name}")
        run = compose(overrides)
        unscaled = replace(run, hardware=replace(run.hardware, step_scale=1.0))
        step = predict_step_time(unscaled)
        assert step is not None, name
        seconds, measured = step.seconds, case["step_s"]["median"]
        peak = worst_rank_breakdown(run).peak
        rows.append(
            CaseAccuracy(
                name,
                peak / case["peak_bytes"] - 1,
                run.hardware.step_scale * seconds / measured - 1,
                measured / seconds,
            )
        )
    return rows


def recorded_step_scale(record: Path, compose: Compose) -> StepScale:
    """Step scale of a profile, from the record of scalewise's own runs on that GPU."""
    return fit_step_scale([case.unscaled for case in compare_cases(record, compose)])


def accuracy_sentence(record: Path, compose: Compose) -> str:
    """Errors of planned memory and step time over the cases of a record."""
    cases, content = compare_cases(record, compose), json.loads(record.read_text("utf-8"))
    scale = fit_step_scale([case.unscaled for case in cases])
    memory, times, earlier = (
        [abs(error) for error in errors]
        for errors in (
            [case.memory for case in cases],
            [case.time for case in cases],
            [content["cases"][case.name]["step_error"] for case in cases],
        )
    )
    return (
        f"`scalewise bench gpu` ({content['date'][:10]}, {content['machine']['device']}, torch "
        f"{content['versions']['torch']}) trained {len(cases)} configurations of "
        f"{_parameter_range(content, cases)} parameters. Planned peak memory differs by "
        f"{median(memory):.3%} at the median and {max(memory):.3%} at the worst. Step times that "
        f"were planned before the runs, with the profile of that day, differ by "
        f"{median(earlier):.1%} at the median and {max(earlier):.0%} at the worst. Measured steps "
        f"take {scale.median:.2f} times the unscaled plan at the median: that is `step_scale` in "
        f"`conf/hardware/{record.parent.name}.yaml`, fitted to these cases. With it, planned step "
        f"time differs by {median(times):.1%} at the median and {max(times):.0%} at the worst, on "
        "the cases that it is fitted to; other runs may differ by more."
    )


def _parameter_range(content: dict[str, Any], cases: Sequence[CaseAccuracy]) -> str:
    """Sizes of the smallest and of the largest model of the cases."""
    sizes = [content["cases"][case.name]["parameters"] for case in cases]
    return f"{format_count(min(sizes))} to {format_count(max(sizes))}"
