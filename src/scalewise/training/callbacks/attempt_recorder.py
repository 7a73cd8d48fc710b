"""Recording of the times of an attempt at a run, from which its goodput is computed."""

from __future__ import annotations

import time
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise import goodput
from scalewise.goodput import ATTEMPTS_FILE, AttemptProgress
from scalewise.run_files import copy_file, parse_time, read_json
from scalewise.step_counts import StepCounts
from scalewise.training.callbacks.checkpointing import CheckpointSaver
from scalewise.training.callbacks.metrics_recorder import Row


class AttemptRecorder(Callback):
    """Append the progress of this attempt to ``attempts.jsonl``; on rank 0, as a metrics sink.

    Args:
        folder: Run folder.
        resume: Checkpoint from which the attempt resumes; the attempts at its run come first.
        start_step: Step of that checkpoint; 0: from scratch.
        tokens_in_step: Tokens of each step over all ranks.
    """

    def __init__(
        self, folder: Path, resume: Path | None, start_step: int, tokens_in_step: StepCounts
    ) -> None:
        self._tokens_in_step = tokens_in_step
        self._num_first_batch, self._first_batch_s = 0, 0.0
        self._folder, self._start_step, self._step = folder, start_step, start_step
        self._started = self._trained = time.time()
        if not (folder / ATTEMPTS_FILE).exists():
            self._started = _job_start(folder) or self._started
            if resume and (earlier := resume.parents[1] / ATTEMPTS_FILE).exists():
                copy_file(earlier, folder / ATTEMPTS_FILE)
        self._steps_s = self._first_step_s = self._validation_s = 0.0
        self._validation_start = 0.0
        self._saver: CheckpointSaver | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the start of the first step."""
        self._trained = time.time()
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        self._saver = next(it for it in callbacks if isinstance(it, CheckpointSaver))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the start of a validation."""
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the time of a validation; one before the first step is part of the start."""
        if not trainer.sanity_checking:
            self._validation_s += time.perf_counter() - self._validation_start

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the progress at the end, after the last checkpoint."""
        self.write()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Record the progress before an error."""
        self.write()

    def __call__(self, rows: list[Row]) -> None:
        """Add the steps of a log interval and record the progress."""
        if self._step == self._start_step:
            self._first_step_s = rows[0]["time/step_s"]
        first_batch = self._tokens_in_step.at(self._start_step)
        for row in rows:
            if self._tokens_in_step.at(row["step"] - 1) == first_batch:
                self._num_first_batch += 1
                self._first_batch_s += row["time/step_s"]
        self._step = rows[-1]["step"]
        self._steps_s += sum(row["time/step_s"] for row in rows)
        self.write()

    def write(self) -> None:
        """Append a line, if the attempt has taken a step."""
        if self._step == self._start_step:
            return
        progress = AttemptProgress(
            started=self._started,
            trained=self._trained,
            recorded=time.time(),
            start_step=self._start_step,
            step=self._step,
            steps_s=self._steps_s,
            first_step_s=self._first_step_s,
            validation_s=self._validation_s,
            checkpoint_s=self._saver.seconds if self._saver else 0.0,
            first_batch_steps=self._num_first_batch,
            first_batch_s=self._first_batch_s,
        )
        goodput.append_progress(self._folder, progress)


def _job_start(folder: Path) -> float | None:
    """Start of the first attempt at a job, in seconds since 1970; None if it is not recorded."""
    start = parse_time(read_json(folder / "status.json").get("started"))
    return None if start is None else start.timestamp()
