"""Lightning Trainer of a run and ``summary.json``, for any module."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from traceback import walk_tb
from typing import Any, cast

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, Trainer

from scalewise.checkpoints import manifest
from scalewise.compat.lightning import disable_signal_broadcast, replace_step_boundaries
from scalewise.compat.lightning_hooks import StepHookTrainer
from scalewise.errors import CheckpointError
from scalewise.failures import describe_exception
from scalewise.goodput import compute_goodput, read_attempts
from scalewise.hardware import DeviceKind, launched_world_size
from scalewise.planner.plan import dollars_per_billion_tokens, predicted_metrics
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.run_files import write_json
from scalewise.strategies.build import build_strategy
from scalewise.tracking.wandb_session import NullSession
from scalewise.training.callbacks.checkpointing import CheckpointSaver
from scalewise.training.callbacks.metrics_recorder import DataWaitMarker, MetricsRecorder, Row
from scalewise.training.callbacks.pruning import Pruning
from scalewise.training.callbacks.rank_process import RankProcess
from scalewise.training.device_setup import RankInfo
from scalewise.training.fp16_precision import FP16Precision
from scalewise.training.import_class import instantiate_callbacks

logger = logging.getLogger(__name__)

WARM_UP_FRACTION = 0.1
"""Fraction of the steps excluded from medians, while caches and allocators warm up."""


CHECKPOINT_CONNECTOR = "lightning.pytorch.trainer.connectors.checkpoint_connector"
"""Module that passes the training state of a checkpoint to loops, schedules and callbacks."""


@contextmanager
def restore_errors(checkpoint: Path | None) -> Iterator[None]:
    """Raise ``CheckpointError`` for a training state that Lightning cannot restore."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        frames = (frame for frame, _ in walk_tb(error.__traceback__))
        modules = {frame.f_globals.get("__name__") for frame in frames}
        if checkpoint is None or CHECKPOINT_CONNECTOR not in modules:
            raise
        reason = f"{manifest.TRAINING} cannot be restored: {describe_exception(error)}"
        raise CheckpointError.for_key(
            "resume", checkpoint, reason, manifest.RECOVERY_FIX
        ) from error


