"""Output of ``scalewise plan plan.search=micro_batch|sequence|devices|hardware``."""

from __future__ import annotations

from collections.abc import Sequence

from scalewise.commands.show_plan import STYLES, print_plan_table, train_command
from scalewise.commands.show_search import PRICED_TOKENS
from scalewise.config import paths
from scalewise.config.compose import compose
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind
from scalewise.plain_console import get_console, styled_text
from scalewise.plan_config import PlanSearch
from scalewise.planner import layout_enumeration
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.limit_search import LimitRow, limit_rows
from scalewise.planner.plan import Plan, build_plan
from scalewise.run_config import RunConfig
from scalewise.typed_override import replace_overrides
from scalewise.units import format_dollars

KEYS = {
    PlanSearch.micro_batch: "trainer.micro_batch",
    PlanSearch.sequence: "data.sequence",
    PlanSearch.devices: "devices",
    PlanSearch.hardware: "hardware",
}
"""Name of the varied quantity in the table."""


def find_limit(run: RunConfig) -> tuple[list[LimitRow], LimitRow | None]:
    """Return all rows of a search for a limit, and the row of the limit; None: nothing fits."""
    search = run.plan.search
    rows = _hardware_rows(run) if search is PlanSearch.hardware else limit_rows(run)
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return rows, None
    is_first = search in (PlanSearch.devices, PlanSearch.hardware)
    return rows, fitting[0 if is_first else -1]


def print_limit(run: RunConfig) -> Plan | None:
    """Print the limit, its command and all rows; return its plan, or None if nothing fits."""
    console, search = get_console(), run.plan.search
    rows, limit = find_limit(run)
    if limit is None:
        console.print(styled_text(("Nothing fits", STYLES[FitStatus.out_of_memory])))
    else:
        console.print(_answer(run, rows, limit), style="bold", soft_wrap=True)
        command = train_command(run, limit.plan.overrides)
        if search is PlanSearch.devices:
            console.print(
                f"on {limit.value} devices of the profile: {command}", soft_wrap=True, style="cyan"
            )
        else:
            console.print(command, soft_wrap=True, style="cyan")
    if rows:
        console.print()
        print_plan_table([({KEYS[search]: row.value}, row.plan) for row in rows])
    return None if limit is None else limit.plan


def _answer(run: RunConfig, rows: Sequence[LimitRow], limit: LimitRow) -> str:
    plan, search = limit.plan, run.plan.search
    if search is PlanSearch.micro_batch:
        return (
            f"Largest micro-batch that fits: {limit.value} sequences of {run.data.sequence} tokens"
        )
    if search is PlanSearch.sequence:
        at_context = int(limit.value) == run.model.context
        suffix = ", the context of the model (model.context)" * at_context
        return f"Longest sequence that fits: {int(limit.value):,} tokens{suffix}"
    if search is PlanSearch.devices:
        layout = layout_enumeration.layout_text(plan.run.parallelism)
        recompute = plan.run.memory.describe(plan.run.model.layers)
        return f"Fewest devices on which it fits: {limit.value} ({layout}, recompute {recompute})"
    num_fitting = sum(row.fits for row in rows)
    dollars = plan.dollars_for(PRICED_TOKENS)
    price = "" if dollars is None else f", {format_dollars(dollars)} per billion tokens"
    return f"Fits on {num_fitting} of {len(rows)} profiles; cheapest: {limit.value}{price}"


def _hardware_rows(run: RunConfig) -> list[LimitRow]:
    """Return a row for each CUDA profile with enough devices: those that fit by price, then others.

    Profiles that do not support the run, such as one without bf16, are left out.
    """
    rows = []
    for name in paths.option_names("hardware", "device"):
        override = f"hardware={name}"
        try:
            other = compose(replace_overrides(run.overrides, (override,)), check_machine=False)
        except ConfigError:
            continue
        devices = other.hardware.total_devices
        if other.hardware.device is DeviceKind.cuda and run.world_size <= (
            devices or run.world_size
        ):
            plan = build_plan(other)
            rows.append(
                LimitRow(
                    name, Plan(plan.run, plan.fit, plan.step_time, (override, *plan.overrides))
                )
            )
    return sorted(
        rows, key=lambda row: (not row.fits, row.plan.dollars_for(PRICED_TOKENS) or 0.0, row.value)
    )
