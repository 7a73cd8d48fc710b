"""Hyperparameter search: space, validation, trials in Optuna and resume after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from scalewise.config.hydra_policy import hydra_session
from scalewise.config.parsed_overrides import read_axes
from scalewise.errors import ConfigError, Pruned
from scalewise.hpo import optuna_study
from scalewise.hpo.config import SearchConfig
from scalewise.hpo.optuna_study import OptunaSearch, TrialOutcome
from scalewise.hpo.space import (
    Axis,
    ChoiceAxis,
    IntervalAxis,
    first_point,
    grid_points,
    point_overrides,
)
from scalewise.hpo.storage import TrialLink, read_trial_link
from scalewise.launch.outcomes import outcome_of_exception
from scalewise.training.callbacks.pruning import PruningMonitor

LR = IntervalAxis("optimizer.lr", 1e-5, 1e-1, log=True)
PRECISION = ChoiceAxis("precision", ("fp32", "bf16_mixed"))
SPACE = (LR, PRECISION)


def axes(*overrides: str) -> tuple[list[Axis], list[str]]:
    with hydra_session() as loader:
        return read_axes(overrides, loader)


class TestAxes:
    @pytest.mark.parametrize(
        ("overrides", "axis"),
        [
            ("a=x,null,true,1", ChoiceAxis("a", ("x", "null", "True", "1"))),
            ("a=choice(1,'b c')", ChoiceAxis("a", ("1", "b\\ c"))),
            ("a=interval(1,4)", IntervalAxis("a", 1.0, 4.0)),
            ("a=tag(log,interval(1e-5,1e-1))", IntervalAxis("a", 1e-5, 1e-1, log=True)),
            ("a=int(interval(1,8))", IntervalAxis("a", 1, 8)),
            ("a=int(tag(log,interval(4,64)))", IntervalAxis("a", 4, 64, log=True)),
            ("a=range(1,10,2)", IntervalAxis("a", 1, 9, step=2)),
            ("a=range(0,1,0.25)", IntervalAxis("a", 0.0, 0.75, step=0.25)),
            ("+inject=none,oom", ChoiceAxis("+inject", ("none", "oom"))),
        ],
    )
    def test_search_space_parses_the_sweep_grammar(self, overrides: str, axis: Axis) -> None:
        space, fixed = axes(overrides)
        assert space == [axis]
        assert fixed == []

    def test_search_space_glob_lists_options_of_the_group(self) -> None:
        (axis,), _ = axes("precision=glob(fp*)")
        assert axis == ChoiceAxis("precision", ("fp16_mixed", "fp32", "fp8"))

    def test_search_space_last_value_of_a_key_wins(self) -> None:
        space, fixed = axes("a=1,2", "b=3", "a=5", "b=6,7")
        assert space == [ChoiceAxis("b", ("6", "7"))]
        assert fixed == ["a=5"]

    def test_search_space_integer_intervals_stay_integers(self) -> None:
        (axis,), _ = axes("a=int(interval(1,8))")
        assert isinstance(axis, IntervalAxis)
        assert axis.is_integer

    def test_search_grid_has_every_combination(self) -> None:
        points = grid_points([IntervalAxis("a", 0.0, 0.5, step=0.25), PRECISION])
        assert len(points) == 6
        assert points[0] == {"a": 0.0, "precision": "fp32"}
        assert first_point(SPACE) == {"optimizer.lr": 1e-5, "precision": "fp32"}
        assert point_overrides(points[-1]) == ["a=0.5", "precision=bf16_mixed"]


class TestRejections:
    @pytest.mark.parametrize(
        ("options", "space", "words"),
        [
            ({"objectives": {"val/los": "minimize"}}, SPACE, ("did you mean val/loss?",)),
            ({"objectives": {"val/loss": "smallest"}}, SPACE, ("must be minimize or maximize",)),
            ({"objectives": {}}, SPACE, ("must not be empty",)),
            ({"constraints": {"memory/peak": 1.0}}, SPACE, ("did you mean memory/peak_bytes?",)),
            ({"constraints": {"time/step_s": float("nan")}}, SPACE, ("finite number",)),
            ({"sampler": "tpee"}, SPACE, ("did you mean tpe?",)),
            ({"pruner": "ashe"}, SPACE, ("did you mean asha?",)),
            ({"sampler": "grid"}, SPACE, ("requires a step",)),
            ({"trials": 0, "jobs": 0, "seed": -1}, SPACE, ("trials", "jobs", "seed")),
            ({}, (), ("search space is empty",)),
            ({}, (IntervalAxis("a", 2.0, 1.0),), ("must be below the upper bound",)),
            ({}, (IntervalAxis("a", 0.0, 1.0, log=True),), ("above 0",)),
            ({"storage": "mysql://somebody@there/x"}, SPACE, ("is not a file path",)),
            (
                {
                    "pruner": "asha",
                    "objectives": {"val/loss": "minimize", "time/step_s": "minimize"},
                },
                SPACE,
                ("not supported with several objectives",),
            ),
            (
                {"sampler": "random", "constraints": {"memory/peak_bytes": 1.0}},
                SPACE,
                ("are not supported by hydra.sweeper.sampler",),
            ),
        ],
    )
    def test_invalid_search_names_reason_and_fix(
        self, options: dict[str, Any], space: tuple[Axis, ...], words: tuple[str, ...]
    ) -> None:
        messages = "\n".join(str(issue) for issue in SearchConfig(**options).validate(space))
        assert all(word in messages for word in words), messages

    def test_valid_search_is_accepted(self) -> None:
        objectives = {"val/loss": "minimize", "throughput/tokens_per_s": "maximize"}
        bounds = {"memory/peak_bytes": 2e9}
        assert list(SearchConfig(objectives=objectives, constraints=bounds).validate(SPACE)) == []


def trial_outcome(loss: float | None = None, status: str = "ok", **metrics: float) -> TrialOutcome:
    loss_metrics = {} if loss is None else {"val/loss": loss}
    return TrialOutcome(status, "", None, {**loss_metrics, **metrics})


class TestStudy:
    """Trials that are suggested and recorded."""

    def test_study_runs_the_requested_trials(self, tmp_path: Path) -> None:
        optuna_search = optuna_study.open_study(SearchConfig(trials=5, jobs=2), SPACE, tmp_path)
        batches = []
        while trials := optuna_search.ask_trials():
            batches.append(len(trials))
            for trial in trials:
                optuna_search.tell_outcome(trial, trial_outcome(trial.params["optimizer.lr"]))
        assert batches == [2, 2, 1]
        (best,) = optuna_study.pareto_trials(optuna_search)
        assert best.value == min(t.params["optimizer.lr"] for t in optuna_search.study.trials)

    def test_study_records_failed_trials(self, tmp_path: Path) -> None:
        optuna_search = optuna_study.open_study(SearchConfig(trials=4, jobs=4), SPACE, tmp_path)
        first_trial, second_trial, third_trial, fourth_trial = optuna_search.ask_trials()
        optuna_search.tell_outcome(first_trial, trial_outcome(1.0))
        optuna_search.tell_outcome(second_trial, trial_outcome(status="out_of_memory"))
        optuna_search.tell_outcome(third_trial, trial_outcome(status="refused"))
        optuna_search.tell_outcome(fourth_trial, trial_outcome(**{"train/loss": 0.5}))
        assert optuna_search.ask_trials() == []
        states = [trial.state for trial in optuna_search.study.trials]
        assert states == [TrialState.COMPLETE, *[TrialState.FAIL] * 3]
        assert all(trial.values is None for trial in optuna_search.study.trials[1:])
        trial_records = optuna_study.build_record(optuna_search, tmp_path)["trials"]
        assert isinstance(trial_records, list)
        assert [trial["status"] for trial in trial_records] == [
            "ok", "out_of_memory", "refused", "unmeasured",
        ]  # fmt: skip
        assert trial_records[3]["reason"] == "did not measure val/loss"

    def test_study_reruns_lost_trials(self, tmp_path: Path) -> None:
        optuna_search = optuna_study.open_study(SearchConfig(trials=1), SPACE, tmp_path)
        (trial,) = optuna_search.ask_trials()
        optuna_search.tell_outcome(trial, trial_outcome(status="interrupted"))
        (resumed_trial,) = optuna_search.ask_trials()
        assert resumed_trial.params == trial.params
        optuna_search.tell_outcome(resumed_trial, trial_outcome(1.0))
        assert optuna_search.ask_trials() == []

    @pytest.mark.parametrize("file", ["search.journal", "search.db"])
    def test_study_resumes_from_its_storage(self, tmp_path: Path, file: str) -> None:
        search = SearchConfig(trials=4, sampler="random", storage=str(tmp_path / file))
        points = []
        for _ in range(2):
            optuna_search = optuna_study.open_study(search, SPACE, tmp_path / "smoke" / "today")
            for trial in [*optuna_search.ask_trials(), *optuna_search.ask_trials()]:
                points.append(trial.params["optimizer.lr"])
                optuna_search.tell_outcome(trial, trial_outcome(1.0))
        assert optuna_study.open_study(search, SPACE, tmp_path).ask_trials() == []
        assert len(set(points)) == 4  # other samples than before

    def test_study_of_another_search_is_rejected(self, tmp_path: Path) -> None:
        file = str(tmp_path / "search.journal")
        optuna_study.open_study(SearchConfig(storage=file), SPACE, tmp_path)
        for search, space, word in (
            (
                SearchConfig(storage=file, objectives={"time/step_s": "minimize"}),
                SPACE,
                "objectives",
            ),
            (SearchConfig(storage=file), (LR, ChoiceAxis("precision", ("fp32",))), "choices"),
            (SearchConfig(storage=file), (PRECISION,), "axes"),
        ):
            with pytest.raises(ConfigError, match=word):
                optuna_study.open_study(search, space, tmp_path)
        wider_axis = IntervalAxis("optimizer.lr", 1e-6, 1.0, log=True)
        assert optuna_study.open_study(
            SearchConfig(storage=file), (wider_axis, PRECISION), tmp_path
        ).ask_trials()

    def test_study_visits_a_grid_once(self, tmp_path: Path) -> None:
        space = [ChoiceAxis("a", ("1", "2")), IntervalAxis("b", 1, 3, step=1)]
        search, points = SearchConfig(sampler="grid", jobs=4), []
        while True:
            optuna_search = optuna_study.open_study(
                search, space, tmp_path
            )  # as after a kill between batches
            trials = optuna_search.ask_trials()
            if not trials:
                break
            for trial in trials:
                points.append(point_overrides(trial.params))
                optuna_search.tell_outcome(trial, trial_outcome(1.0))
        assert sorted(points) == sorted(point_overrides(value) for value in grid_points(space))

    def test_study_constraint_outweighs_the_objective(self, tmp_path: Path) -> None:
        search = SearchConfig(trials=2, jobs=2, constraints={"memory/peak_bytes": 100.0})
        optuna_search = optuna_study.open_study(search, SPACE, tmp_path)
        small_trial, large_trial = optuna_search.ask_trials()
        optuna_search.tell_outcome(small_trial, trial_outcome(2.0, **{"memory/peak_bytes": 90.0}))
        optuna_search.tell_outcome(large_trial, trial_outcome(1.0, **{"memory/peak_bytes": 110.0}))
        assert [trial.number for trial in optuna_study.pareto_trials(optuna_search)] == [
            small_trial.number
        ]
        trial_records = optuna_study.build_record(optuna_search, tmp_path)["trials"]
        assert isinstance(trial_records, list)
        assert trial_records[1]["over"] == {"memory/peak_bytes": 10.0}

    def test_study_sampler_uses_the_constraint(self, tmp_path: Path) -> None:
        """TPE samples feasible values with the constraint, and the best loss without it."""
        feasible_fraction = {}
        for bounds in ({}, {"memory/peak_bytes": 50.0}):
            search = SearchConfig(trials=30, constraints=bounds, study=str(len(bounds)))
            optuna_search = optuna_study.open_study(search, [IntervalAxis("a", 0.0, 1.0)], tmp_path)
            while trials := optuna_search.ask_trials():
                for trial in trials:
                    a = float(trial.params["a"])
                    optuna_search.tell_outcome(
                        trial, trial_outcome(1 - a, **{"memory/peak_bytes": 100 * a})
                    )
            late_values = [trial.params["a"] for trial in optuna_search.study.trials[15:]]
            feasible_fraction[len(bounds)] = sum(value <= 0.5 for value in late_values) / len(
                late_values
            )
            (best,) = optuna_study.pareto_trials(optuna_search)
            assert best.params["a"] <= (0.5 if bounds else 1.0), bounds
        assert feasible_fraction[1] > 0.4 > 0.1 > feasible_fraction[0]

    def test_study_of_several_objectives_has_a_pareto_front(self, tmp_path: Path) -> None:
        objectives = {"val/loss": "minimize", "throughput/tokens_per_s": "maximize"}
        optuna_search = optuna_study.open_study(
            SearchConfig(trials=3, jobs=3, objectives=objectives), SPACE, tmp_path
        )
        for trial, loss, speed in zip(
            optuna_search.ask_trials(), (1.0, 2.0, 3.0), (10, 30, 20), strict=True
        ):
            optuna_search.tell_outcome(
                trial, trial_outcome(loss, **{"throughput/tokens_per_s": speed})
            )
        assert [trial.number for trial in optuna_study.pareto_trials(optuna_search)] == [0, 1]

    def test_study_importance_is_reported(self, tmp_path: Path) -> None:
        optuna_search = optuna_study.open_study(
            SearchConfig(trials=30, sampler="random"), SPACE, tmp_path
        )
        while trials := optuna_search.ask_trials():
            for trial in trials:
                optuna_search.tell_outcome(
                    trial, trial_outcome(float(trial.params["optimizer.lr"]))
                )
        importance = optuna_study.axis_importance(optuna_search)["val/loss"]
        assert importance["optimizer.lr"] > 0.9
        assert sum(importance.values()) == pytest.approx(1)

    def test_study_of_equal_values_has_no_importance(self, tmp_path: Path) -> None:
        optuna_search = optuna_study.open_study(SearchConfig(trials=5, jobs=5), SPACE, tmp_path)
        for trial in optuna_search.ask_trials():
            optuna_search.tell_outcome(trial, trial_outcome(1.0))
        json.dumps(optuna_study.build_record(optuna_search, tmp_path))


def job(
    sweep: Path, number: int, listed_status: str, status: str | None = None, **metrics: float
) -> None:
    """Write a job as a killed sweep leaves it."""
    row = {"number": number, "folder": str(number), "varied": {}, "status": listed_status}
    rows = [*optuna_study.sweep_jobs(sweep), row]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": rows}), "utf-8")
    if status is not None:
        (sweep / str(number)).mkdir(exist_ok=True)
        (sweep / str(number) / "status.json").write_text(
            json.dumps({"status": status, "reason": ""})
        )
        (sweep / str(number) / "summary.json").write_text(json.dumps({"metrics": metrics}))


class TestKilledSweep:
    """A sweep that was killed at any time, so that no process owns its trials."""

    @pytest.fixture
    def killed_search(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[OptunaSearch]:
        with monkeypatch.context() as patch:
            patch.setattr(optuna_study, "_process_id", lambda: f"{os.uname().nodename} 1 0.0")
            yield optuna_study.open_study(SearchConfig(trials=4, jobs=4), SPACE, tmp_path)

    def test_killed_sweep_loses_no_finished_trial(
        self, killed_search: OptunaSearch, tmp_path: Path
    ) -> None:
        for number, trial in enumerate(killed_search.ask_trials()):
            killed_search.assign_job(trial, tmp_path, number, tmp_path / str(number))
        job(tmp_path, 0, "ok", "ok", **{"val/loss": 1.0})
        job(
            tmp_path, 1, "running", "ok", **{"val/loss": 2.0}
        )  # killed before the record was updated
        job(tmp_path, 2, "running", "running")
        resumed_search = optuna_study.open_study(SearchConfig(trials=4), SPACE, tmp_path)
        assert len(resumed_search.reclaim_trials()) == 4
        assert [trial.value for trial in resumed_search.study.trials[:4]] == [1.0, 2.0, None, None]
        lost_params = [trial.params for trial in killed_search.study.trials[2:4]]
        assert [
            trial.params for trial in (*resumed_search.ask_trials(), *resumed_search.ask_trials())
        ] == lost_params
        assert resumed_search.ask_trials() == []

    def test_running_sweep_keeps_its_trials(self, tmp_path: Path) -> None:
        search = optuna_study.open_study(SearchConfig(trials=1), SPACE, tmp_path)
        (trial,) = search.ask_trials()
        search.assign_job(trial, tmp_path, 0, tmp_path / "0")
        other_search = optuna_study.open_study(SearchConfig(trials=1), SPACE, tmp_path)
        assert other_search.reclaim_trials() == []
        assert other_search.ask_trials() == []


class TestPruning:
    def linked(self, optuna_search: OptunaSearch, folder: Path) -> TrialLink:
        (trial,) = optuna_search.ask_trials()
        optuna_search.assign_job(trial, folder, trial.number, folder / str(trial.number))
        link = read_trial_link(folder / str(trial.number))
        assert link is not None
        return link

    @pytest.mark.parametrize("file", ["search.journal", "search.db"])
    def test_asha_prunes_the_worse_trial(self, tmp_path: Path, file: str) -> None:
        search = SearchConfig(pruner="asha", storage=str(tmp_path / file))
        optuna_search = optuna_study.open_study(search, SPACE, tmp_path)
        better_monitor = PruningMonitor(self.linked(optuna_search, tmp_path))
        assert [better_monitor.should_prune([(step, 1.0 / step)]) for step in (100, 200, 300)] == [
            False
        ] * 3
        worse_monitor = PruningMonitor(self.linked(optuna_search, tmp_path))
        assert worse_monitor.should_prune([(100, 5.0)])
        assert optuna_search.study.trials[1].intermediate_values == {100: 5.0}

    def test_median_pruner_prunes_the_worse_half(self, tmp_path: Path) -> None:
        optuna_search = optuna_study.open_study(SearchConfig(pruner="median"), SPACE, tmp_path)
        for loss in range(5):
            monitor = PruningMonitor(self.linked(optuna_search, tmp_path))
            assert not monitor.should_prune([(10, float(loss))]), loss
            trial = optuna.trial.Trial(
                optuna_search.study, optuna_search.study.trials[-1]._trial_id
            )
            optuna_search.tell_outcome(trial, trial_outcome(float(loss)))
        assert PruningMonitor(self.linked(optuna_search, tmp_path)).should_prune([(10, 99.0)])
        assert not PruningMonitor(self.linked(optuna_search, tmp_path)).should_prune([(10, -1.0)])

    def test_unreachable_study_prunes_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        link = TrialLink(str(tmp_path / "none.journal"), "no such study", 0, "asha", "val/loss")
        assert not PruningMonitor(link).should_prune([(1, 1.0)])
        assert "cannot reach the study" in capsys.readouterr().out

    def test_pruned_trial_is_recorded_as_pruned(self, tmp_path: Path) -> None:
        optuna_search = optuna_study.open_study(
            SearchConfig(trials=1, pruner="asha"), SPACE, tmp_path
        )
        (trial,) = optuna_search.ask_trials()
        trial.report(3.0, 10)
        optuna_search.tell_outcome(trial, trial_outcome(3.0, status="pruned"))
        assert optuna_search.study.trials[0].state is TrialState.PRUNED
        assert optuna_study.pareto_trials(optuna_search) == []
        assert optuna_search.ask_trials() == []

    def test_pruned_outcome_is_not_a_failure(self) -> None:
        outcome = outcome_of_exception(Pruned("the study stopped it after step 4"), 0)
        assert (outcome.status, outcome.exit_code) == ("pruned", 0)

    def test_trial_link_requires_a_pruner(self, tmp_path: Path) -> None:
        optuna_search = optuna_study.open_study(SearchConfig(), SPACE, tmp_path)
        (trial,) = optuna_search.ask_trials()
        optuna_search.assign_job(trial, tmp_path, 0, tmp_path / "0")
        assert read_trial_link(tmp_path / "0") is None
