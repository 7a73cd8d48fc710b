"""A LightningModule and a LightningDataModule of the user's, trained as they are."""

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

from scalewise.checkpoints import store
from scalewise.data.user_datamodule import UserDataModule
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hpo.storage import read_trial_link
from scalewise.objectives import UserModule
from scalewise.run_config import RunConfig
from scalewise.tracking.metric_names import METRICS
from scalewise.tracking.run_files import MetricsFile, write_json
from scalewise.tracking.wandb_session import NullSession
from scalewise.training import import_class
from scalewise.training.callbacks.dataloader_state import DataLoaderState
from scalewise.training.callbacks.metrics_recorder import MetricsRecorder, Row, trainer_strategy
from scalewise.training.callbacks.progress_display import ProgressDisplay
from scalewise.training.callbacks.pruning import Pruning
from scalewise.training.fit import (
    RankInfo,
    build_trainer,
    print_notes,
    silence_lightning,
    write_summary,
)
from scalewise.training.sharded_sampler import shard_dataloaders
from scalewise.training.signal_stop import STOP

LOGGED = "logged"
"""The folder, in a run's own, of what a module logs by names of its own."""

Classes = tuple[type[LightningModule], type[LightningDataModule] | None]


def import_classes(run: RunConfig) -> Classes:
    """Returns the classes of a run's module and data; raises ``ConfigError`` with all complaints.

    None: the module has loaders of its own.
    """
    objective, data, issues = run.objective, run.data, list[ConfigIssue]()
    assert isinstance(objective, UserModule)
    assert isinstance(data, UserDataModule)
    found: dict[str, Any] = {"data": None}
    for group, spec, kind in (
        ("objective", objective, LightningModule),
        ("data", data, LightningDataModule),
    ):
        if not spec.target:
            continue
        try:
            found[group] = import_class.import_class(
                f"{group}.target", spec.target, kind, run.trusted_packages
            )
            import_class.check_arguments(f"{group}.arguments", found[group], spec.arguments)
        except ConfigError as error:
            issues += error.issues
    module = found.get("objective")
    if not data.target and module and module.train_dataloader is LightningModule.train_dataloader:
        reason = "is not given, and the module has no train_dataloader of its own"
        issues.append(ConfigIssue("data.target", "''", reason, "set data.target=mypkg.MyData"))
    if issues:
        raise ConfigError(issues)
    return found["objective"], found["data"]


