"""Searches as W&B Sweeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from scalewise.config.sweep_preview import preview_search
from scalewise.errors import ConfigError
from scalewise.hpo.config import SearchConfig
from scalewise.hpo.space import Axis, ChoiceAxis, IntervalAxis
from scalewise.run_config import RunConfig
from scalewise.tracking import wandb_sweeps
from scalewise.tracking.wandb_session import _without_flat_keys

PRECISION = ChoiceAxis("precision", ("fp32", "bf16_mixed"))


def sweep_config(*space: Axis, **options: Any) -> dict[str, Any]:
    return wandb_sweeps.wandb_sweep_config(
        SearchConfig(**options), space, ["seed=3"], "name", "why?"
    )


@pytest.mark.parametrize(
    ("axis", "parameter"),
    [
        (PRECISION, {"values": ["fp32", "bf16_mixed"]}),
        (ChoiceAxis("a", ("1", "2.5", "null")), {"values": [1, 2.5, "null"]}),
        (IntervalAxis("a", 0.0, 0.5, step=0.25), {"values": [0.0, 0.25, 0.5]}),
        (IntervalAxis("a", 1.0, 2.0), {"distribution": "uniform", "min": 1.0, "max": 2.0}),
        (IntervalAxis("a", 1, 8), {"distribution": "int_uniform", "min": 1, "max": 8}),
        (
            IntervalAxis("a", 1e-5, 1e-2, log=True),
            {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-2},
        ),
        (
            IntervalAxis("a", 4, 64, log=True),
            {"distribution": "q_log_uniform_values", "min": 4, "max": 64, "q": 1},
        ),
    ],
)
def test_wandb_parameters_cover_every_axis(axis: Axis, parameter: dict[str, Any]) -> None:
    assert sweep_config(axis)["parameters"] == {axis.key: parameter}


@pytest.mark.parametrize(
    ("options", "method", "cap"),
    [
        ({}, "bayes", 20),
        ({"sampler": "random", "trials": 5}, "random", 5),
        ({"sampler": "grid"}, "grid", None),
        ({"sampler": "grid", "trials": 1}, "grid", 1),
    ],
)
def test_wandb_methods_cover_every_sampler(
    options: dict[str, Any], method: str, cap: int | None
) -> None:
    config = sweep_config(PRECISION, **options)
    assert (config["method"], config.get("run_cap")) == (method, cap)


def test_wandb_sweep_metric_is_a_summary_key() -> None:
    objective = {"throughput/tokens_per_s": "maximize"}
    config = sweep_config(PRECISION, objectives=objective)
    assert config["metric"] == {"name": "final/throughput/tokens_per_s", "goal": "maximize"}


def test_wandb_sweep_command_is_a_train_command() -> None:
    """Builds the command as the W&B client does."""
    config = sweep_config(PRECISION, IntervalAxis("optimizer.lr", 1e-5, 1e-2))
    args = {"precision": {"value": "bf16_mixed"}, "optimizer.lr": {"value": 3e-05}}
    words = create_sweep_command_args({"args": args})
    words |= {"env": ["env"], "interpreter": ["python"], "program": [config["program"]]}
    overrides: list[str] = []
    for argument in create_sweep_command(config["command"]):
        overrides += words[argument[2:-1]] if argument.startswith("${") else [argument]
    assert " ".join(overrides) == (
        "env python -P -m scalewise train seed=3 precision=bf16_mixed optimizer.lr=3e-05"
    )


def test_wandb_sweep_rejects_unsupported_searches() -> None:
    objectives = {"val/loss": "minimize", "throughput/tokens_per_s": "maximize"}
    with pytest.raises(ConfigError, match="one metric"):
        sweep_config(PRECISION, objectives=objectives)
    assert sweep_config(PRECISION, objectives=objectives, sampler="random")["method"] == "random"
    with pytest.raises(ConfigError, match="requires a step"):
        sweep_config(IntervalAxis("a", 1.0, 2.0), sampler="grid")


def test_wandb_sweep_notes_omitted_settings() -> None:
    objectives = {"val/loss": "minimize", "throughput/tokens_per_s": "maximize"}
    search = SearchConfig(
        objectives=objectives, constraints={"memory/peak_bytes": 1.0}, pruner="asha"
    )
    notes = " ".join(wandb_sweeps.unsupported_settings(search))
    assert all(word in notes for word in ("memory/peak_bytes", "asha", "throughput/tokens_per_s"))
    assert wandb_sweeps.unsupported_settings(SearchConfig()) == []


class TestAgentOverrides:
    def test_agent_overrides_are_parsed(self) -> None:
        preview = preview_search(
            ["-m", "sweep=precision_by_layout", "experiment=smoke", "seed=1,2"]
        )
        assert [axis.key for axis in preview.space] == ["precision", "parallelism", "seed"]
        assert preview.fixed_overrides == ["experiment=smoke"]
        assert preview.name == "smoke-precision_by_layout"
        assert wandb_sweeps.sweeper_search(preview.sweeper, preview.sweeper_name) == SearchConfig(
            sampler="grid"
        )

    def test_command_line_wins_over_the_wandb_sweep(self) -> None:
        preview = preview_search(["sweep=precision_by_layout", "precision=fp32"])
        assert [axis.key for axis in preview.space] == ["parallelism"]
        assert preview.fixed_overrides == ["precision=fp32"]

    def test_hydra_options_are_not_agent_overrides(self) -> None:
        preview = preview_search(["sweep=search_learning_rate", "hydra.sweeper.trials=3"])
        assert preview.fixed_overrides == []
        assert wandb_sweeps.sweeper_search(preview.sweeper, preview.sweeper_name) == SearchConfig(
            trials=3, pruner="asha"
        )

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            ("+hydra.sweeper.zip.seed=[1,2]", "hydra/sweeper=basic: W&B .* support zip; use"),
            ("hydra/sweeper=screen", "hydra/sweeper=screen: W&B .* support .*repeats.*; use"),
        ],
    )
    def test_other_sweepers_are_rejected_by_name(self, overrides: str, words: str) -> None:
        preview = preview_search(["optimizer.lr=1e-3,1e-2", overrides])
        with pytest.raises(ConfigError, match=words):
            wandb_sweeps.sweeper_search(preview.sweeper, preview.sweeper_name)

    def test_agent_command_includes_the_user_config_folder(self, tmp_path: Path) -> None:
        (tmp_path / "sweeps").mkdir()
        text = "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n"
        (tmp_path / "sweeps" / "mine.yaml").write_text(text, "utf-8")
        preview = preview_search(["-cd", str(tmp_path), "sweep=mine"])
        assert preview.space == [ChoiceAxis("seed", ("1", "2"))]
        assert preview.fixed_overrides == ["-cd", str(tmp_path)]

    def test_agent_run_is_rejected_as_by_train(self) -> None:
        with pytest.raises(ConfigError, match="did you mean"):
            preview_search(["-m", "optimizer.lrr=1", "seed=1,2"])


def test_agent_override_of_a_chosen_option(
    compose: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = compose("precision=bf16_mixed").as_dict()
    assert _without_flat_keys(run) == run
    file = tmp_path / "config.yaml"
    file.write_text("wandb_version: 1\nprecision: {value: bf16_mixed}\n", "utf-8")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(file))
    config = _without_flat_keys(run)
    assert "precision" not in config
    assert config["parts"] == {"precision": run["precision"]}
    assert config["model"] == run["model"]
