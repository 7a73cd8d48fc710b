"""Optuna study in a persistent storage: trials, outcomes, resumption after a crash, record."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import psutil
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from scalewise import regular_files
from scalewise.compat.optuna_submitit import trial_id
from scalewise.errors import ConfigError
from scalewise.hpo import storage
from scalewise.hpo.config import DEFAULT_TRIALS, SearchConfig
from scalewise.hpo.space import Axis, ChoiceAxis, Value, grid_points, round_point
from scalewise.hpo.storage import TrialLink
from scalewise.run_files import read_json, write_json

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

UNFINISHED = ("waiting", "running", "interrupted")
"""Statuses of jobs that were stopped from outside: by a signal or a crash of the machine."""
JOURNAL = "study.journal"
STUDY_FILE = "study.json"
MIN_TRIALS_FOR_IMPORTANCE = 4
"""Minimum number of complete trials for an estimate of importance."""


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome and metrics of the job of a trial."""

    status: str
    """Status of the job."""
    reason: str = ""
    """Reason of the status; empty for ``ok``."""
    folder: Path | None = None
    """Folder of the run; None if the job has none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite metrics of ``summary.json``."""

    @property
    def is_lost(self) -> bool:
        """Whether the job was stopped from outside, so that its trial has to run again."""
        return self.status in UNFINISHED


def sweep_jobs(sweep: Path) -> list[dict[str, Any]]:
    """Job entries of ``sweep.json``; empty without that file."""
    jobs: list[dict[str, Any]] = read_json(sweep / "sweep.json").get("jobs", [])
    return jobs


def job_outcome(sweep: Path, number: int) -> TrialOutcome:
    """Outcome of job ``number`` of a sweep; its status is ``waiting`` if there is no such job.

    ``status.json`` of the job takes precedence over ``sweep.json``, which may be older.
    """
    entries = [job for job in sweep_jobs(sweep) if job["number"] == number]
    if not entries:
        return TrialOutcome("waiting")
    folder = sweep / entries[-1]["folder"]
    status = read_json(folder / "status.json")
    if not status:
        return TrialOutcome(entries[-1]["status"])
    metrics = read_json(folder / "summary.json").get("metrics", {})
    return TrialOutcome(
        status.get("status", "failed"),
        status.get("reason", ""),
        folder,
        {key: float(value) for key, value in metrics.items() if value is not None},
    )


