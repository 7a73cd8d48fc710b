"""From a Run to a trained model in this process: assemble a Lightning Trainer, fit, sum up."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, Trainer

from scalewise.checkpoints import store
from scalewise.console import print_lines
from scalewise.data import padding, run_tokenizer
from scalewise.data.base import DataSplits
from scalewise.data.dataloader import BatchShare, TrainLoader, ValidationLoader
from scalewise.hardware import DeviceKind, launched_world_size
from scalewise.hpo.storage import read_trial_link
from scalewise.planner.plan import dollars_per_billion_tokens, plan_record, predicted_metrics
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import MetricsFile, read_json, write_json
from scalewise.tracking.wandb_session import NullSession
from scalewise.training.callbacks.checkpointing import CheckpointSaver
from scalewise.training.callbacks.instantiate import instantiate_callbacks
from scalewise.training.callbacks.metrics_recorder import DataWaitMarker, MetricsRecorder, Row
from scalewise.training.callbacks.progress_display import ProgressDisplay
from scalewise.training.callbacks.pruning import Pruning
from scalewise.training.callbacks.reference_logprobs import ReferenceLogProbs
from scalewise.training.lightning_module import TrainingModule
from scalewise.training.signal_stop import STOP
from scalewise.units import GIB

WARM_UP_SHARE = 0.1
"""Share of the steps left out of the medians: caches fill and allocators settle there."""
COSTS = ("memory/", "throughput/", "time/")
"""Metrics that tell of a layout and a machine, and not of what is learnt."""


@dataclass(frozen=True)
class RankInfo:
    """Where this process stands among the ranks."""

    rank: int
    local_rank: int
    local_world_size: int


def fit_run(
    run: RunConfig, folder: Path, rank_info: RankInfo, resume: Path | None, session: NullSession
) -> None:
    """Trains ``run`` in this process, one of its ranks; rank 0 writes into ``folder``.

    ``resume`` is a checkpoint folder. Leaves ``metrics.csv``, ``summary.json`` and checkpoints.
    Raises what ended the training otherwise, ``Interrupted`` for a signal.
    """
    set_device(run, rank_info)
    if run.objective.is_user_defined:
        from scalewise.training.user_module import fit_user_module

        fit_user_module(run, folder, rank_info, resume, session)
        return
    splits = run.data.prepare(run.model.vocabulary, run.seed)
    steps = run.num_steps(len(splits.train))
    start = store.verify_checkpoint(resume) if resume else 0
    if resume:
        run_tokenizer.check_tokenizer(splits, resume.parents[1])
    if rank_info.rank == 0:
        run_tokenizer.save_tokenizer(splits, folder)
        print_notes(notes := [*splits.note.splitlines(), *padding.padding_notes(run, splits)])
    module = TrainingModule(run, steps)
    recorder = MetricsRecorder(run, start, [], getattr(splits.train, "fill_ratio", 1.0))
    terminal = ProgressDisplay(run, steps, start) if rank_info.rank == 0 else None
    if terminal:
        plan = {"steps": steps, **plan_record(run)}
        before = read_json(resume.parents[1] / "plan.json") if resume else {}
        write_json(folder / "plan.json", plan)
        as_before = {**before, "steps": steps} == read_json(folder / "plan.json")
        session.log_plan(plan)
        file = MetricsFile(
            folder / "metrics.csv",
            after_step=start,
            earlier=resume.parents[1] / "metrics.csv" if resume else None,
        )
        recorder.sinks += [file.append, session.log, terminal]
    loaders = _build_loaders(run, splits, rank_info, steps, start)
    with silence_lightning():
        link = read_trial_link(folder)
        pruning = Pruning(link, recorder, rank_info.rank) if link else None
        first = []
        if run.objective.reference_objective is not None and not run.runs_reference_forward:
            first = [ReferenceLogProbs(run, [loader for loader in loaders if loader is not None])]
        trainer = build_trainer(run, folder, rank_info, steps, recorder, pruning, first)
        try:
            trainer.fit(module, *loaders, ckpt_path=str(resume) if resume else None)
            if resume and start == steps and rank_info.rank == 0:
                store.adopt_checkpoint(resume, folder / "checkpoints")
            if pruning:
                pruning.raise_if_pruned()
        finally:
            STOP.unblock_signals()
            if terminal:
                terminal.close()
                earlier = (
                    file.earlier_rows if as_before else [*map(drop_cost_metrics, file.earlier_rows)]
                )
                rows = [*earlier, *recorder.rows]
                write_summary(run, folder, rows, recorder.initial_validation, session, notes)


def print_notes(notes: Sequence[str]) -> None:
    """Prints what the user should know of the data of a run."""
    if notes:
        print_lines(*notes, stderr=True)


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
    """Returns the Lightning Trainer of a run, with nothing in it that the run does not name.

    ``settings`` go before its own.
    """
    saver, waiting = CheckpointSaver(run, folder), DataWaitMarker(recorder)
    last = [pruning] if pruning else []
    callbacks: list[Callback] = [
        *first_callbacks,
        recorder,
        *instantiate_callbacks(run),
        saver,
        *last,
        waiting,
    ]
    every = run.trainer.validate_every
    ranked = (
        launched_world_size() is not None
    )  # said, or Lightning would look for a cluster by itself
    own: dict[str, Any] = {
        "accelerator": "cuda" if run.hardware.device is DeviceKind.cuda else "cpu",
        "devices": rank_info.local_world_size if run.world_size > 1 else 1,
        "num_nodes": max(1, run.world_size // rank_info.local_world_size),
        "strategy": run.parallelism.build_strategy(run.hardware.device),
        "precision": run.precision.lightning_precision(),
        "plugins": [TorchElasticEnvironment() if ranked else LightningEnvironment()],
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
    trainer = Trainer(**{**own, **settings})
    # Signals are STOP's. Lightning would ask rank 0 about them before every micro batch, and wait
    # for the answer: a message on the CPU, an empty queue on CUDA.
    loop = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]  # no public way
    return trainer


def write_summary(
    run: RunConfig,
    folder: Path,
    rows: list[Row],
    initial_validation: Row,
    session: NullSession,
    notes: Sequence[str],
    parameters: int | None = None,
) -> None:
    """Writes ``summary.json`` and tells the tracker, where a step was taken."""
    if rows:
        summary = build_summary(run, rows, initial_validation, notes, parameters)
        write_json(folder / "summary.json", summary)
        session.log_summary(summary)


def drop_cost_metrics(row: Row) -> Row:
    """Returns a step without what it cost: another layout's are not those of this run."""
    return {key: row[key] for key in row if not key.startswith(COSTS)}


