"""State that ``StateRecorder`` has written in the folder of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from scalewise.run_config import RunConfig
from scalewise.run_files import read_metrics
from scalewise.training.callbacks.state_recorder import BATCHES_FILE, TENSORS_FILE

Tensors = Mapping[str, Tensor]
"""Unsharded tensors by name, in the order of the model."""


@dataclass(frozen=True)
class RecordedRun:
    """A run whose ranks have recorded their state."""

    run: RunConfig
    """Config of the run."""
    folder: Path
    """Run folder."""

    @cached_property
    def metrics(self) -> list[dict[str, float | int | None]]:
        """Metrics of each step."""
        return read_metrics(self.folder / "metrics.csv")

    def values(self, key: str) -> list[float]:
        """Values of a metric, of the steps that have one."""
        return [float(value) for row in self.metrics if (value := row.get(key)) is not None]

    def rank_tensors(self, kind: str, step: int = 0) -> list[Tensors]:
        """Recorded tensors of each rank; a pipeline rank has those of its stages."""
        return [self._read(kind, step, rank) for rank in range(self.run.world_size)]

    def tensors(self, kind: str, step: int = 0) -> Tensors:
        """Recorded tensors of one device."""
        return self._read(kind, step, 0)

    def _read(self, kind: str, step: int, rank: int) -> Tensors:
        file = self.folder / TENSORS_FILE.format(kind=kind, step=step, rank=rank)
        if not file.exists():
            return {}
        with safe_open(file, "pt") as tensors:
            order: list[str] = json.loads(tensors.metadata()["order"])
            return {name: tensors.get_tensor(name) for name in order}

    @cached_property
    def batches(self) -> list[list[dict[str, Any]]]:
        """Samples and label counts of the micro-batches of each rank."""
        files = (
            self.folder / BATCHES_FILE.format(rank=rank) for rank in range(self.run.world_size)
        )
        return [json.loads(file.read_text("utf-8")) for file in files]

    def step_batches(self, step: int) -> dict[int, list[dict[str, Any]]]:
        """Micro-batches of a step by data-parallel rank, read by the first rank of each."""
        batches: dict[int, list[dict[str, Any]]] = {}
        for rank, records in enumerate(self.batches):
            dp_rank = self.run.parallelism.data_parallel_rank(rank)
            batches.setdefault(dp_rank, [it for it in records if it["step"] == step])
        return batches
