"""What a run leaves open by ``auto`` is chosen before it starts: what fits, memory, rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from scalewise.config.compose import compose
from scalewise.errors import Complaint, ConfigError
from scalewise.hardware import DeviceKind, this_machine
from scalewise.launch import started
from scalewise.memory import Auto
from scalewise.output import print_lines
from scalewise.plan.spec import Fitting, Search
from scalewise.run import Run
from scalewise.trainer import AUTO, SIZE
from scalewise.units import bytes_text

if TYPE_CHECKING:
    from scalewise.plan.sizing import Sizing


def fitted(run: Run, *, untried: str = "") -> tuple[Run, Sizing | None]:
    """Returns the run that starts in place of ``run``, and how its micro batch was found.

    ``untried``: why no run can be tried here. Raises ``ConfigError`` where that does not fit and
    nothing helps.
    """
    if run.plan.fit is not Fitting.none:
        run = _with(run, _told(_on_devices(run)))
    if isinstance(run.memory, Auto):
        from scalewise.plan.budget import settled

        run = _with(run, settled(run)[1])
    if run.trainer.micro_batch != AUTO:
        return run, None
    found = _sized(run, untried)
    return _with(run, found.told), found


def _sized(run: Run, untried: str) -> Sizing:
    from scalewise.launch import trial
    from scalewise.plan.sizing import sized

    if started.by_others():
        untried = "not tried, as these ranks were started by torchrun or srun"

    def ends(tried: Run) -> str:
        print_lines(f"{SIZE}={AUTO}: trying {tried.micro_batch} ...")
        return trial.status(tried)

    return sized(run, None if untried else ends, untried)


def _with(run: Run, told: Sequence[str]) -> Run:
    from scalewise.plan.line import replaced

    return compose(replaced(run.overrides, told)) if told else run


def all_fitted(runs: Sequence[Run], *, untried: str = "") -> list[tuple[Run, Sizing | None]]:
    """Returns what ``fitted`` does of each of ``runs``; raises with every complaint."""
    fit: list[tuple[Run, Sizing | None]] = []
    complaints: list[Complaint] = []
    for number, run in enumerate(runs):
        try:
            fit.append(fitted(run, untried=untried))
        except ConfigError as error:
            complaints += [
                replace(complaint, reason=f"job {number}: {complaint.reason}")
                for complaint in error.complaints
            ]
    if complaints:
        raise ConfigError(complaints)
    return fit


def _told(run: Run) -> tuple[str, ...]:
    # Most runs ask for none of this, and it takes its time to import.
    from scalewise.plan.plan import planned
    from scalewise.plan.search import searched

    plan = planned(run)
    if run.plan.search is not Search.none:
        found = searched(run)
        if plan.fit.verdict.good and found.rank is not run.plan.rank_by:
            return ()  # it fits, and nothing is known that would be better
        if (best := found.best) is not None:
            return best.told
    elif plan.fit.verdict.good:
        return ()
    elif plan.cure is not None:
        return plan.cure.told
    needed, there = bytes_text(plan.fit.reserved[1]), bytes_text(plan.fit.capacity or 0)
    reason = f"needs {needed} of {there}, and no change that was tried makes it fit"
    cure = "see `scalewise plan` with the same line, or set plan.fit=none"
    raise ConfigError.one("plan.fit", run.plan.fit.value, reason, cure)


def _on_devices(run: Run) -> Run:
    """Returns the run with as many devices as may be used: those of the profile, or those here."""
    hardware = run.hardware
    if hardware.devices is not None:
        return run
    here = len(this_machine().gpus) if hardware.device is DeviceKind.cuda else 1
    return replace(run, hardware=replace(hardware, devices_per_node=max(run.world_size, here)))
