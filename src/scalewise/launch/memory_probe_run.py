"""Memory probe: two steps of a run in separate processes, to test whether it fits in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from scalewise.errors import Interrupted
from scalewise.hardware import DeviceKind
from scalewise.launch.job import JobSpec, prepare_job
from scalewise.launch.rank_mode import ElasticRanks, run_ranks
from scalewise.lr_schedules import ConstantConfig
from scalewise.run_config import RunConfig

PROBE_STEPS = 2
"""Number of steps: the first allocates the optimizer state, the second runs with it."""
MAX_PROBE_MICRO_BATCHES = {DeviceKind.cuda: 2, DeviceKind.cpu: 8}
"""Maximum number of micro-batches per step; the second one runs with the gradients of the first.
On the CPU, fragmentation grows with each one, until the largest tensor does not fit."""

PROBE_HEADROOM = 0.05
"""Fraction of ``launch.memory_limit_gib``, or of a CUDA device's memory without one, that a probe
leaves free, as peaks vary between runs."""


def probe_status(run: RunConfig) -> str:
    """Status of two steps of ``run`` with its callbacks and a validation, without tracking.

    Raises ``ConfigError`` for invalid data, and ``Interrupted`` for a signal.
    """
    short_run = shorten_run(run)
    with TemporaryDirectory(prefix="scalewise-trial-") as folder_name:
        folder = Path(folder_name)
        (folder / "checkpoints").mkdir()
        prepare_job(JobSpec(short_run))
        outcome = run_ranks(ElasticRanks(), short_run, folder, None, None)
    if outcome.status == "interrupted":
        raise Interrupted(outcome.signal_number, outcome.reason)
    return outcome.status


def shorten_run(run: RunConfig) -> RunConfig:
    """Run with fewer steps and micro-batches, and the peak memory of the full run.

    On the CPU it also saves a checkpoint, which allocates main memory.
    """
    trainer, checkpoint, memory_limit = run.trainer, run.checkpoint, run.launch.memory_limit_gib
    hardware = run.hardware
    if hardware.device is DeviceKind.cuda and hardware.memory_gib is not None:
        memory_limit = memory_limit or hardware.memory_gib - hardware.context_gib
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
            batch_warmup={},
            sequence_warmup={},
            global_batch=run.samples_per_forward
            * min(MAX_PROBE_MICRO_BATCHES[run.hardware.device], run.accumulation),
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
            memory_limit_gib=memory_limit and memory_limit * (1 - PROBE_HEADROOM),
        ),
    )
