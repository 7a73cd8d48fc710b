"""Pruning of a trial of a hyperparameter search: all ranks stop after the same step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.compat.optuna_submitit import study_id
from scalewise.errors import Pruned
from scalewise.hpo import storage
from scalewise.hpo.storage import TrialLink
from scalewise.training.callbacks.metrics_recorder import MetricsRecorder

if TYPE_CHECKING:
    from optuna.trial import Trial

logger = logging.getLogger(__name__)


class Pruning(Callback):
    """Report one metric to the Optuna study, and stop the run if its pruner decides so.

    This callback follows the recorder, whose rows are the same on every rank. So every rank
    detects a new value by itself, and only then receives the decision of rank 0.

    Args:
        link: Study and trial of the run.
        recorder: Source of the metric.
        rank: Global rank; only rank 0 accesses the study.
    """

    def __init__(self, link: TrialLink, recorder: MetricsRecorder, rank: int) -> None:
        self._metric, self._recorder = link.metric, recorder
        self._num_seen = 0
        self._monitor = PruningMonitor(link) if rank == 0 else None
        self.pruned_at: int | None = None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report new values after a log interval."""
        self._report_new_values(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report new values after a validation."""
        self._report_new_values(trainer, pl_module)

    def _report_new_values(self, trainer: Trainer, module: LightningModule) -> None:
        new = self._recorder.rows[self._num_seen :]
        self._num_seen = len(self._recorder.rows)
        values = [
            (row["step"], float(row[self._metric]))
            for row in new
            if row.get(self._metric) is not None
        ]
        if not values or trainer.global_step >= trainer.max_steps:
            return
        stop = self._monitor is not None and self._monitor.should_prune(values)
        decision = torch.tensor(int(stop), device=module.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(decision, 0)
        if decision.item():
            self.pruned_at = trainer.global_step
            trainer.should_stop = True

    def raise_if_pruned(self) -> None:
        """Raise ``Pruned`` if the pruner has stopped the run."""
        if self.pruned_at is not None:
            reason = f"the study pruned the trial after step {self.pruned_at}, by {self._metric}"
            raise Pruned(reason)


class PruningMonitor:
    """Connection of a trial to the storage and the pruner of its study.

    If the storage cannot be reached, a message is printed and the run continues without pruning.
    """

    def __init__(self, link: TrialLink) -> None:
        self._link = link
        self._trial: Trial | None = None

    def should_prune(self, values: Sequence[tuple[int, float]]) -> bool:
        """Whether the pruner stops the trial, given the new values as (step, value)."""
        try:
            trial = self._trial = self._trial or self._open_trial(first_step=values[0][0])
            for step, value in values:
                trial.report(value, step)
            return bool(trial.should_prune())
        except Exception as error:  # file system, lock and database errors have no common class
            logger.info(f"cannot reach the study; the run continues without pruning: {error}")
            return False

    def _open_trial(self, first_step: int) -> Trial:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study_storage = storage.open_storage(self._link.storage)
        study = optuna.load_study(
            study_name=self._link.study,
            storage=study_storage,
            sampler=optuna.samplers.RandomSampler(),  # nothing is sampled here
            pruner=storage.build_pruner(self._link.pruner, first_step),
        )
        trial_id = study_storage.get_trial_id_from_study_id_trial_number(
            study_id(study), self._link.trial
        )
        return optuna.trial.Trial(study, trial_id)
