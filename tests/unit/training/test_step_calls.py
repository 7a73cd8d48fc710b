"""Function calls of a training step, which bound the time of small models."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from scalewise import compose
from scalewise.bench import cpu_cases
from scalewise.compat.lightning_hooks import StepHookTrainer
from scalewise.data.dataloader import Batch, BatchShare, TrainLoader
from scalewise.data.prepare import prepare_splits
from scalewise.run_files import MetricsFile
from scalewise.training.callbacks.metrics_recorder import MetricsRecorder
from scalewise.training.device_setup import RankInfo
from scalewise.training.lightning_module import TrainingModule
from scalewise.training.trainer import build_trainer, silence_lightning

WARM_UP, COUNTED = 10, 20
"""Steps that are not counted, and steps that are: two log intervals."""
MAX_CALLS = 1_900
"""Calls of Python and C functions per step; a hand-written loop makes 1,550, this trainer 1,870."""

DYNAMO_FOLDER = os.path.join("torch", "_dynamo", "")


class CountingLoader:
    """Loader that counts the function calls between its batches."""

    def __init__(self, loader: TrainLoader) -> None:
        self.loader, self.calls = loader, Counter[str]()

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        previous = sys.getprofile()
        for step, batch in enumerate(self.loader):
            if step in (WARM_UP, WARM_UP + COUNTED):
                sys.setprofile(self.count if step == WARM_UP else previous)
            yield batch

    def count(self, frame: FrameType, event: str, argument: object) -> None:
        # The first torch.compile of a process wraps the optimizers' methods for all later ones.
        if DYNAMO_FOLDER not in frame.f_code.co_filename:
            self.calls[event] += 1


def test_function_calls_of_a_step_are_bounded(tmp_path: Path) -> None:
    """The step of the benchmark: 2 layers of width 64, with the default callbacks."""
    (case,) = (case for case in cpu_cases.CASES if case.name == "overhead/scalewise")
    steps = WARM_UP + COUNTED + 2
    run = compose([*case.overrides, f"trainer.max_steps={steps}", "hardware=cpu"])
    splits = prepare_splits(run.data, run.model.vocabulary, run.seed)
    share = BatchShare(run.global_batch, run.micro_batch)
    loader = CountingLoader(TrainLoader(splits.train, share, seed=run.seed, steps=steps))
    recorder = MetricsRecorder(run, 0, [MetricsFile(tmp_path / "metrics.csv").append])
    with silence_lightning():
        trainer = build_trainer(run, tmp_path, RankInfo(0, 0, 1), steps, recorder)
        assert isinstance(trainer, StepHookTrainer)
        trainer.fit(TrainingModule(run, steps), loader)
    assert trainer.global_step == steps
    calls = (loader.calls["call"] + loader.calls["c_call"]) / COUNTED
    assert 1_000 < calls < MAX_CALLS
