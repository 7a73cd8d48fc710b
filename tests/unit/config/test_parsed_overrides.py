"""Sweep axes: products, zips, lists, ranges, overrides and rejections."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from fixtures.recording_command import RecordingCommand

from scalewise.config.app import SweepJob, run_command
from scalewise.config.sweep_preview import preview_search
from scalewise.errors import ConfigError
from scalewise.expectations import Expectation
from scalewise.hpo.space import IntervalAxis

Jobs = Callable[..., list[SweepJob]]


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Function that expands overrides and the contents of a sweep file, ``sweep=own``, to jobs."""
    monkeypatch.chdir(tmp_path)

    def expanded(*overrides: str, **sweeper: object) -> list[SweepJob]:
        file = tmp_path / "own" / "sweeps" / "own.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"hydra": {"mode": "MULTIRUN", "sweeper": sweeper}}
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        command = RecordingCommand()
        assert run_command(command, ["-cd", "own", "sweep=own", *overrides]) == 0
        return command.jobs

    return expanded


def varied(jobs: Sequence[SweepJob], *keys: str) -> list[tuple[str, ...]]:
    return [tuple(job.varied[key] for key in keys) for job in jobs]


ZIP = {"model.layers": "2,4", "optimizer.lr": "1e-3,5e-4"}


def test_grid_varies_the_last_parameter_fastest(jobs: Jobs) -> None:
    expanded = jobs(params={"seed": "choice(1,2)", "question": "same"})
    assert varied(expanded, "seed") == [("1",), ("2",)]
    expanded = jobs(params={"seed": "1,2", "model.layers": "range(2,7,2)"})
    crossed = list(itertools.product("12", "246"))
    assert varied(expanded, "seed", "model.layers") == crossed
    assert [(job.run.seed, job.run.model.layers) for job in expanded] == [
        (int(seed), int(layers)) for seed, layers in crossed
    ]
    assert [job.number for job in expanded] == [*range(6)]
    assert [job.folder.name for job in expanded] == [*"012345"]


def test_grid_pairs_zipped_parameters(jobs: Jobs) -> None:
    expanded = jobs(zip=ZIP)
    assert varied(expanded, *ZIP) == [("2", "0.001"), ("4", "0.0005")]


def test_grid_crosses_zipped_with_other_parameters(jobs: Jobs) -> None:
    expanded = jobs("precision=fp32,bf16_mixed", zip=ZIP, params={"seed": "1,2,3"})
    assert len(expanded) == 2 * 3 * 2
    pairs = {(job.run.model.layers, job.run.optimizer.lr) for job in expanded}
    assert pairs == {(2, 1e-3), (4, 5e-4)}


def test_override_replaces_a_sweep_axis(jobs: Jobs) -> None:
    (only_job,) = jobs("seed=7", params={"seed": "1,2,3"})
    assert only_job.run.seed == 7
    seed_jobs = jobs("seed=7,8", params={"seed": "1,2,3"})
    assert [job.run.seed for job in seed_jobs] == [7, 8]


def test_override_removes_a_key_from_a_zip(jobs: Jobs) -> None:
    expanded = jobs("optimizer.lr=1e-5,1e-4,1e-3", zip={**ZIP, "seed": "5,6"})
    assert len(expanded) == 6
    assert {(job.run.model.layers, job.run.seed) for job in expanded} == {(2, 5), (4, 6)}


def test_grid_keeps_the_order_of_experiments(jobs: Jobs) -> None:
    expanded = jobs(params={"experiment": "smoke,demo,communication/slow_link"})
    names = [job.run.choices["experiment"] for job in expanded]
    assert names == ["smoke", "demo", "communication/slow_link"]
    assert len({job.run.question for job in expanded}) == 3


@pytest.mark.parametrize("flags", [(), ("-m",)])
def test_grid_runs_with_and_without_the_multirun_flag(flags: tuple[str, ...], jobs: Jobs) -> None:
    assert [job.run.seed for job in jobs(*flags, params={"seed": "1,2"})] == [1, 2]