def build_trainer(
    run: RunConfig,
    folder: Path,
    rank_info: RankInfo,
    steps: int,
    recorder: MetricsRecorder,
    pruning: Pruning | None = None,
    first_callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Trainer:
    """Build the Lightning Trainer of a run, without Lightning's default callbacks and loggers.

    Args:
        run: Config of the run.
        folder: Run folder.
        rank_info: Rank of this process.
        steps: Training length, in optimizer steps.
        recorder: Callback that records metrics.
        pruning: Callback that stops a trial of a hyperparameter search.
        first_callbacks: Callbacks that run before all others.
        **settings: Trainer arguments that replace the default ones.
    """
    saver, wait_marker = CheckpointSaver(run, folder), DataWaitMarker(recorder)
    callbacks: list[Callback] = [
        RankProcess(run),
        *first_callbacks,
        recorder,
        *instantiate_callbacks(run),
        saver,
        *([pruning] if pruning else []),
        wait_marker,
    ]
    every = run.trainer.validate_every
    timeout = timedelta(seconds=run.launch.collective_timeout)
    has_launcher = launched_world_size() is not None
    is_fp16 = run.precision.compute is FloatFormat.fp16
    defaults: dict[str, Any] = {
        "accelerator": "cuda" if run.hardware.device is DeviceKind.cuda else "cpu",
        "devices": rank_info.local_world_size if run.world_size > 1 else 1,
        "num_nodes": max(1, run.world_size // rank_info.local_world_size),
        "strategy": build_strategy(run.parallelism, run.hardware.device, timeout),
        "precision": None if is_fp16 else run.precision.lightning_precision(),
        # An explicit environment keeps Lightning from detecting a cluster.
        "plugins": [
            TorchElasticEnvironment() if has_launcher else LightningEnvironment(),
            *([FP16Precision(run.hardware.device.value)] if is_fp16 else []),
        ],
        "callbacks": callbacks,
        "max_epochs": -1,
        "max_steps": steps,
        "accumulate_grad_batches": run.accumulation,
        "val_check_interval": every * run.accumulation if every else None,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": -1 if run.trainer.validate_first and not recorder.start_step else 0,
        "use_distributed_sampler": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "default_root_dir": folder,
    }
    trainer = StepHookTrainer(**{**defaults, **settings})
    # STOP handles signals. Lightning's own check is a blocking broadcast before every micro-batch.
    disable_signal_broadcast(trainer)
    if run.trainer.batch_warmup:
        per_step = run.micro_batches_per_step

        def is_validated(micro_batches: int) -> bool:
            step, offset = per_step.locate(micro_batches)
            return every is not None and offset == 0 and step % every == 0

        replace_step_boundaries(trainer, per_step.is_step_end, is_validated)
    return trainer


@contextmanager
def silence_lightning(*, reduces_metrics: bool = True) -> Iterator[None]:
    """Silence warnings of Lightning about settings that scalewise chooses.

    Args:
        reduces_metrics: Whether scalewise reduces logged metrics over ranks. A user-defined module
            reduces its own and receives Lightning's ``sync_dist`` warning.
    """
    names = ("lightning.pytorch", "lightning.fabric", "lightning_utilities")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Samples come from a memory map, so that workers are not needed; validation may be off;
        # Lightning uses a deprecated name of torch's pytree; scalewise starts the Slurm tasks;
        # hardware=cpu trains on the CPU of a machine with GPUs; TorchInductor
        # suggests TF32, which precision.tf32 turns on.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        if reduces_metrics:
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
        warnings.filterwarnings("ignore", message=".*but have no `val_dataloader`.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*`srun` command is available.*")
        warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def log_notes(notes: Sequence[str]) -> None:
    """Log notes on the data of a run."""
    for note in notes:
        logger.warning(note)


def write_summary(
    run: RunConfig,
    folder: Path,
    rows: list[Row],
    initial_validation: Row,
    session: NullSession,
    notes: Sequence[str],
    parameters: int | None = None,
) -> None:
    """Write ``summary.json`` and log it to W&B, if the run has taken a step."""
    if rows:
        summary = build_summary(run, rows, initial_validation, notes, parameters)
        goodput = compute_goodput(read_attempts(folder))
        if goodput is not None and goodput.attempts > 1:
            summary["goodput"] = goodput.as_dict()
        write_json(folder / "summary.json", summary)
        session.log_summary(summary)


def build_summary(
    run: RunConfig,
    rows: list[Row],
    initial_validation: Row,
    notes: Sequence[str] = (),
    parameters: int | None = None,
) -> dict[str, object]:
    """Content of ``summary.json``: first and last losses, median times and throughputs, memory.

    Args:
        run: Config of the run.
        rows: Metrics of each optimizer step.
        initial_validation: Validation metrics before the first step.
        notes: Notes on the data.
        parameters: Number of parameters of a user-defined module; None: that of ``run.model``.
    """
    steps = rows[-1]["step"]
    # Steps of equal tokens have comparable times; earlier stages of a warm-up have others.
    last_tokens = run.tokens_in_step.at(steps - 1)
    window = [row for row in rows if run.tokens_in_step.at(row["step"] - 1) == last_tokens]
    window = window[int(len(window) * WARM_UP_FRACTION) :]
    metrics: dict[str, object] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if row.get(key) is not None]
        if not values:
            metrics[key] = None
        elif key.startswith(("throughput/", "time/")):
            window_values = [row[key] for row in window if row.get(key) is not None]
            metrics[key] = median(window_values) if window_values else None
        else:
            metrics[key] = values[-1]
    metrics["train/loss_first"] = rows[0]["train/loss"]
    metrics |= {f"{key}_first": value for key, value in initial_validation.items()}
    metrics |= predicted_metrics(run)
    metrics["price/dollars_per_billion_tokens"] = dollars_per_billion_tokens(
        run, cast(float | None, metrics.get("throughput/tokens_per_s"))
    )
    return {
        "parameters": run.model.num_parameters if parameters is None else parameters,
        "steps": steps,
        "tokens": run.tokens_in_step.before(steps),
        "flops_per_token": run.flops_per_token if parameters is None else None,
        "global_batch": run.global_batch,
        "sequence": run.data.sequence,
        "window": f"median of steps {window[0]['step']}-{steps}",
        "notes": list(notes),
        "metrics": metrics,
    }
