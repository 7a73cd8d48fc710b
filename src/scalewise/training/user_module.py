"""Training of a user-defined LightningModule and LightningDataModule, without changes to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from math import isinf
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.data import extract_batch_size
from torch.optim import Optimizer

from scalewise.checkpoints import manifest
from scalewise.data.user_datamodule import UserDataModule
from scalewise.errors import ConfigError
from scalewise.hpo.storage import read_trial_link
from scalewise.metric_names import METRICS
from scalewise.objectives import UserModule
from scalewise.run_config import RunConfig
from scalewise.run_files import MetricsFile, write_json
from scalewise.tracking.wandb_session import NullSession
from scalewise.training import import_class
from scalewise.training.callbacks.attempt_recorder import AttemptRecorder
from scalewise.training.callbacks.metrics_recorder import MetricsRecorder, Row, trainer_strategy
from scalewise.training.callbacks.progress_display import ProgressDisplay
from scalewise.training.callbacks.pruning import Pruning
from scalewise.training.device_setup import RankInfo
from scalewise.training.signal_stop import STOP
from scalewise.training.trainer import (
    build_trainer,
    log_notes,
    silence_lightning,
    write_summary,
)
from scalewise.training.user_dataloaders import DataLoaderState, shard_dataloaders

LOGGED_FOLDER = "logged"
"""Subfolder of a run folder with the metrics that a module logs under other names."""


def build_user_module(run: RunConfig) -> tuple[LightningModule, LightningDataModule | None]:
    """Construct the module and the data of a run after ``seed_everything``."""
    module, data = import_class.import_user_classes(run)
    objective, source = run.objective, run.data
    assert isinstance(objective, UserModule)
    assert isinstance(source, UserDataModule)
    seed_everything(run.seed, workers=True)
    return (
        import_class.construct("objective.arguments", module, objective.arguments),
        import_class.construct("data.arguments", data, source.arguments) if data else None,
    )


def fit_user_module(
    run: RunConfig, folder: Path, rank_info: RankInfo, resume: Path | None, session: NullSession
) -> None:
    """Train a user-defined module; the arguments are those of ``fit_run``."""
    start = manifest.step_of(resume) if resume else 0
    files: list[MetricsFile] = []
    terminals: list[ProgressDisplay] = []
    attempts: list[AttemptRecorder] = []
    if rank_info.rank == 0:
        attempts = [AttemptRecorder(folder, resume, start, run.tokens_in_step)]

    def open_outputs(run: RunConfig, steps: int) -> None:
        """Write the plan and open the sinks, on rank 0; steps and micro-batch size are known."""
        plan = {"steps": steps}
        write_json(folder / "plan.json", plan)
        session.log_plan(plan)
        log_notes(notes)
        earlier = resume.parents[1] / "metrics.csv" if resume else None
        files.append(MetricsFile(folder / "metrics.csv", after_step=start, earlier=earlier))
        terminals.append(ProgressDisplay(run, steps, start))
        recorder.sinks += [
            lambda rows: files[0].append(map(builtin_metrics, rows)),
            session.log,
            terminals[0],
            *attempts,
        ]

    recorder = UserMetricsRecorder(run, start, open_outputs)
    with silence_lightning(reduces_metrics=False):
        link = read_trial_link(folder)
        pruning = Pruning(link, recorder, rank_info.rank) if link else None
        module, data = build_user_module(run)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        epochs = run.trainer.max_epochs
        trainer = build_trainer(
            run,
            folder,
            rank_info,
            run.trainer.max_steps or -1,
            recorder,
            pruning,
            [*attempts, DataLoaderState()],
            max_epochs=-1 if epochs is None else int(epochs),
            gradient_clip_val=run.trainer.clip_norm,
            use_distributed_sampler=True,
            logger=CSVLogger(folder, name="", version=LOGGED_FOLDER),
            log_every_n_steps=run.trainer.log_every,
        )
        trainer_strategy(trainer).prepare_user_module(run, module)
        assert isinstance(run.data, UserDataModule)
        notes = shard_dataloaders(
            trainer,
            run.parallelism.data_parallel_rank(rank_info.rank),
            run.parallelism.data_parallel_size,
            split_iterable=run.data.split_iterable,
        )
        try:
            trainer.fit(module, datamodule=data, ckpt_path=str(resume) if resume else None)
            if resume and trainer.global_step == start and rank_info.rank == 0:
                open_outputs(run, start)
                manifest.adopt_checkpoint(resume, folder / "checkpoints")
            if pruning:
                pruning.raise_if_pruned()
        finally:
            STOP.unblock_signals()
            for terminal in terminals:
                terminal.close()
                rows = [*files[0].earlier_rows, *recorder.rows]
                write_summary(
                    recorder.run,
                    folder,
                    rows,
                    recorder.initial_validation,
                    session,
                    notes,
                    parameters,
                )


class UserMetricsRecorder(MetricsRecorder):
    """Recorder of the metrics of a user-defined module.

    Args:
        run: Config of the run.
        start_step: Optimizer step from which the run resumes; 0: from scratch.
        on_first_batch: Function that rank 0 calls at the first batch, with the run and its steps.
    """

    def __init__(
        self, run: RunConfig, start_step: int, on_first_batch: Callable[[RunConfig, int], None]
    ) -> None:
        super().__init__(run, start_step, [])
        self._on_first_batch: Callable[[RunConfig, int], None] | None = on_first_batch
        self._num_batches = 0
        self._grad_norm = torch.zeros(())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the step timer, and reject modules whose steps cannot be counted."""
        super().on_train_start(trainer, pl_module)
        if (optimizers := len(trainer.optimizers)) != 1:
            raise self._unsupported_error(
                f"has {optimizers} optimizers; exactly one optimizer is supported"
            )
        limit = self.run.trainer.clip_norm
        if limit is not None and not pl_module.automatic_optimization:
            reason, fix = (
                "requires automatic optimization, which this module disables",
                "set trainer.clip_norm=null",
            )
            raise ConfigError.for_key("trainer.clip_norm", limit, reason, fix)
        steps = trainer.estimated_stepping_batches
        if isinf(steps):
            reason, fix = "requires a data loader with a length", "set trainer.max_steps"
            raise ConfigError.for_key(
                "trainer.max_epochs", self.run.trainer.max_epochs, reason, fix
            )
        trainer.fit_loop.epoch_loop.max_steps = int(steps)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the micro-batch size from the first batch."""
        if self._on_first_batch is not None:
            settings = replace(self.run.trainer, micro_batch=batch_size(batch))
            run = replace(self.run, trainer=settings)
            samples = run.samples_per_forward * trainer.accumulate_grad_batches
            self.run = replace(run, trainer=replace(settings, global_batch=samples))
            if trainer.is_global_zero:
                self._on_first_batch(self.run, trainer.max_steps)
            self._on_first_batch = None
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the gradient norm before Lightning clips it."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        parameters = [*pl_module.parameters()]
        self._grad_norm = trainer_strategy(trainer).clip_grad_norm(parameters, None).detach()

    def get_loss_and_norm(
        self, module: LightningModule, outputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss that ``training_step`` has returned, and the gradient norm.

        Raises:
            ConfigError: the module does not take one optimizer step per batch, or returns no loss.
        """
        self._num_batches += 1
        accumulation = module.trainer.accumulate_grad_batches
        if module.trainer.global_step != self.start_step + self._num_batches // accumulation:
            raise self._unsupported_error(
                "does not take exactly one optimizer step per batch, which is required"
            )
        if "loss" not in (outputs or {}):
            raise self._unsupported_error("returns no loss from training_step")
        # Lightning has divided the loss by the number of accumulated batches.
        return outputs["loss"].detach().view(-1) * accumulation, self._grad_norm

    def flush(self, trainer: Trainer, last_row: Row | None = None) -> None:
        """Flush the metrics together with those that the module logs under other names."""
        logged = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name not in METRICS
        }
        super().flush(trainer, {**logged, **(last_row or {})})

    def flops_metrics(self, tokens: int, seconds: float) -> Row:
        """No metrics: the FLOPs of a user-defined module are unknown."""
        return {}

    def _unsupported_error(self, reason: str) -> ConfigError:
        assert isinstance(self.run.objective, UserModule)
        return ConfigError.for_key("objective.target", self.run.objective.target, reason)


def builtin_metrics(row: Row) -> Row:
    """Metrics with a column in ``metrics.csv``; Lightning logs the other ones in ``logged/``."""
    return {name: value for name, value in row.items() if name in METRICS}


def batch_size(batch: Any) -> int:
    """Number of samples of a batch: the first dimension of its first tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*infer the `batch_size`.*")
        try:
            return extract_batch_size(batch)
        except MisconfigurationException:  # the batch contains no tensor
            return 1
