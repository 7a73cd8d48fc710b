"""Two steps of a run in processes of their own, to see whether there is memory for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from scalewise.errors import Interrupted
from scalewise.hardware import DeviceKind
from scalewise.launch.job import JobSpec, prepare_job
from scalewise.lr_schedules import ConstantConfig
from scalewise.run_config import RunConfig

PROBE_STEPS = 2
"""The first makes the optimizer's state, the second runs beside it."""
PROBE_PASSES = {DeviceKind.cuda: 2, DeviceKind.cpu: 8}
"""Micro batches of a step at the most: the second runs beside the gradients of the first. On the
CPU the allocator leaves more holes with each, until there is no place for the largest tensor."""

PROBE_HEADROOM = 0.05
"""Part of ``launch.memory_limit_gib`` that a trial leaves: what fits by a hair may not again."""


def probe_status(run: RunConfig) -> str:
    """Returns how two steps of ``run`` end, with its callbacks and a validation, untracked.

    Raises ``ConfigError`` where its data are refused, and ``Interrupted`` for a signal.
    """
    from scalewise.launch.elastic import run_ranks  # imports torch

    short = shorten_run(run)
    with TemporaryDirectory(prefix="scalewise-trial-") as place:
        folder = Path(place)
        (folder / "checkpoints").mkdir()
        prepare_job(JobSpec(short))
        outcome = run_ranks(short, folder, None, None)
    if outcome.status == "interrupted":
        raise Interrupted(outcome.signal_number, outcome.reason)
    return outcome.status


def shorten_run(run: RunConfig) -> RunConfig:
    """Returns the run with so few steps and passes, that needs the memory of the whole.

    On the CPU it saves as well, as there a save needs memory of the same kind.
    """
    trainer, checkpoint, limit = run.trainer, run.checkpoint, run.launch.memory_limit_gib
    saves = checkpoint.every is not None or checkpoint.best or checkpoint.at_end
    return replace(
        run,
        resume=None,
        schedule=ConstantConfig(),
        trainer=replace(
            trainer,
            max_steps=PROBE_STEPS,
            max_tokens=None,
            max_epochs=None,
            global_batch=run.samples_per_forward
            * min(PROBE_PASSES[run.hardware.device], run.accumulation),
            validate_every=trainer.validate_every and PROBE_STEPS,
            validate_first=False,
            validation_rows=min(trainer.validation_rows, run.samples_per_forward),
            log_every=PROBE_STEPS + 1,
        ),
        checkpoint=replace(
            checkpoint,
            every=None,
            best=False,
            at_end=saves and run.hardware.device is DeviceKind.cpu,
        ),
        launch=replace(
            run.launch,
            max_restarts=0,
            refuse_unfit=False,
            memory_limit_gib=limit and limit * (1 - PROBE_HEADROOM),
        ),
    )