def build_user_module(run: RunConfig) -> tuple[LightningModule, LightningDataModule | None]:
    """Returns a run's module and data, as ``seed_everything`` and their constructors make them."""
    module, data = import_classes(run)
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
    """Trains a user's module as ``fit`` does the suite's."""
    start = store.verify_checkpoint(resume) if resume else 0
    files: list[MetricsFile] = []
    terminals: list[ProgressDisplay] = []

    def begun(run: RunConfig, steps: int) -> None:
        """Begins to write and to tell, on rank 0: by now the steps and their rows are known."""
        plan = {"steps": steps}
        write_json(folder / "plan.json", plan)
        session.log_plan(plan)
        print_notes(notes)
        earlier = resume.parents[1] / "metrics.csv" if resume else None
        files.append(MetricsFile(folder / "metrics.csv", after_step=start, earlier=earlier))
        terminals.append(ProgressDisplay(run, steps, start))
        recorder.sinks += [
            lambda rows: files[0].append(map(known_metrics, rows)),
            session.log,
            terminals[0],
        ]

    recorder = UserMetricsRecorder(run, start, begun)
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
            [DataLoaderState()],
            max_epochs=-1 if epochs is None else int(epochs),
            gradient_clip_val=run.trainer.clip_norm,
            use_distributed_sampler=True,
            logger=CSVLogger(folder, name="", version=LOGGED),
            log_every_n_steps=run.trainer.log_every,
        )
        trainer_strategy(trainer).prepare_user_module(run, module)
        layout = run.parallelism
        assert isinstance(run.data, UserDataModule)
        rank, ranks = layout.data_parallel_rank(rank_info.rank), layout.data_parallel_size
        notes = shard_dataloaders(trainer, rank, ranks, streams=run.data.split_iterable)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=str(resume) if resume else None)
            if resume and trainer.global_step == start and rank_info.rank == 0:
                begun(run, start)
                store.adopt_checkpoint(resume, folder / "checkpoints")
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
    """Takes from a user's module what the suite's own tells: loss, norm, rows of a step."""

    def __init__(
        self, run: RunConfig, start_step: int, on_first_batch: Callable[[RunConfig, int], None]
    ) -> None:
        """``on_first_batch`` is called by rank 0 at the first batch, with the run and its steps."""
        super().__init__(run, start_step, [])
        self._on_first_batch: Callable[[RunConfig, int], None] | None = on_first_batch
        self._num_batches = 0
        self._grad_norm = torch.zeros(())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock, and refuses what cannot be followed step by step."""
        super().on_train_start(trainer, pl_module)
        if (optimizers := len(trainer.optimizers)) != 1:
            raise self._unsupported_error(
                f"has {optimizers} optimizers; a run follows the steps of one"
            )
        limit = self.run.trainer.clip_norm
        if limit is not None and not pl_module.automatic_optimization:
            reason, fix = (
                "a module that steps by itself clips by itself",
                "set trainer.clip_norm=null",
            )
            raise ConfigError.for_key("trainer.clip_norm", limit, reason, fix)
        steps = trainer.estimated_stepping_batches
        if isinf(steps):
            reason, fix = "the loader has no length to count epochs by", "set trainer.max_steps"
            raise ConfigError.for_key(
                "trainer.max_epochs", self.run.trainer.max_epochs, reason, fix
            )
        trainer.fit_loop.epoch_loop.max_steps = int(steps)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Learns at the first batch how many rows one has."""
        if self._on_first_batch is not None:
            settings = replace(self.run.trainer, micro_batch=batch_rows(batch))
            self.run = replace(self.run, trainer=settings)
            if trainer.is_global_zero:
                self._on_first_batch(self.run, trainer.max_steps)
            self._on_first_batch = None
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Keeps the norm before Lightning clips."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self._grad_norm = trainer_strategy(trainer).clip_grad_norm(pl_module, None).detach()

    def get_loss_and_norm(
        self, module: LightningModule, outputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss that the training step returned, and the norm of the gradient.

        Every batch is a step.
        """
        self._num_batches += 1
        if module.trainer.global_step != self.start_step + self._num_batches:
            raise self._unsupported_error(
                "does not take one optimizer step a batch, which a run goes by"
            )
        if "loss" not in (outputs or {}):
            raise self._unsupported_error("returns no loss from training_step")
        return outputs["loss"].detach().view(-1), self._grad_norm

    def flush(self, trainer: Trainer, last_row: Row | None = None) -> None:
        """Hands on what the module logs by names of its own as well."""
        logged = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name not in METRICS
        }
        super().flush(trainer, {**logged, **(last_row or {})})

    def flops_metrics(self, seconds: float) -> Row:
        """Returns nothing: nobody has counted what a user's module computes."""
        return {}

    def _unsupported_error(self, reason: str) -> ConfigError:
        assert isinstance(self.run.objective, UserModule)
        return ConfigError.for_key("objective.target", self.run.objective.target, reason)


def known_metrics(row: Row) -> Row:
    """Returns what of a row has a column; what the module logs by other names is in ``logged/``."""
    return {name: value for name, value in row.items() if name in METRICS}


def batch_rows(batch: Any) -> int:
    """Returns the rows of a batch: the first size of its first tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*infer the `batch_size`.*")
        try:
            return extract_batch_size(batch)
        except MisconfigurationException:  # there is no tensor in it
            return 1
