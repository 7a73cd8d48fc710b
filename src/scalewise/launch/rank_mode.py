"""How the ranks of a job run: in this process, or as processes under torch elastic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from scalewise.launch.outcomes import Outcome
from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class RankMode:
    """How the ranks of a job run; its functions import torch when they are called."""

    implementation: ClassVar[str] = ""
    """Module of the functions."""


@dataclass(frozen=True)
class InProcess(RankMode):
    """The only rank is this process."""

    implementation = "scalewise.launch.rank_worker"


@dataclass(frozen=True)
class ElasticRanks(RankMode):
    """Each rank is a process that torch elastic starts from the forkserver."""

    implementation = "scalewise.launch.elastic"


@lazy_dispatch
def run_ranks(
    mode: RankMode,
    run: RunConfig,
    folder: Path,
    resume: Path | None,
    tracking_metadata: dict[str, object] | None,
) -> Outcome:
    """Run one attempt at a job and return the outcome.

    Args:
        mode: How the ranks run.
        run: Config of the run.
        folder: Run folder.
        resume: Checkpoint to resume from; None: from scratch.
        tracking_metadata: Metadata of the W&B run; None: no tracking.
    """
    raise not_registered(run_ranks, mode)
