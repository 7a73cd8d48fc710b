"""Training of one run in this process: build a Lightning Trainer, fit, write the summary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning.pytorch import Callback

from scalewise.checkpoints import manifest, trained_run
from scalewise.data.dataloader import BatchShare, MicroBatches, TrainLoader, ValidationLoader
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.hardware import DeviceKind
from scalewise.hpo.storage import read_trial_link
from scalewise.planner.plan import padding_notes, plan_record
from scalewise.run_config import RunConfig
from scalewise.run_files import MetricsFile, read_json, write_json
from scalewise.tracking.wandb_session import NullSession
from scalewise.training.callbacks.attempt_recorder import AttemptRecorder
from scalewise.training.callbacks.metrics_recorder import MetricsRecorder, Row
from scalewise.training.callbacks.progress_display import ProgressDisplay
from scalewise.training.callbacks.pruning import Pruning
from scalewise.training.callbacks.reference_logprobs import ReferenceLogProbs
from scalewise.training.device_setup import RankInfo, set_device
from scalewise.training.lightning_module import TrainingModule
from scalewise.training.signal_stop import STOP
from scalewise.training.trainer import (
    build_trainer,
    log_notes,
    restore_errors,
    silence_lightning,
    write_summary,
)
from scalewise.training.user_module import fit_user_module

COST_PREFIXES = ("memory/", "throughput/", "time/")
"""Prefixes of the metrics that depend on the strategy and the machine, not on the training."""


def fit_run(
    run: RunConfig, folder: Path, rank_info: RankInfo, resume: Path | None, session: NullSession
) -> None:
    """Train ``run`` in this process, which is one of its ranks.

    Rank 0 writes ``metrics.csv`` and ``summary.json``; all ranks write checkpoints.

    Args:
        run: Config of the run.
        folder: Run folder.
        rank_info: Rank of this process.
        resume: Checkpoint folder to resume from.
        session: W&B session that receives plan, metrics and summary.

    Raises:
        Interrupted: a signal stopped the run. Exceptions of the training are not caught.
    """
    set_device(run, rank_info)
    if run.objective.is_user_defined:
        fit_user_module(run, folder, rank_info, resume, session)
        return
    splits = prepare_splits(run.data, run.model.vocabulary, run.seed)
    steps = run.num_steps(len(splits.train))
    start = manifest.step_of(resume) if resume else 0
    if resume:
        trained_run.check_tokenizer(splits, resume.parents[1])
    if rank_info.rank == 0:
        trained_run.save_tokenizer(splits, folder)
        log_notes(notes := [*splits.note.splitlines(), *padding_notes(run, splits)])
    module = TrainingModule(run, steps, [*splits.validation_sources])
    recorder = MetricsRecorder(run, start, [], getattr(splits.train, "fill_ratio", 1.0))
    first_callbacks: list[Callback] = []
    terminal = ProgressDisplay(run, steps, start) if rank_info.rank == 0 else None
    if terminal:
        plan = {"steps": steps, **plan_record(run)}
        resumed_plan = read_json(resume.parents[1] / "plan.json") if resume else {}
        write_json(folder / "plan.json", plan)
        same_plan = {**resumed_plan, "steps": steps} == read_json(folder / "plan.json")
        session.log_plan(plan)
        file = MetricsFile(
            folder / "metrics.csv",
            after_step=start,
            earlier=resume.parents[1] / "metrics.csv" if resume else None,
            sources=splits.validation_sources,
        )
        attempts = AttemptRecorder(folder, resume, start, run.tokens_in_step)
        recorder.sinks += [file.append, session.log, terminal, attempts]
        first_callbacks.append(attempts)
    loaders = _build_loaders(run, splits, rank_info, steps, start)
    with silence_lightning():
        link = read_trial_link(folder)
        pruning = Pruning(link, recorder, rank_info.rank) if link else None
        if run.objective.reference_objective is not None and not run.runs_reference_forward:
            real_loaders = [it for it in loaders if isinstance(it, MicroBatches)]
            first_callbacks.append(ReferenceLogProbs(run, real_loaders))
        trainer = build_trainer(run, folder, rank_info, steps, recorder, pruning, first_callbacks)
        try:
            with restore_errors(resume):
                trainer.fit(module, *loaders, ckpt_path=str(resume) if resume else None)
            if resume and start == steps and rank_info.rank == 0:
                manifest.adopt_checkpoint(resume, folder / "checkpoints")
            if pruning:
                pruning.raise_if_pruned()
        finally:
            STOP.unblock_signals()
            if terminal:
                terminal.close()
                earlier = (
                    file.earlier_rows if same_plan else [*map(drop_cost_metrics, file.earlier_rows)]
                )
                rows = [*earlier, *recorder.rows]
                write_summary(run, folder, rows, recorder.initial_validation, session, notes)


def drop_cost_metrics(row: Row) -> Row:
    """Metrics of a step without memory, throughput and time.

    A run that resumes with another strategy has other costs.
    """
    return {key: row[key] for key in row if not key.startswith(COST_PREFIXES)}


def _build_loaders(
    run: RunConfig, splits: DataSplits, rank_info: RankInfo, steps: int, start: int
) -> tuple[TrainLoader, ValidationLoader | list[ValidationLoader] | None]:
    """Loaders of both splits; for a mixture, a validation loader of each source."""
    dp_size = run.parallelism.data_parallel_size
    dp_rank = run.parallelism.data_parallel_rank(rank_info.rank)
    batch_share = BatchShare(
        run.global_batch,
        run.micro_batch,
        dp_rank,
        dp_size,
        run.samples_per_step.stages,
        run.sequence_per_step if run.trainer.sequence_warmup else None,
    )
    pin_memory = run.hardware.device is DeviceKind.cuda
    train = TrainLoader(
        splits.train,
        batch_share,
        seed=run.seed,
        steps=steps,
        start=run.micro_batches_per_step.before(start),
        pin_memory=pin_memory,
    )
    if splits.validation is None or run.trainer.validate_every is None:
        return train, None
    validation_share = replace(
        batch_share,
        global_batch=run.trainer.validation_rows,
        warmup=(),
        sequence_per_step=None,
    )
    if splits.validation_sources:
        return train, [
            ValidationLoader(dataset, validation_share, pin_memory=pin_memory)
            for dataset in splits.validation_sources.values()
        ]
    return train, ValidationLoader(splits.validation, validation_share, pin_memory=pin_memory)