@pytest.mark.parametrize(
    ("sweeper", "issue"),
    [
        (
            {"zip": {"model.layers": "2,4,6", "optimizer.lr": "1e-3,5e-4"}},
            "hydra.sweeper.zip=[model.layers,optimizer.lr]: zipped axes have different lengths: "
            "model.layers 3, optimizer.lr 2; give each key the same number of values",
        ),
        ({"zip": {"seed": "1,2"}, "params": {"seed": "3,4"}}, "zip.seed=1,2: is also in params"),
        (
            {"params": {"seed": [1, 2]}},
            "seed=[1,2]: is not a string of values; write the values as one",
        ),
        ({"params": {"seed": "interval(1,2)"}}, "seed=interval(1,2): is not a list of values"),
        ({"params": {"seed": "range(5,1)"}}, "seed=range(5,1): has no values"),
        ({"params": {"optimizer.lrr": "1,2"}}, "no such key; did you mean optimizer.lr?"),
        ({"zip": {"sede": "1,2"}}, "no such key; did you mean seed?"),
        ({"params": {"optimizer": "adamw,adamv"}}, "no such option; did you mean adamw?"),
        ({"params": {"seed": "1,,2"}}, "cannot parse the override 'seed=1,,2'"),
        ({"params": {"optimizer.lr": "1e-3,-1"}}, "optimizer.lr=-1"),
    ],
)
def test_invalid_sweep_is_rejected_and_leaves_nothing(
    sweeper: dict[str, object], issue: str, jobs: Jobs, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as excinfo:
        jobs(**sweeper)
    (config_issue,) = excinfo.value.issues
    assert issue in str(config_issue)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


HUGE_RANGE = "range(1,1000000000)"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ([f"seed={HUGE_RANGE}"], "seed", "results in 999,999,999 jobs, and the maximum is 10,000"),
        ([f"seed=shuffle({HUGE_RANGE})"], "seed", "results in 999,999,999 jobs"),
        (["seed=range(1000000000,1,-1)"], "seed", "results in 999,999,999 jobs"),
        (["optimizer.lr=range(0,1,1e-12)"], "optimizer.lr", "results in 1,000,000,000,001 jobs"),
        (
            ["optimizer.lr=range(0,1e300,1e-300)"],
            "optimizer.lr",
            "results in more than 10**15 jobs",
        ),
        (["seed=range(0,1,0)"], "seed", "is an infinite range"),
        (["optimizer.lr=range(0,1,0.0)"], "optimizer.lr", "is an infinite range"),
        (["optimizer.lr=range(0,inf)"], "optimizer.lr", "is an infinite range"),
        (["seed=range(0,200)", "model.layers=range(1,101)"], "", "results in 20,000 jobs"),
    ],
)
@pytest.mark.parametrize("command", ["train", "wandb", "optuna"])
def test_sweep_of_too_many_jobs_is_rejected_without_listing(
    overrides: list[str], key: str, reason: str, command: str
) -> None:
    if command == "optuna":
        overrides = [
            *overrides,
            "hydra/sweeper=optuna",
            "+hydra.sweeper.objectives={val/loss: minimize}",
        ]
        overrides += ["hydra.sweeper.sampler=grid"]
        key = (
            key
            if "infinite range" in reason or "shuffle" in overrides[0]
            else "hydra.sweeper.sampler"
        )
    with pytest.raises(ConfigError) as excinfo:
        preview_search(["-m", *overrides]) if command == "wandb" else run_command(
            RecordingCommand(), ["-m", *overrides]
        )
    issues = {issue.key: issue for issue in excinfo.value.issues}
    issue = issues.get(key) or issues[""]  # for W&B, only the size of the grid is known
    assert reason in issue.reason
    assert issue.fix


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["hydra/sweeper=optuna", "hydra.sweeper.trials=1000000000"], "hydra.sweeper.trials"),
        (["hydra/sweeper=screen", "hydra.sweeper.repeats=1000000000"], "hydra.sweeper.repeats"),
    ],
)
def test_search_of_too_many_jobs_is_rejected(overrides: list[str], key: str) -> None:
    factors = "+hydra.sweeper.factors={model.layers:[1,2],precision:[fp32,bf16_mixed]}"
    axis = "seed=1,2" if "hydra/sweeper=optuna" in overrides else factors
    with pytest.raises(ConfigError, match="jobs, and the maximum is 10,000") as excinfo:
        run_command(RecordingCommand(), ["-m", axis, *overrides])
    assert key in [issue.key for issue in excinfo.value.issues]


def test_sweep_file_of_too_many_jobs_is_rejected(jobs: Jobs) -> None:
    with pytest.raises(ConfigError, match=r"seed=range.*maximum is 10,000"):
        jobs(params={"seed": HUGE_RANGE})
    with pytest.raises(ConfigError, match="results in 1,000,000 jobs"):
        jobs(params=dict.fromkeys(("seed", "model.layers", "model.width"), "range(1,101)"))
    with pytest.raises(ConfigError, match=r"seed=range.*maximum is 10,000"):
        jobs(zip={"seed": HUGE_RANGE, "model.layers": "1,2"})


def test_range_is_a_search_interval_without_listing() -> None:
    preview = preview_search(["-m", "hydra/sweeper=optuna", "seed=range(1,1000000000)"])
    assert preview.space == [IntervalAxis("seed", 1, 999_999_999, step=1)]
    preview = preview_search(["-m", "hydra/sweeper=optuna", "optimizer.lr=range(0.1,0.5,0.1)"])
    assert preview.space == [IntervalAxis("optimizer.lr", 0.1, 0.4, step=0.1)]


class TestCases:
    CASES: ClassVar[dict[str, object]] = {
        "small": {"overrides": "model.layers=1 model.width=32"},
        "large": {"overrides": "model.layers=2", "expect": {"status": "out_of_memory"}},
    }

    def test_cases_are_jobs_with_their_names_and_expectations(self, jobs: Jobs) -> None:
        small, large = jobs("hydra/sweeper=cases", "seed=3", cases=self.CASES)
        assert [job.varied for job in (small, large)] == [{"name": "small"}, {"name": "large"}]
        assert [job.run.name for job in (small, large)] == ["small", "large"]
        assert [job.run.seed for job in (small, large)] == [3, 3]
        assert [job.run.model.layers for job in (small, large)] == [1, 2]
        assert small.expectation == Expectation()
        assert large.expectation == Expectation("out_of_memory")

    def test_selected_cases_alone_are_jobs(self, jobs: Jobs) -> None:
        (job,) = jobs("hydra/sweeper=cases", "hydra.sweeper.only=[large]", cases=self.CASES)
        assert (job.run.name, job.number) == ("large", 0)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("seed=1,2", "seed: is varied by a sweep of cases"),
            ("model.layers=3", "model.layers: is set by cases of the sweep"),
            ("name=mine", "name: is set by cases of the sweep"),
            ("hydra.sweeper.only=tiny", "hydra.sweeper.only=tiny: is not a case"),
        ],
    )
    def test_cases_reject_overrides_that_they_would_hide(
        self, jobs: Jobs, line: str, message: str
    ) -> None:
        with pytest.raises(ConfigError) as error:
            jobs("hydra/sweeper=cases", line, cases=self.CASES)
        assert message.replace(": is", "=: is") in str(error.value) or message in str(error.value)
