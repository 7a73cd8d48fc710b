"""Hydra's way to a search: ``hydra/sweeper=optuna`` lets Optuna choose the next jobs.

Hydra imports every module here in every application, so nothing heavy is imported at its head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from optuna.trial import Trial

    from scalewise.errors import ConfigIssue
    from scalewise.hpo.config import SearchConfig
    from scalewise.hpo.optuna_study import OptunaSearch
    from scalewise.hpo.space import Axis


class OptunaSweeper(Sweeper):
    """Hands batches of trials to the launcher until the study has all that it wants."""

    def __init__(self, params: dict[str, str], **options: Any) -> None:
        self.params, self.options = dict(params), options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keeps what trials are composed with."""
        from hydra.core.plugins import Plugins

        from scalewise.config import app

        app.begin_search()
        self.loader, self.asked = hydra_context.config_loader, config
        self.batches = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Searches; raises ``ConfigError`` for options that cannot be had before any job runs."""
        from scalewise.config import app, search_space
        from scalewise.errors import ConfigError
        from scalewise.hpo.config import SearchConfig

        lines = [f"{key}={value}" for key, value in self.params.items()]
        space, fixed = search_space.read_axes([*lines, *arguments], self.loader)
        search = SearchConfig.from_options(self.options)
        issues = [*_of_package(), *search.validate(space)]
        issues += self._validation_metric_issues(search, space)
        if issues:
            raise ConfigError(issues)
        self._check_values(space, fixed)
        app.note_varied([axis.key for axis in space])
        if app.has_measurements():
            self._run_search(search, space, fixed, app.claimed_sweep_folder(self.asked))
        else:
            from scalewise.hpo.optuna_study import sample_points
            from scalewise.hpo.space import point_overrides

            points = [[*fixed, *point_overrides(point)] for point in sample_points(search, space)]
            self.batches.launch([p for p in points if not self._rejection_reason(p)], 0)

    def _validation_metric_issues(
        self, search: "SearchConfig", space: Sequence["Axis"]
    ) -> Iterator["ConfigIssue"]:
        """Yields the objective that no trial would measure."""
        from scalewise.errors import ConfigIssue

        every = "trainer.validate_every"
        validates = self.asked.trainer.validate_every or every in [axis.key for axis in space]
        if "val/loss" in search.objectives and not validates:
            yield ConfigIssue(every, None, "no trial would measure val/loss", f"set {every}=100")

    def _check_values(self, space: Sequence["Axis"], fixed_overrides: Sequence[str]) -> None:
        """Refuses what no trial could run with, and values that no option or type knows."""
        from scalewise.hpo.space import ChoiceAxis, first_point, point_overrides

        for axis in space:
            for value in axis.values if isinstance(axis, ChoiceAxis) else ():
                self.loader.load_sweep_config(self.asked, [*fixed_overrides, f"{axis.key}={value}"])
        if (error := self._rejection_reason(fixed_overrides)) and self._rejection_reason(
            [*fixed_overrides, *point_overrides(first_point(space))]
        ):
            raise error

    def _run_search(
        self,
        search: "SearchConfig",
        space: Sequence["Axis"],
        fixed_overrides: Sequence[str],
        folder: Path,
    ) -> None:
        from scalewise.commands import show_study
        from scalewise.hpo import optuna_study, outcome, record

        found = optuna_study.open_study(search, space, folder)
        folder.mkdir(parents=True, exist_ok=True)
        show_study.print_search_start(found, found.reclaim_trials())
        stopped = False
        while not stopped and (trials := found.ask_trials()):
            first = 1 + max((int(str(r["number"])) for r in outcome.sweep_jobs(folder)), default=-1)
            started = self._launch_trials(found, trials, fixed_overrides, folder, first)
            for number, trial in enumerate(started, start=first):
                ended = outcome.job_outcome(folder, number)
                found.tell_outcome(trial, ended)
                stopped = stopped or ended.is_lost
            record.write_record(found, folder)
        show_study.print_search_result(record.build_record(found, folder), folder)

    def _launch_trials(
        self,
        optuna_search: "OptunaSearch",
        trials: Sequence["Trial"],
        fixed_overrides: Sequence[str],
        folder: Path,
        first_number: int,
    ) -> list["Trial"]:
        """Runs the trials that can run and returns them; the others are told as refused."""
        from scalewise.commands import show_study
        from scalewise.config import app
        from scalewise.hpo.outcome import TrialOutcome
        from scalewise.hpo.space import point_overrides

        lines: list[list[str]] = []
        started: list[Trial] = []
        for trial in trials:
            line = [*fixed_overrides, *point_overrides(trial.params)]
            if error := self._rejection_reason(line):
                reason = "; ".join(str(issue) for issue in error.issues)
                optuna_search.tell_outcome(trial, TrialOutcome("refused", reason))
                app.count_rejected(error)
                show_study.print_rejected_trial(trial.number, trial.params, reason)
                continue
            number = first_number + len(started)
            optuna_search.assign_job(trial, folder, number, folder / str(number))
            started.append(trial)
            lines.append(line)
        if lines:
            self.batches.launch(lines, first_number)
        return started

    def _rejection_reason(self, overrides: Sequence[str]) -> Any:
        from scalewise.config import app

        return app.rejection_reason(self.loader, self.asked, overrides)


def _of_package() -> Iterator["ConfigIssue"]:
    from scalewise.errors import ConfigIssue

    try:
        import optuna  # noqa: F401 (asked for, as the searches will ask)
    except ImportError:
        reason, fix = "optuna is not installed", "pip install 'scalewise[optuna]'"
        yield ConfigIssue("hydra/sweeper", "optuna", reason, fix)


@dataclass
class OptunaSweeperConf:
    """Its options; ``scalewise.hpo.config.SearchConfig`` says what they mean."""

    _target_: str = f"{__name__}.{OptunaSweeper.__name__}"
    _recursive_: bool = False
    params: dict[str, str] = field(default_factory=dict)
    trials: int | None = None
    jobs: int = 1
    sampler: str = "tpe"
    seed: int = 1
    objectives: Any = None  # mappings: as such, Hydra would let nobody add to them by a line
    constraints: Any = None
    pruner: str = "none"
    storage: str | None = None
    study: str | None = None


ConfigStore.instance().store(
    group="hydra/sweeper", name="optuna", node=OptunaSweeperConf, provider="scalewise"
)
