"""Training in one rank process, with its exit report and W&B session."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from scalewise import console
from scalewise.hardware import DeviceKind
from scalewise.launch import exit_reports, signals
from scalewise.launch.outcomes import Outcome, outcome_of_exception
from scalewise.launch.processes import limit_memory
from scalewise.launch.rank_mode import InProcess, run_ranks
from scalewise.run_config import RunConfig
from scalewise.run_files import WANDB_FACTS, write_json
from scalewise.tracking.wandb_session import NullSession, open_session
from scalewise.training.device_setup import RankInfo
from scalewise.training.fit import fit_run
from scalewise.training.signal_stop import STOP


@run_ranks.register(InProcess)
def _run_in_process(
    mode: InProcess,
    run: RunConfig,
    folder: Path,
    resume: Path | None,
    tracking_metadata: dict[str, object] | None,
) -> Outcome:
    with signals.restore_handlers():
        outcome = run_attempt(run, folder, resume, tracking_metadata)
    if run.hardware.device is DeviceKind.cuda and run.world_size == 1:
        gc.collect()  # the trainer and its modules refer to each other
        torch.cuda.empty_cache()
    return outcome


def run_attempt(
    run: RunConfig, folder: Path, resume: Path | None, tracking_metadata: dict[str, object] | None
) -> Outcome:
    """Train in this process and return the outcome; never raises.

    ``tracking_metadata``: metadata of the W&B run; None: no tracking.
    """
    with console.shield_streams():
        return _run_guarded(run, folder, resume, tracking_metadata)


def _run_guarded(
    run: RunConfig, folder: Path, resume: Path | None, tracking_metadata: dict[str, object] | None
) -> Outcome:
    rank_info = RankInfo(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    session = NullSession()
    exit_reports.reserve_report(folder, rank_info.rank)
    STOP.start(has_no_launcher="RANK" not in os.environ)
    try:
        if rank_info.rank == 0 and tracking_metadata is not None and run.tracking.is_enabled:
            session = open_session(run, folder, tracking_metadata)
            (folder / WANDB_FACTS).parent.mkdir(exist_ok=True)
            write_json(folder / WANDB_FACTS, session.facts)
        if run.hardware.device is not DeviceKind.cuda:  # CUDA maps the memory of all devices
            limit_memory(run.launch.memory_limit_gib)  # after W&B has started its process
        fit_run(run, folder, rank_info, resume, session)
        outcome = Outcome("ok")
    except BaseException as error:
        outcome = outcome_of_exception(error, rank_info.rank).after_signal(STOP.received_signal)
    exit_reports.write_report(folder, rank_info.rank, outcome)
    session.finish(outcome.status, outcome.reason, outcome.exit_code)
    return outcome