SWEEP, JOB, OWNER = "sweep", "job", "owner"
STATUS, REASON, FOLDER = "status", "reason", "folder"
"""Names of the user attributes of a trial."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class OptunaSearch:
    """Hyperparameter search with its Optuna study."""

    config: SearchConfig
    """Options of the search."""
    space: Sequence[Axis]
    """Axes of the search space."""
    storage_file: str
    """Path of the storage."""
    study: optuna.Study
    """Study in the storage."""

    @property
    def num_trials(self) -> int:
        """Total number of trials; a grid limits it to its number of points."""
        points = len(grid_points(self.space)) if self.config.sampler == "grid" else None
        requested_trials = self.config.trials or points or DEFAULT_TRIALS
        return min(requested_trials, points or requested_trials)

    @property
    def finished_trials(self) -> list[FrozenTrial]:
        """Trials that ended by themselves, successful or not."""
        return [t for t in self.study.get_trials() if t.state.is_finished() and not _is_lost(t)]

    def ask_trials(self) -> list[Trial]:
        """Ask the study for the trials of the next batch."""
        num_running = sum(
            t.state is TrialState.RUNNING for t in self.study.get_trials(deepcopy=False)
        )
        num_missing = self.num_trials - len(self.finished_trials) - num_running
        space = {axis.key: _axis_distribution(axis) for axis in self.space}
        trials = [self.study.ask(space) for _ in range(min(self.config.jobs, num_missing))]
        for trial in trials:
            trial.set_user_attr(OWNER, _process_id())
        return trials

    def assign_job(self, trial: Trial, sweep: Path, job: int, folder: Path) -> None:
        """Record the job of a trial; write the trial link that pruning requires to its folder."""
        trial.set_user_attr(SWEEP, str(sweep))
        trial.set_user_attr(JOB, job)
        if self.config.pruner != "none":
            metric = next(iter(self.config.objectives))
            name = self.study.study_name
            TrialLink(self.storage_file, name, trial.number, self.config.pruner, metric).write(
                folder
            )

    def tell_outcome(self, trial: Trial, trial_outcome: TrialOutcome) -> None:
        """Tell the study the outcome of a trial: its values, pruned or failed."""
        if trial_outcome.folder is not None:
            trial.set_user_attr(FOLDER, str(trial_outcome.folder))
        objective_values = [trial_outcome.metrics.get(key) for key in self.config.objectives]
        constraint_values = {key: trial_outcome.metrics.get(key) for key in self.config.constraints}
        values = [value for value in objective_values if value is not None]
        bounds = {key: value for key, value in constraint_values.items() if value is not None}
        status, reason = trial_outcome.status, trial_outcome.reason
        if status == "ok" and (
            len(values) < len(objective_values) or len(bounds) < len(constraint_values)
        ):
            missing_metrics = [
                key
                for key in (*self.config.objectives, *constraint_values)
                if key not in trial_outcome.metrics
            ]
            status, reason = "unmeasured", f"did not measure {', '.join(missing_metrics)}"
        trial.set_user_attr(STATUS, status)
        trial.set_user_attr(REASON, reason)
        for key, value in bounds.items():
            trial.set_constraint(key, value - self.config.constraints[key])
        if status == "ok":
            self.study.tell(trial, values)
        else:
            is_pruned = status == "pruned"
            self.study.tell(trial, state=TrialState.PRUNED if is_pruned else TrialState.FAIL)
        if trial_outcome.is_lost:
            self.study.enqueue_trial(dict(trial.params))

    def reclaim_trials(self) -> list[FrozenTrial]:
        """Tell the study the outcomes of trials whose sweep process died, and return these trials.

        The outcome of a finished job counts; an unfinished trial is queued to run again.
        """
        orphaned_trials = [
            t
            for t in self.study.get_trials(states=[TrialState.RUNNING])
            if not _is_running(t.user_attrs.get(OWNER, ""))
        ]
        for trial in orphaned_trials:
            attributes = trial.user_attrs
            trial_outcome = TrialOutcome("waiting")
            if JOB in attributes:
                trial_outcome = job_outcome(Path(attributes[SWEEP]), attributes[JOB])
            self.tell_outcome(Trial(self.study, trial_id(trial)), trial_outcome)
        return orphaned_trials


def open_study(config: SearchConfig, space: Sequence[Axis], sweep: Path) -> OptunaSearch:
    """Create the study of a sweep, or load it from its storage to resume it.

    Raises ``ConfigError`` if the stored study has other axes, objectives or constraints.
    """
    file = str(
        regular_files.expand_home(config.storage).absolute() if config.storage else sweep / JOURNAL
    )
    study_storage = storage.open_storage(file)
    names = optuna.get_all_study_names(study_storage)
    name = config.study or (names[0] if len(names) == 1 else sweep.parent.name)
    settings = {
        "objectives": dict(config.objectives),
        "constraints": dict(config.constraints),
        "choices": {axis.key: list(axis.values) for axis in space if isinstance(axis, ChoiceAxis)},
        "axes": sorted(axis.key for axis in space),
    }
    if name in names:
        stored_settings = optuna.load_study(study_name=name, storage=study_storage).user_attrs
        for key, value in settings.items():
            if stored_settings.get(key) != value:
                reason = f"contains study {name} with other {key}: {stored_settings.get(key)}"
                fix = "set hydra.sweeper.study=NAME, or another storage"
                raise ConfigError.for_key("hydra.sweeper.storage", file, reason, fix)
    study = optuna.create_study(
        study_name=name,
        storage=study_storage,
        directions=[StudyDirection[goal.upper()] for goal in config.objectives.values()],
        load_if_exists=True,
    )
    search = OptunaSearch(config, space, file, study)
    for key, value in settings.items():
        study.set_user_attr(key, value)
    if config.sampler == "grid":
        for point in grid_points(space):
            study.enqueue_trial(point, skip_if_exists=True)
    study.sampler = _build_sampler(config, len(study.get_trials(deepcopy=False)))
    return search


def sample_points(config: SearchConfig, space: Sequence[Axis]) -> list[dict[str, Value]]:
    """Points of a search space for a preview, sampled at random or from the grid."""
    if config.sampler == "grid":
        return grid_points(space)[: config.trials]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(config.seed))
    distributions = {axis.key: _axis_distribution(axis) for axis in space}
    return [study.ask(distributions).params for _ in range(config.trials or DEFAULT_TRIALS)]


def _build_sampler(config: SearchConfig, num_trials: int) -> BaseSampler:
    seed = config.seed + num_trials  # a resumed search must not sample the same trials again
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


def _is_lost(trial: FrozenTrial) -> bool:
    return trial.user_attrs.get(STATUS) in UNFINISHED


def _process_id() -> str:
    process = psutil.Process()
    return f"{socket.gethostname()} {os.getpid()} {process.create_time()}"


def _is_running(owner: str) -> bool:
    """Whether a sweep process of this machine still runs; False for other machines."""
    host, _, fields = owner.partition(" ")
    pid, _, create_time = fields.partition(" ")
    if host != socket.gethostname() or not pid:
        return False
    try:
        return str(psutil.Process(int(pid)).create_time()) == create_time
    except psutil.NoSuchProcess:
        return False


def write_record(optuna_search: OptunaSearch, sweep: Path) -> None:
    """Write the record to the folder of the sweep."""
    write_json(sweep / STUDY_FILE, build_record(optuna_search, sweep))


def build_record(optuna_search: OptunaSearch, sweep: Path) -> dict[str, object]:
    """Record of the search: options, trials, best trials and importance.

    ``best`` lists the numbers of the Pareto-optimal trials that satisfy the constraints.
    ``importance`` is by objective and axis, and sums to 1 (PED-ANOVA; Watanabe, Bansal and Hutter,
    IJCAI 2023).
    """
    search = optuna_search.config
    return {
        "study": optuna_search.study.study_name,
        "storage": optuna_search.storage_file,
        "sampler": search.sampler,
        "pruner": search.pruner,
        "objectives": dict(search.objectives),
        "constraints": dict(search.constraints),
        "wanted": optuna_search.num_trials,
        "best": [trial.number for trial in pareto_trials(optuna_search)],
        "importance": axis_importance(optuna_search),
        "trials": list(_trial_records(optuna_search, sweep)),
    }


def pareto_trials(optuna_search: OptunaSearch) -> list[FrozenTrial]:
    """Pareto-optimal trials by the first objective; the best trial only for one objective.

    Trials that violate a constraint are excluded.
    """
    goal = next(iter(optuna_search.config.objectives.values()))
    sign = 1 if goal == "minimize" else -1
    front = sorted(optuna_search.study.best_trials, key=lambda trial: sign * trial.values[0])
    return front if len(optuna_search.config.objectives) > 1 else front[:1]


def axis_importance(optuna_search: OptunaSearch) -> dict[str, dict[str, float]]:
    """Importance of each axis by objective; empty with too few complete trials."""
    complete_trials = optuna_search.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    if len(complete_trials) < MIN_TRIALS_FOR_IMPORTANCE:
        return {}
    importance = {}
    for index, (key, goal) in enumerate(optuna_search.config.objectives.items()):
        sign = 1 if goal == "minimize" else -1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. of axes without a numeric importance
            try:
                importance[key] = optuna.importance.get_param_importances(
                    optuna_search.study,
                    evaluator=PedAnovaImportanceEvaluator(),
                    target=partial(_signed_value, index, sign),
                )
            except (RuntimeError, ValueError):  # all values are equal
                continue
    return importance


def _signed_value(index: int, sign: int, trial: FrozenTrial) -> float:
    return sign * float(trial.values[index])


def _trial_records(optuna_search: OptunaSearch, sweep: Path) -> Iterator[dict[str, object]]:
    for trial in optuna_search.study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        folder = attributes.get(FOLDER)
        if folder is not None and Path(folder).is_relative_to(sweep):
            folder = str(Path(folder).relative_to(sweep))
        yield {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "status": attributes.get(STATUS, ""),
            "reason": attributes.get(REASON, ""),
            "params": round_point(trial.params),
            "values": trial.values,
            "over": {key: value for key, value in trial.constraints.items() if value > 0},
            "reported": {str(step): v for step, v in trial.intermediate_values.items()},
            "folder": folder,
        }
