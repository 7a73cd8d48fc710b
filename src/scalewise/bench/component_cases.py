"""Cases of single components: data loader, checkpoints and planner."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from scalewise.bench.comparison import MeasuredCase, compare_in_turn, figure
from scalewise.bench.paired_ratio import order_interval
from scalewise.bench.suite import Entry
from scalewise.checkpoints import manifest
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.prepare import TokenDataset, prepare_splits
from scalewise.launch import signals
from scalewise.planner.plan import build_plan
from scalewise.registry import with_fields
from scalewise.run_config import RunConfig
from scalewise.training.callbacks.metrics_recorder import MetricsRecorder, trainer_strategy
from scalewise.training.device_setup import RankInfo, set_device
from scalewise.training.lightning_module import TrainingModule
from scalewise.training.trainer import build_trainer, silence_lightning

MEASURED_TOKENS = 1 << 20
"""Tokens of one measurement of a data loader."""


class _Samples(Dataset[dict[str, torch.Tensor]]):
    """Map-style data set of single samples."""

    def __init__(self, dataset: TokenDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens_S = torch.from_numpy(self._dataset.gather([index])[0].astype("int64"))
        return {"inputs": tokens_S[:-1], "labels": tokens_S[1:]}


@dataclass(frozen=True)
class LoaderCase(MeasuredCase):
    """Time of loading batches next to torch's DataLoader of a map-style data set."""

    pairs: int
    """Number of measurements, each of the same number of batches from both loaders."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Load batches from both loaders in turn; return the ratio of the times."""
        dataset = prepare_splits(run.data, run.model.vocabulary, run.seed).train
        batch_share = BatchShare(run.micro_batch, run.micro_batch)
        loader = iter(TrainLoader(dataset, batch_share, seed=run.seed, steps=1 << 40))
        baseline = _repeat(
            DataLoader(_Samples(dataset), run.micro_batch, shuffle=True, drop_last=True)
        )
        batches = max(1, MEASURED_TOKENS // run.tokens_per_step)
        entry = compare_in_turn(
            self.pairs,
            lambda: _iteration_seconds(baseline, batches),
            lambda: _iteration_seconds(loader, batches),
            "a map-style DataLoader",
        )
        tokens = batches * run.micro_batch * run.data.sequence
        return entry | {"tokens_per_s": tokens / entry["measured_s"]}


def _repeat(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _iteration_seconds(batches: Iterator[Any], count: int) -> float:
    start = time.perf_counter()
    for _ in islice(batches, count):
        pass
    return time.perf_counter() - start


class _CompareSaves(Callback):
    """Compare, after the first step, checkpoints of scalewise with ``torch.save``."""

    def __init__(self, folder: Path, pairs: int) -> None:
        self._folder, self._pairs, self._number = folder, pairs, 0
        self.entry: Entry = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save with both in turn."""
        self._save_with_torch(trainer, pl_module)  # warm-up
        self._save(trainer)
        self.entry = compare_in_turn(
            self._pairs,
            lambda: self._save_with_torch(trainer, pl_module),
            lambda: self._save(trainer),
            "`torch.save` and fsync",
        )

    def _save(self, trainer: Trainer) -> float:
        """Time for which training waits; the writer finishes afterwards."""
        self._number += 1
        path = manifest.checkpoint_path(self._folder / "checkpoints", self._number)
        start = time.perf_counter()
        trainer.save_checkpoint(path)
        seconds = time.perf_counter() - start
        trainer_strategy(trainer).writer.finish()
        shutil.rmtree(path)
        return seconds

    def _save_with_torch(self, trainer: Trainer, module: LightningModule) -> float:
        state = {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
        start = time.perf_counter()
        with (self._folder / "torch.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - start


@dataclass(frozen=True)
class CheckpointCase(MeasuredCase):
    """Time for which training waits for a checkpoint, next to ``torch.save`` of the same state."""

    pairs: int
    """Number of measured checkpoints."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Train one step and save it repeatedly; return the ratio of the times."""
        folder.mkdir(parents=True)
        rank_info = RankInfo(0, 0, 1)
        set_device(run, rank_info)
        dataset = prepare_splits(run.data, run.model.vocabulary, run.seed).train
        loader = TrainLoader(
            dataset, BatchShare(run.micro_batch, run.micro_batch), seed=run.seed, steps=1
        )
        saves, recorder = _CompareSaves(folder, self.pairs), MetricsRecorder(run, 0, [])
        with signals.restore_handlers(), silence_lightning():
            trainer = build_trainer(run, folder, rank_info, 1, recorder, first_callbacks=[saves])
            trainer.fit(TrainingModule(run, 1), loader)
        shutil.rmtree(folder)
        return saves.entry | {"parameters": run.model.num_parameters}


@dataclass(frozen=True)
class PlannerCase(MeasuredCase):
    """Number of plans per second, each of another depth and micro-batch size."""

    rounds: int
    """Number of measurements."""
    plans: int
    """Number of plans in each measurement."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Plan variants of the run; return the median rate of the rounds."""
        build_plan(run)  # warm-up
        rates = []
        for number in range(self.rounds):
            variants = [
                replace(
                    run,
                    model=with_fields(run.model, layers=2 * (index + 1)),
                    trainer=replace(run.trainer, micro_batch=number + 2),
                )
                for index in range(self.plans)
            ]
            start = time.perf_counter()
            for variant in variants:
                build_plan(variant)
            rates.append(self.plans / (time.perf_counter() - start))
        return {**figure(*order_interval(rates), "plans/s"), "rounds": self.rounds}
