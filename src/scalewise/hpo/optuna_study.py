"""A study in its storage: asked for trials, told how they ended, gone on with after a kill."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
import psutil
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from scalewise.errors import ConfigError
from scalewise.hpo import outcome, storage
from scalewise.hpo.config import TRIALS, SearchConfig
from scalewise.hpo.outcome import TrialOutcome
from scalewise.hpo.space import Axis, ChoiceAxis, Value, grid_points
from scalewise.hpo.storage import TrialLink

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

JOURNAL = "study.journal"

SWEEP, JOB, OWNER = "sweep", "job", "owner"
STATUS, REASON, FOLDER = "status", "reason", "folder"
"""What a trial's user attributes are called."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class OptunaSearch:
    """One search: its options, its axes and Optuna's study of them."""

    config: SearchConfig
    space: Sequence[Axis]
    storage_file: str
    """The storage."""
    study: optuna.Study

    @property
    def num_trials(self) -> int:
        """Returns how many trials there are to be."""
        points = len(grid_points(self.space)) if self.config.sampler == "grid" else None
        asked = self.config.trials or points or TRIALS
        return min(asked, points or asked)

    @property
    def finished_trials(self) -> list[FrozenTrial]:
        """Returns the trials that say something of their settings, whether they failed or not."""
        return [t for t in self.study.get_trials() if t.state.is_finished() and not _lost_trials(t)]

    def ask_trials(self) -> list[Trial]:
        """Returns the next trials, as many as are to run together and are still missing."""
        running = sum(t.state is TrialState.RUNNING for t in self.study.get_trials(deepcopy=False))
        missing = self.num_trials - len(self.finished_trials) - running
        space = {axis.key: _axis_distribution(axis) for axis in self.space}
        trials = [self.study.ask(space) for _ in range(min(self.config.jobs, missing))]
        for trial in trials:
            trial.set_user_attr(OWNER, _process_id())
        return trials

    def assign_job(self, trial: Trial, sweep: Path, job: int, folder: Path) -> None:
        """Notes which job a trial becomes, and tells the job where it may be pruned."""
        trial.set_user_attr(SWEEP, str(sweep))
        trial.set_user_attr(JOB, job)
        if self.config.pruner != "none":
            metric = next(iter(self.config.objectives))
            name = self.study.study_name
            TrialLink(self.storage_file, name, trial.number, self.config.pruner, metric).write(
                folder
            )

    def tell_outcome(self, trial: Trial, trial_outcome: TrialOutcome) -> None:
        """Tells Optuna how a trial ended: by its values, as pruned, or as failed."""
        if trial_outcome.folder is not None:
            trial.set_user_attr(FOLDER, str(trial_outcome.folder))
        measured = [trial_outcome.metrics.get(key) for key in self.config.objectives]
        bounded = {key: trial_outcome.metrics.get(key) for key in self.config.constraints}
        values = [value for value in measured if value is not None]
        known = {key: value for key, value in bounded.items() if value is not None}
        status, reason = trial_outcome.status, trial_outcome.reason
        if status == "ok" and (len(values) < len(measured) or len(known) < len(bounded)):
            lacking = [
                key
                for key in (*self.config.objectives, *bounded)
                if key not in trial_outcome.metrics
            ]
            status, reason = "unmeasured", f"it measured no {', '.join(lacking)}"
        trial.set_user_attr(STATUS, status)
        trial.set_user_attr(REASON, reason)
        for key, value in known.items():
            trial.set_constraint(key, value - self.config.constraints[key])
        if status == "ok":
            self.study.tell(trial, values)
        else:
            pruned = status == "pruned"
            self.study.tell(trial, state=TrialState.PRUNED if pruned else TrialState.FAIL)
        if trial_outcome.is_lost:
            self.study.enqueue_trial(dict(trial.params))

    def reclaim_trials(self) -> list[FrozenTrial]:
        """Tells how the trials ended whose sweep has died; returns them.

        What had ended by itself counts; what was lost is waiting to run again.
        """
        left = [
            t
            for t in self.study.get_trials(states=[TrialState.RUNNING])
            if not _is_running(t.user_attrs.get(OWNER, ""))
        ]
        for trial in left:
            known = trial.user_attrs
            ended = TrialOutcome("waiting")
            if JOB in known:
                ended = outcome.job_outcome(Path(known[SWEEP]), known[JOB])
            self.tell_outcome(Trial(self.study, trial._trial_id), ended)
        return left


