"""Hyperparameter search: the trials of ``hydra/sweeper=optuna``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalewise.commands import show
from scalewise.config import app, parsed_overrides
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hpo.config import SearchConfig
from scalewise.hpo.space import Axis, ChoiceAxis, first_point, point_overrides

if TYPE_CHECKING:
    from optuna.trial import Trial

    from scalewise.hpo.optuna_study import OptunaSearch


class TrialRunner:
    """Launches batches of trials until the study has all its trials.

    Args:
        loader: Hydra's config loader.
        config: Composed config of the multirun.
        launcher: Hydra launcher of the jobs.
    """

    def __init__(self, loader: Any, config: Any, launcher: Any) -> None:
        self._loader, self._config, self._launcher = loader, config, launcher

    def run(self, axes: Sequence[str], options: Mapping[str, Any]) -> None:
        """Run the search. Raises ``ConfigError`` for invalid options before any job runs.

        Args:
            axes: Overrides of the command line and of the sweep file.
            options: Options of ``hydra.sweeper``, those of ``SearchConfig``.
        """
        space, fixed_overrides = parsed_overrides.read_axes(axes, self._loader)
        search = SearchConfig.from_options(options)
        issues = [*_missing_package_issues(), *search.validate(space)]
        issues += self._validation_metric_issues(search, space)
        if issues:
            raise ConfigError(issues)
        self._check_values(space, fixed_overrides)
        app.set_varied_keys([axis.key for axis in space])
        if app.has_measurements():
            self._run_search(search, space, fixed_overrides, app.claimed_sweep_folder(self._config))
        else:
            from scalewise.hpo.optuna_study import sample_points

            points = [
                [*fixed_overrides, *point_overrides(point)]
                for point in sample_points(search, space)
            ]
            self._launcher.launch([p for p in points if not self._rejection_reason(p)], 0)

    def _validation_metric_issues(
        self, search: SearchConfig, space: Sequence[Axis]
    ) -> Iterator[ConfigIssue]:
        """Yield an issue if ``val/loss`` is an objective and no trial validates."""
        interval_key = "trainer.validate_every"
        validates = self._config.trainer.validate_every or interval_key in [
            axis.key for axis in space
        ]
        if "val/loss" in search.objectives and not validates:
            yield ConfigIssue(
                interval_key,
                None,
                "no trial measures the objective val/loss",
                f"set {interval_key}=100",
            )

    def _check_values(self, space: Sequence[Axis], fixed_overrides: Sequence[str]) -> None:
        """Raise ``ConfigError`` for values that do not compose, and if no trial is valid."""
        for axis in space:
            for value in axis.values if isinstance(axis, ChoiceAxis) else ():
                self._loader.load_sweep_config(
                    self._config, [*fixed_overrides, f"{axis.key}={value}"]
                )
        if (error := self._rejection_reason(fixed_overrides)) and self._rejection_reason(
            [*fixed_overrides, *point_overrides(first_point(space))]
        ):
            raise error

    def _run_search(
        self,
        search: SearchConfig,
        space: Sequence[Axis],
        fixed_overrides: Sequence[str],
        folder: Path,
    ) -> None:
        from scalewise.hpo import optuna_study

        optuna_search = optuna_study.open_study(search, space, folder)
        folder.mkdir(parents=True, exist_ok=True)
        show.print_search_start(optuna_search, optuna_search.reclaim_trials())
        is_stopped = False
        while not is_stopped and (trials := optuna_search.ask_trials()):
            first_number = 1 + max(
                (int(str(r["number"])) for r in optuna_study.sweep_jobs(folder)), default=-1
            )
            started_trials = self._launch_trials(
                optuna_search, trials, fixed_overrides, folder, first_number
            )
            for number, trial in enumerate(started_trials, start=first_number):
                trial_outcome = optuna_study.job_outcome(folder, number)
                optuna_search.tell_outcome(trial, trial_outcome)
                is_stopped = is_stopped or trial_outcome.is_lost
            optuna_study.write_record(optuna_search, folder)
        show.print_search_result(optuna_study.build_record(optuna_search, folder), folder)

    def _launch_trials(
        self,
        optuna_search: OptunaSearch,
        trials: Sequence[Trial],
        fixed_overrides: Sequence[str],
        folder: Path,
        first_number: int,
    ) -> list[Trial]:
        """Run the trials whose config is valid and return them; reject the others."""
        from scalewise.hpo.optuna_study import TrialOutcome

        job_overrides: list[list[str]] = []
        started_trials: list[Trial] = []
        for trial in trials:
            overrides = [*fixed_overrides, *point_overrides(trial.params)]
            if error := self._rejection_reason(overrides):
                reason = "; ".join(str(issue) for issue in error.issues)
                optuna_search.tell_outcome(trial, TrialOutcome("refused", reason))
                app.record_rejected(error)
                show.print_rejected_trial(trial.number, trial.params, reason)
                continue
            number = first_number + len(started_trials)
            optuna_search.assign_job(trial, folder, number, folder / str(number))
            started_trials.append(trial)
            job_overrides.append(overrides)
        if job_overrides:
            self._launcher.launch(job_overrides, first_number)
        return started_trials

    def _rejection_reason(self, overrides: Sequence[str]) -> Any:
        return app.rejection_reason(self._loader, self._config, overrides)


def _missing_package_issues() -> Iterator[ConfigIssue]:
    try:
        import optuna  # noqa: F401 (availability check)
    except ImportError:
        reason, fix = "optuna is not installed", "pip install 'scalewise[optuna]'"
        yield ConfigIssue("hydra/sweeper", "optuna", reason, fix)
