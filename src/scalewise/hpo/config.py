"""What a search wants and how it looks: the options of ``hydra/sweeper=optuna``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

from scalewise.config.suggestions import did_you_mean
from scalewise.errors import ConfigIssue
from scalewise.hpo.space import Axis, ChoiceAxis, IntervalAxis, grid_size, too_many
from scalewise.tracking.metric_names import METRICS
from scalewise.typed_override import format_override

SAMPLERS = ("tpe", "nsga2", "random", "grid")
PRUNERS = ("none", "median", "asha")
GOALS = ("minimize", "maximize")
TRIALS = 20
"""Trials of a search that names no number."""


@dataclass(frozen=True)
class SearchConfig:
    """A study and how its trials are chosen."""

    trials: int | None = None
    """Trials in all, earlier ones of the same storage included; None: 20, or the whole grid."""
    jobs: int = 1
    """Trials that are handed to the launcher together."""
    sampler: str = "tpe"
    """tpe, nsga2, random or grid."""
    seed: int = 1
    """Seed of the sampler."""
    objectives: Mapping[str, str] = field(default_factory=lambda: {"val/loss": "minimize"})
    """``minimize`` or ``maximize`` by metric; of several, the Pareto front is sought."""
    constraints: Mapping[str, float] = field(default_factory=dict)
    """Upper bound by metric."""
    pruner: str = "none"
    """none, median or asha: what ends a trial early, by the first objective."""
    storage: str | None = None
    """A journal file, or sqlite where it ends in .db; None: study.journal in the sweep's folder."""
    study: str | None = None
    """Name in the storage; None: the only one there, or the sweep's."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SearchConfig:
        """Returns the search of a sweeper's options; an empty or absent one is as by default."""
        known = {entry.name for entry in fields(cls)}
        given = {k: v for k, v in options.items() if k in known and v is not None}
        return cls(**{key: value for key, value in given.items() if value or key != "objectives"})

    def validate(self, space: Sequence[Axis]) -> Iterator[ConfigIssue]:
        """Yields what this search cannot do, over these axes."""
        yield from self._number_issues()
        for key, value, known in (
            ("sampler", self.sampler, SAMPLERS),
            ("pruner", self.pruner, PRUNERS),
        ):
            if value not in known:
                yield ConfigIssue(
                    f"hydra.sweeper.{key}", value, "is not known", did_you_mean(value, known)
                )
        yield from self._objective_issues()
        if not space:
            fix = "give values: optimizer.lr=1e-4,1e-3 or 'optimizer.lr=interval(1e-4,1e-3)'"
            yield ConfigIssue("", "", "a search needs an axis to search along", fix)
        stepped = all(isinstance(axis, ChoiceAxis) or axis.step is not None for axis in space)
        if self.sampler == "grid" and stepped:
            yield from too_many("hydra.sweeper.sampler", "grid", grid_size(space))
        for axis in space:
            if isinstance(axis, IntervalAxis):
                yield from axis.validate()
                if self.sampler == "grid" and axis.step is None:
                    fix = "list its values, or set hydra.sweeper.sampler=random"
                    yield ConfigIssue(axis.key, "interval", "has no grid", fix)
        if self.storage is not None and "://" in self.storage:
            fix = "give a path: search.journal, or search.db for sqlite"
            yield ConfigIssue("hydra.sweeper.storage", self.storage, "is no file", fix)

    def _number_issues(self) -> Iterator[ConfigIssue]:
        if self.jobs < 1:
            yield ConfigIssue("hydra.sweeper.jobs", self.jobs, "must be 1 or more")
        if self.trials is not None and self.trials < 1:
            yield ConfigIssue("hydra.sweeper.trials", self.trials, "must be 1 or more, or null")
        yield from too_many("hydra.sweeper.trials", self.trials, self.trials or 0)
        if not 0 <= self.seed < 2**32:
            yield ConfigIssue("hydra.sweeper.seed", self.seed, "must be in [0, 2**32)")

    def _objective_issues(self) -> Iterator[ConfigIssue]:
        for group in ("objectives", "constraints"):
            if not isinstance(asked := getattr(self, group), Mapping):
                fix = f"write '++hydra.sweeper.{group}={{val/loss: ...}}'"
                yield ConfigIssue(f"hydra.sweeper.{group}", asked, "is no mapping by metric", fix)
                return
            for key in asked:
                if key not in METRICS:
                    fix = did_you_mean(key, METRICS)
                    yield ConfigIssue(f"hydra.sweeper.{group}", key, "is no metric", fix)
        for key, goal in self.objectives.items():
            if goal not in GOALS:
                reason = f"is neither {' nor '.join(GOALS)}"
                yield ConfigIssue(f"hydra.sweeper.objectives.{key}", goal, reason)
        for key, bound in self.constraints.items():
            if isinstance(bound, bool) or not isinstance(bound, int | float) or not isfinite(bound):
                reason = "an upper bound is a finite number"
                yield ConfigIssue(f"hydra.sweeper.constraints.{key}", bound, reason)
        if not self.objectives:
            fix = "set " + format_override("hydra.sweeper.objectives", {"val/loss": "minimize"})
            yield ConfigIssue("hydra.sweeper.objectives", "{}", "nothing to look for", fix)
        if self.pruner != "none" and len(self.objectives) > 1:
            fix = "set hydra.sweeper.pruner=none, or one objective"
            yield ConfigIssue(
                "hydra.sweeper.pruner", self.pruner, "decides by one objective only", fix
            )
        if self.constraints and self.sampler in ("random", "grid"):
            fix = "set hydra.sweeper.sampler=tpe or nsga2"
            reason = f"{self.sampler} takes no notice of constraints"
            yield ConfigIssue("hydra.sweeper.constraints", dict(self.constraints), reason, fix)
