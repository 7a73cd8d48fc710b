"""Ends a trial of a search early where its study says so: all ranks after the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.console import print_lines
from scalewise.errors import Pruned
from scalewise.hpo.storage import TrialLink
from scalewise.training.callbacks.metrics_recorder import MetricsRecorder

if TYPE_CHECKING:
    from optuna.trial import Trial


class Pruning(Callback):
    """Reports one metric to the study of a trial, and stops where rank 0 is told to.

    Stands behind the recorder, whose rows are the same on every rank: so all ranks know when a
    value is new, and only then wait for the answer of rank 0.
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
        """Looks when a window has ended."""
        self._report_new_values(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at the held-out loss."""
        self._report_new_values(trainer, pl_module)

    def _report_new_values(self, trainer: Trainer, module: LightningModule) -> None:
        new = self._recorder.rows[self._num_seen :]
        self._num_seen = len(self._recorder.rows)
        known = [
            (row["step"], float(row[self._metric]))
            for row in new
            if row.get(self._metric) is not None
        ]
        if not known or trainer.global_step >= trainer.max_steps:  # the last step is the end anyway
            return
        stop = self._monitor is not None and self._monitor.should_prune(known)
        told = torch.tensor(int(stop), device=module.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(told, 0)
        if told.item():
            self.pruned_at = trainer.global_step
            trainer.should_stop = True

    def raise_if_pruned(self) -> None:
        """Raises ``Pruned`` where the training ended for this."""
        if self.pruned_at is not None:
            reason = f"the study stopped it after step {self.pruned_at}, by its {self._metric}"
            raise Pruned(reason)


class PruningMonitor:
    """Reports to the study in its storage and asks its pruner.

    A study that cannot be reached costs a line and the pruning, never the training.
    """

    def __init__(self, link: TrialLink) -> None:
        self._link = link
        self._trial: Trial | None = None

    def should_prune(self, values: Sequence[tuple[int, float]]) -> bool:
        """Returns whether to end, given what was measured since it was last asked, by step."""
        try:
            trial = self._trial = self._trial or self._open_trial(first_step=values[0][0])
            for step, value in values:
                trial.report(value, step)
            return bool(trial.should_prune())
        except Exception as error:  # a file system, a lock, a database: each its own kind
            print_lines(f"the study cannot be asked: {error}")
            return False

    def _open_trial(self, first_step: int) -> Trial:
        import optuna

        from scalewise.hpo import storage

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        kept = storage.open_storage(self._link.storage)
        study = optuna.load_study(
            study_name=self._link.study,
            storage=kept,
            sampler=optuna.samplers.RandomSampler(),  # it draws nothing here
            pruner=storage.build_pruner(self._link.pruner, first_step),
        )
        known = kept.get_trial_id_from_study_id_trial_number(study._study_id, self._link.trial)
        return optuna.trial.Trial(study, known)