def build_summary(
    run: RunConfig,
    rows: list[Row],
    initial_validation: Row,
    notes: Sequence[str] = (),
    parameters: int | None = None,
) -> dict[str, object]:
    """Returns ``summary.json``: first and final losses, medians of times and rates, memory.

    ``notes`` are those about the data; ``parameters`` are those of a user's module.
    """
    steps = rows[-1]["step"]
    first = int(len(rows) * WARM_UP_SHARE)
    window = rows[first:]
    metrics: dict[str, object] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        known = [row[key] for row in rows if row.get(key) is not None]
        if not known:
            metrics[key] = None
        elif key.startswith(("throughput/", "time/")):
            timed = [row[key] for row in window if row.get(key) is not None]
            metrics[key] = median(timed) if timed else None
        else:
            metrics[key] = known[-1]
    metrics["train/loss_first"] = rows[0]["train/loss"]
    metrics |= {f"{key}_first": value for key, value in initial_validation.items()}
    metrics |= predicted_metrics(run)
    metrics["price/dollars_per_billion_tokens"] = dollars_per_billion_tokens(
        run, cast(float | None, metrics.get("throughput/tokens_per_s"))
    )
    return {
        "parameters": run.model.num_parameters if parameters is None else parameters,
        "steps": steps,
        "tokens": steps * run.tokens_per_step,
        "flops_per_token": run.flops_per_token if parameters is None else None,
        "global_batch": run.global_batch,
        "sequence": run.data.sequence,
        "window": f"median of steps {window[0]['step']}-{steps}",
        "notes": list(notes),
        "metrics": metrics,
    }


def _build_loaders(
    run: RunConfig, splits: DataSplits, rank_info: RankInfo, steps: int, start: int
) -> tuple[TrainLoader, ValidationLoader | None]:
    ranks = run.parallelism.data_parallel_size
    own = run.parallelism.data_parallel_rank(rank_info.rank)
    share = BatchShare(run.global_batch, run.micro_batch, own, ranks)
    pinned = run.hardware.device is DeviceKind.cuda
    train = TrainLoader(
        splits.train,
        share,
        seed=run.seed,
        steps=steps,
        start=start * run.accumulation,
        pin_memory=pinned,
    )
    if splits.validation is None or run.trainer.validate_every is None:
        return train, None
    held_out = replace(share, global_batch=run.trainer.validation_rows)
    return train, ValidationLoader(splits.validation, held_out, pin_memory=pinned)


def set_device(run: RunConfig, rank_info: RankInfo) -> None:
    """Makes this process compute where the run says, on its share of the processor."""
    run.precision.set_matmul_precision()
    if run.hardware.device is DeviceKind.cuda:
        torch.cuda.set_device(rank_info.local_rank)
        if (limit := run.launch.memory_limit_gib) is not None:
            whole = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit * GIB / whole))
    elif run.world_size > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // rank_info.local_world_size))


@contextmanager
def silence_lightning(*, reduces_metrics: bool = True) -> Iterator[None]:
    """Keeps Lightning's tips out: they advise on what this suite decides itself.

    ``reduces_metrics``: whether what is logged is summed over ranks by the suite, and not by a
    user's module.
    """
    names = ("lightning.pytorch", "lightning.fabric", "lightning_utilities")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Rows are gathered from a memory map in this process; validation may be off; torch's
        # pytree renamed what Lightning still calls by its old name; srun is never Lightning's.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        if reduces_metrics:
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
        warnings.filterwarnings("ignore", message=".*but have no `val_dataloader`.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*`srun` command is available.*")
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
