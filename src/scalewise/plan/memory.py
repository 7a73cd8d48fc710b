"""The ledger of one device: what each rank holds, joined with what its passes keep and make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalewise.plan.device import Device
from scalewise.plan.ledger import Ledger
from scalewise.plan.moments import moments
from scalewise.plan.zero import ZeroDevice

if TYPE_CHECKING:
    from scalewise.parallelism.holds import Holds
    from scalewise.run import Run


def of_device(run: Run, rank: int = 0) -> Ledger:
    """Returns the ledger of one rank's device at the last micro batch of a step."""
    return of_holds(run, run.parallelism.holds(run, rank))


def of_holds(run: Run, holds: Holds) -> Ledger:
    """Returns the same of a rank that holds this."""
    kind = Device if holds.zero is None else ZeroDevice
    devices = [kind(run, holds, moment) for moment in moments(holds)]
    ledgers = [Ledger(tuple(line for line in device.lines() if line.most)) for device in devices]
    return max(ledgers, key=lambda ledger: ledger.peak)


def worst(run: Run) -> Ledger:
    """Returns the ledger of the rank whose device is fullest."""
    ranks = run.parallelism.unlike_ranks(run)
    return max((of_device(run, rank) for rank in ranks), key=lambda ledger: ledger.peak)
