"""Cases that compare steps of scalewise and of other trainers with a hand-written loop."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from scalewise.bench import parallel
from scalewise.bench.comparison import MeasuredCase, ratio_entry
from scalewise.bench.interleaved import Fit, compare_loops, measure_steps
from scalewise.bench.suite import CaseError, Entry
from scalewise.launch import signals
from scalewise.run_config import RunConfig
from scalewise.training.device_setup import RankInfo

TRAINERS = {
    "scalewise": ("scalewise.bench.interleaved:fit_scalewise", ""),
    "lightning": ("scalewise.bench.other_trainers:fit_lightning", ""),
    "hugging_face": ("scalewise.bench.other_trainers:fit_hugging_face", "accelerate"),
    "litgpt": ("scalewise.bench.other_trainers:fit_litgpt", "litgpt"),
}
"""Import path and required package of the function that fits a run, by trainer."""


@dataclass(frozen=True)
class StepCase(MeasuredCase):
    """Step time of a trainer next to a hand-written loop with the same model, data and options.

    The hand-written loop compiles the whole model if the run compiles anything.
    """

    pairs: int
    """Number of measured steps, each between two steps of the hand-written loop."""
    trainer: str = "scalewise"
    """Key of ``TRAINERS``."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Train ``pairs`` steps on one rank; return the ratio of step times.

        Raises:
            CaseError: The package of the trainer is not installed.
        """
        path, package = TRAINERS[self.trainer]
        if package and find_spec(package) is None:
            raise CaseError("skipped", f"requires the package {package}")
        folder.mkdir(parents=True)
        fit: Fit = resolve_name(path)
        with signals.restore_handlers():
            times = measure_steps(run, folder, RankInfo(0, 0, 1), self.pairs, fit)
        return _loop_entry(run, times)


@dataclass(frozen=True)
class ParallelCase(MeasuredCase):
    """Step time of several ranks next to hand-written torch loops on as many ranks."""

    pairs: int
    """Number of measured steps, each between two steps of the hand-written loop."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Train ``pairs`` steps; return the ratio of the slowest rank's step times."""
        folder.mkdir(parents=True)
        parallel.check_options(run)
        times = parallel.measure_ranks(run, folder, self.pairs)
        return _loop_entry(run, times) | {"ranks": run.world_size}


def _loop_entry(run: RunConfig, times: dict[str, Any]) -> Entry:
    wall, result = times["wall"], compare_loops(times)
    baseline = "a compiled hand-written loop" if run.is_compiled else "a hand-written loop"
    return ratio_entry(
        wall["suite"],
        wall["hand"],
        result["self_check"]["median"],
        baseline,
        cpu_ratio=result["cpu_ratio"],
        extra_s=result["extra_s"],
        tokens_per_s=run.tokens_per_step / result["suite_s"],
        loss=times["loss"],
        parameters=run.model.num_parameters,
    )
