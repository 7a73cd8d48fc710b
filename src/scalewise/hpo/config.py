"""Options of hyperparameter search: ``hydra/sweeper=optuna``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

from scalewise.errors import ConfigIssue, did_you_mean
from scalewise.hpo.space import Axis, ChoiceAxis, IntervalAxis, grid_size, job_count_issues
from scalewise.metric_names import METRICS, is_metric
from scalewise.typed_override import format_override

SAMPLERS = ("tpe", "nsga2", "random", "grid")
PRUNERS = ("none", "median", "asha")
GOALS = ("minimize", "maximize")
DEFAULT_TRIALS = 20
"""Number of trials if ``trials`` is null and the space is no grid."""


@dataclass(frozen=True)
class SearchConfig:
    """Objectives, sampler, pruner and storage of a hyperparameter search."""

    trials: int | None = None
    """Total number of trials, with earlier ones of the same storage; null: 20, or the full grid."""
    jobs: int = 1
    """Number of trials per batch; the launcher gets a batch at once."""
    sampler: str = "tpe"
    """Sampler: tpe, nsga2, random or grid."""
    seed: int = 1
    """Seed of the sampler."""
    objectives: Mapping[str, str] = field(default_factory=lambda: {"val/loss": "minimize"})
    """``minimize`` or ``maximize`` by metric; several metrics: search for the Pareto front."""
    constraints: Mapping[str, float] = field(default_factory=dict)
    """Upper bounds by metric."""
    pruner: str = "none"
    """Pruner: none, median or asha; it stops trials early by the objective."""
    storage: str | None = None
    """Storage file, SQLite if it ends in .db, else a journal; null: study.journal of the sweep."""
    study: str | None = None
    """Name of the study in the storage; null: the only study there, or the name of the sweep."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SearchConfig:
        """Config from sweeper options; null options and empty objectives take the default."""
        names = {entry.name for entry in fields(cls)}
        values = {k: v for k, v in options.items() if k in names and v is not None}
        return cls(**{k: v for k, v in values.items() if v or k != "objectives"})

    def validate(self, space: Sequence[Axis]) -> Iterator[ConfigIssue]:
        """Yield the issues of the options for a search space."""
        yield from self._number_issues()
        for key, value, choices in (
            ("sampler", self.sampler, SAMPLERS),
            ("pruner", self.pruner, PRUNERS),
        ):
            if value not in choices:
                yield ConfigIssue(
                    f"hydra.sweeper.{key}",
                    value,
                    f"is not a supported {key}",
                    did_you_mean(value, choices),
                )
        yield from self._objective_issues()
        if not space:
            fix = "add an axis: optimizer.lr=1e-4,1e-3 or 'optimizer.lr=interval(1e-4,1e-3)'"
            yield ConfigIssue("", "", "the search space is empty", fix)
        has_grid = all(isinstance(axis, ChoiceAxis) or axis.step is not None for axis in space)
        if self.sampler == "grid" and has_grid:
            yield from job_count_issues("hydra.sweeper.sampler", "grid", grid_size(space))
        for axis in space:
            if isinstance(axis, IntervalAxis):
                yield from axis.validate()
                if self.sampler == "grid" and axis.step is None:
                    fix = "list its values, or set hydra.sweeper.sampler=random"
                    yield ConfigIssue(axis.key, "interval", "requires a step in a grid search", fix)
        if self.storage is not None and "://" in self.storage:
            fix = "set a path: search.journal, or search.db for sqlite"
            yield ConfigIssue("hydra.sweeper.storage", self.storage, "is not a file path", fix)

    def _number_issues(self) -> Iterator[ConfigIssue]:
        if self.jobs < 1:
            yield ConfigIssue("hydra.sweeper.jobs", self.jobs, "must be 1 or more")
        if self.trials is not None and self.trials < 1:
            yield ConfigIssue("hydra.sweeper.trials", self.trials, "must be 1 or more, or null")
        yield from job_count_issues("hydra.sweeper.trials", self.trials, self.trials or 0)
        if not 0 <= self.seed < 2**32:
            yield ConfigIssue("hydra.sweeper.seed", self.seed, "must be in [0, 2**32)")

    def _objective_issues(self) -> Iterator[ConfigIssue]:
        for group in ("objectives", "constraints"):
            if not isinstance(targets := getattr(self, group), Mapping):
                fix = f"write '++hydra.sweeper.{group}={{val/loss: ...}}'"
                yield ConfigIssue(
                    f"hydra.sweeper.{group}", targets, "must be a mapping with metrics as keys", fix
                )
                return
            for key in targets:
                if not is_metric(key):
                    fix = did_you_mean(key, METRICS)
                    yield ConfigIssue(f"hydra.sweeper.{group}", key, "is not a metric", fix)
        for key, goal in self.objectives.items():
            if goal not in GOALS:
                reason = f"must be {' or '.join(GOALS)}"
                yield ConfigIssue(f"hydra.sweeper.objectives.{key}", goal, reason)
        for key, bound in self.constraints.items():
            if isinstance(bound, bool) or not isinstance(bound, int | float) or not isfinite(bound):
                reason = "must be a finite number"
                yield ConfigIssue(f"hydra.sweeper.constraints.{key}", bound, reason)
        if not self.objectives:
            fix = "set " + format_override("hydra.sweeper.objectives", {"val/loss": "minimize"})
            yield ConfigIssue("hydra.sweeper.objectives", "{}", "must not be empty", fix)
        if self.pruner != "none" and len(self.objectives) > 1:
            fix = "set hydra.sweeper.pruner=none, or one objective"
            yield ConfigIssue(
                "hydra.sweeper.pruner", self.pruner, "is not supported with several objectives", fix
            )
        if self.constraints and self.sampler in ("random", "grid"):
            fix = "set hydra.sweeper.sampler=tpe or nsga2"
            reason = f"are not supported by hydra.sweeper.sampler={self.sampler}"
            yield ConfigIssue("hydra.sweeper.constraints", dict(self.constraints), reason, fix)