def open_study(config: SearchConfig, space: Sequence[Axis], sweep: Path) -> OptunaSearch:
    """Returns the study of a sweep: a new one, or that of its storage to go on with.

    Raises ``ConfigError`` where the study there sought something else.
    """
    file = str(Path(config.storage).expanduser().absolute() if config.storage else sweep / JOURNAL)
    kept = storage.open_storage(file)
    names = optuna.get_all_study_names(kept)
    name = config.study or (names[0] if len(names) == 1 else sweep.parent.name)
    asked = {
        "objectives": dict(config.objectives),
        "constraints": dict(config.constraints),
        "choices": {axis.key: list(axis.values) for axis in space if isinstance(axis, ChoiceAxis)},
        "axes": sorted(axis.key for axis in space),
    }
    if name in names:
        before = optuna.load_study(study_name=name, storage=kept).user_attrs
        for key, value in asked.items():
            if before.get(key) != value:
                reason = f"the study {name} there has other {key}: {before.get(key)}"
                fix = "give hydra.sweeper.study=NAME, or another storage"
                raise ConfigError.for_key("hydra.sweeper.storage", file, reason, fix)
    study = optuna.create_study(
        study_name=name,
        storage=kept,
        directions=[StudyDirection[goal.upper()] for goal in config.objectives.values()],
        load_if_exists=True,
    )
    made = OptunaSearch(config, space, file, study)
    for key, value in asked.items():
        study.set_user_attr(key, value)
    if config.sampler == "grid":
        for point in grid_points(space):
            study.enqueue_trial(point, skip_if_exists=True)
    study.sampler = _build_sampler(config, len(study.get_trials(deepcopy=False)))
    return made


def sample_points(config: SearchConfig, space: Sequence[Axis]) -> list[dict[str, Value]]:
    """Returns points of a space as a search would begin, without a storage or a result."""
    if config.sampler == "grid":
        return grid_points(space)[: config.trials]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(config.seed))
    distributions = {axis.key: _axis_distribution(axis) for axis in space}
    return [study.ask(distributions).params for _ in range(config.trials or TRIALS)]


def _build_sampler(config: SearchConfig, num_trials: int) -> BaseSampler:
    seed = config.seed + num_trials  # a search that goes on must not draw its first trials again
    if config.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=config.jobs > 1)
    if config.sampler == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed)
    return optuna.samplers.RandomSampler(seed)


def _axis_distribution(axis: Axis) -> BaseDistribution:
    if isinstance(axis, ChoiceAxis):
        return CategoricalDistribution(axis.values)
    if axis.is_integer:
        low, high = int(axis.low), int(axis.high)
        return IntDistribution(low, high, log=axis.log, step=int(axis.step or 1))
    return FloatDistribution(axis.low, axis.high, log=axis.log, step=axis.step)


def _lost_trials(trial: FrozenTrial) -> bool:
    return trial.user_attrs.get(STATUS) in outcome.UNENDED


def _process_id() -> str:
    process = psutil.Process()
    return f"{socket.gethostname()} {os.getpid()} {process.create_time()}"


def _is_running(owner: str) -> bool:
    """Returns whether a sweep still runs on this machine; of another one nothing is known."""
    host, _, rest = owner.partition(" ")
    number, _, created = rest.partition(" ")
    if host != socket.gethostname() or not number:
        return False
    try:
        return str(psutil.Process(int(number)).create_time()) == created
    except psutil.NoSuchProcess:
        return False
