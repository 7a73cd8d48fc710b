"""User config folders given with ``-cd``: copied files work unchanged."""

from pathlib import Path

import pytest
from fixtures.recording_command import RecordingCommand
from hydra import compose as hydra_compose

from scalewise.commands.train import TrainCommand
from scalewise.config import app, paths
from scalewise.config.app import run_command
from scalewise.config.hydra_policy import hydra_session
from scalewise.config.sweep_preview import preview_search
from scalewise.errors import ConfigError
from scalewise.run_config import RunConfig

SMOKE_EXPERIMENT = (paths.project_root() / "experiments" / "smoke.yaml").read_text("utf-8")
FILES = {
    "experiment/copy.yaml": SMOKE_EXPERIMENT,
    "experiment/deep/copy.yaml": SMOKE_EXPERIMENT,
    "experiment/headed.yaml": f"# @package _global_\n{SMOKE_EXPERIMENT}",
    "experiment/model_only.yaml": "# @package model\nwidth: 64\n",
    "experiment/broken.yaml": "trainer: [1\n",
    "experiment/unknown_key.yaml": "optimizer: {speed: 3}\n",
    "experiment/dotted_key.yaml": "optimizer.lr: 3\n",
    "experiment/misspelt_key.yaml": "sede: 3\n",
    "experiments/as_in_the_tree.yaml": SMOKE_EXPERIMENT,
    "sweep/copy.yaml": (paths.project_root() / "sweeps" / "learning_rate.yaml").read_text("utf-8"),
    "model/mine.yaml": (paths.project_root() / "conf" / "model" / "decoder_nano.yaml").read_text(
        "utf-8"
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        file = tmp_path / "own" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, "utf-8")
    return "own"


def runs(folder: str, *overrides: str) -> list[RunConfig]:
    command = RecordingCommand()
    assert run_command(command, ["-cd", folder, *overrides]) == 0
    return command.runs


@pytest.mark.parametrize("name", ["copy", "deep/copy", "headed", "as_in_the_tree", "smoke"])
def test_user_folder_experiment_composes(name: str, folder: str) -> None:
    (run,) = runs(folder, f"experiment={name}", "optimizer.lr=1e-2")
    assert (run.trainer.max_steps, run.optimizer.lr) == (30, 1e-2)
    assert run.choices["experiment"] == name


def test_user_folder_sweep_runs_its_axes(folder: str) -> None:
    assert [run.optimizer.lr for run in runs(folder, "sweep=copy")] == [3e-4, 1e-3, 3e-3]


def test_user_folder_package_is_imported(folder: str) -> None:
    (run,) = runs(folder, "experiment=model_only")
    assert run.as_dict()["model"]["width"] == 64


@pytest.mark.parametrize(
    ("overrides", "issue"),
    [
        (["model=mine", "optimizer.lrr=1"], "optimizer.lrr=1: no such key"),
        (["experiment=deep/copi"], "experiment=deep/copi: no such option; did you mean deep/copy"),
        (["model=min"], "model=min: no such option; did you mean mine?"),
        (
            ["experiment=unknown_key"],
            "experiment=unknown_key: its file sets optimizer.speed, which is no key of the config; "
            "did you mean",
        ),
        (
            ["experiment=dotted_key"],
            "its file sets optimizer.lr, which is no key of the config; "
            "write it in nested form, optimizer: {lr: VALUE}",
        ),
        (
            ["experiment=misspelt_key"],
            "sets sede, which is no key of the config; did you mean seed?",
        ),
        (["experiment=broken"], "broken.yaml cannot be read: while parsing"),
    ],
)
def test_user_folder_is_named_in_rejections(overrides: list[str], issue: str, folder: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        runs(folder, *overrides)
    (config_issue,) = excinfo.value.issues
    assert issue in str(config_issue)


def test_user_folder_is_removed_after_the_command(folder: str) -> None:
    runs(folder, "experiment=copy")
    with pytest.raises(ConfigError, match="no such option"):
        run_command(RecordingCommand(), ["experiment=copy"])


PACKED = "defaults: [override /hydra/launcher: packed]\n"
PACKED_SWEEP = f"""{PACKED}
hydra: {{mode: MULTIRUN, launcher: {{slots: 2}}, sweeper: {{params: {{seed: '1,2'}}}}}}
"""
HYDRA_FILES = {
    "experiment/slurm.yaml": "defaults: [override /hydra/launcher: slurm]\n",
    "experiment/packed.yaml": PACKED,
    "experiment/screen.yaml": "defaults: [override /hydra/sweeper: screen]\n",
    "experiment/logged.yaml": "defaults: [override /hydra/job_logging: default]\n",
    "experiment/joblib.yaml": "defaults: [override /hydra/launcher: joblib]\n",
    "experiment/own_launcher.yaml": "defaults: [override /hydra/launcher: own]\n",
    "hydra/launcher/own.yaml": "# @package hydra.launcher\n"
    "_target_: hydra_plugins.scalewise_launcher.ScalewiseLauncher\n"
    "_recursive_: false\nengine: packed\n",
    "sweep/packed.yaml": PACKED_SWEEP,
    "sweep/screen.yaml": "defaults: [override /hydra/sweeper: screen]\n",
}
"""Experiments and sweeps that choose options of Hydra's groups."""


@pytest.fixture
def hydra_folder(folder: str) -> str:
    for name, content in HYDRA_FILES.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, "utf-8")
    return folder


@pytest.mark.parametrize(
    ("overrides", "group", "choice"),
    [
        ([], "launcher", "scalewise"),
        (["experiment=slurm"], "launcher", "slurm"),
        (["experiment=slurm", "sweep=packed"], "launcher", "packed"),
        (["sweep=packed", "hydra/launcher=scalewise"], "launcher", "scalewise"),
        (["experiment=packed", "hydra/launcher=slurm"], "launcher", "slurm"),
        ([], "sweeper", "basic"),
        (["experiment=screen"], "sweeper", "screen"),
        (["sweep=screen", "hydra/sweeper=optuna"], "sweeper", "optuna"),
        ([], "job_logging", "none"),
        (["experiment=logged"], "job_logging", "default"),
    ],
)
def test_hydra_groups_follow_the_order_of_precedence(
    overrides: list[str], group: str, choice: str, hydra_folder: str
) -> None:
    app.prepare()
    paths.mount_configs(Path(hydra_folder).absolute())
    with hydra_session():
        config = hydra_compose("config", overrides, return_hydra_config=True)
    assert config.hydra.runtime.choices[f"hydra/{group}"] == choice


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["sweep=packed"], {"engine": "packed", "slots": 2}),
        (["experiment=packed", "sweep=copy"], {"engine": "packed", "slots": None}),
        (
            ["sweep=packed", "hydra/launcher=scalewise", "~hydra.launcher.slots"],
            {"engine": "in_turn"},
        ),
    ],
)
def test_launcher_of_a_file_gets_its_options(
    overrides: list[str], options: dict[str, object], hydra_folder: str
) -> None:
    command = RecordingCommand()
    assert run_command(command, ["-cd", hydra_folder, *overrides]) == 0
    assert command.launcher_options == options


@pytest.mark.parametrize(
    ("overrides", "issue"),
    [
        (
            ["sweep=packed", "hydra/launcher=scalewise"],
            "hydra.launcher.slots=2: is not an option of hydra/launcher=scalewise; "
            "add '~hydra.launcher.slots'",
        ),
        (
            ["-m", "experiment=joblib", "seed=1,2"],
            "hydra/launcher=joblib: no such option, chosen by experiment=joblib; "
            "set hydra/launcher=packed instead",
        ),
        (
            ["-m", "experiment=own_launcher", "seed=1,2"],
            "hydra/launcher=own: is not a launcher of scalewise",
        ),
        (
            ["-m", "experiment=slurm", "seed=1,2", "hardware=h100", "optimizer.lrr=1"],
            "optimizer.lrr=1: no such key",
        ),
    ],
)
def test_launcher_of_a_file_is_rejected_with_a_fix(
    overrides: list[str], issue: str, hydra_folder: str
) -> None:
    with pytest.raises(ConfigError) as excinfo:
        run_command(TrainCommand(()), ["-cd", hydra_folder, *overrides])
    (config_issue,) = excinfo.value.issues
    assert str(config_issue).startswith(issue)
    assert [file.name for file in Path().iterdir()] == [hydra_folder]


def test_option_that_a_file_misspells_is_named_with_a_fix(hydra_folder: str) -> None:
    text = "defaults: [override /model: decoder_nan]\n"
    Path(hydra_folder, "experiment", "misspelled.yaml").write_text(text, "utf-8")
    with pytest.raises(ConfigError) as excinfo:
        runs(hydra_folder, "experiment=misspelled")
    (config_issue,) = excinfo.value.issues
    assert str(config_issue) == (
        "model=decoder_nan: no such option, chosen by experiment=misspelled; "
        "did you mean decoder_nano?"
    )


TRUSTING_FILES = {
    "experiment/trusting.yaml": "# @package _global_\ntrusted_packages: [foreign]\n",
    "experiment/recorded.yaml": """# @package _global_
trusted_packages: [foreign]
hydra: {overrides: {task: ["trusted_packages=[foreign]"]}}
""",
    "experiment/referring.yaml": """# @package _global_
question: "[foreign]"
tracking: {tags: [foreign]}
""",
    "sweep/trusting.yaml": "# @package _global_\n"
    "hydra: {mode: MULTIRUN, sweeper: {params: {trusted_packages: '[foreign],[]'}}}\n",
    "callbacks/trusting.yaml": "# @package _global_\ntrusted_packages: [foreign]\n",
}


@pytest.fixture
def trusting_folder(folder: str) -> str:
    for name, content in TRUSTING_FILES.items():
        file = Path(folder) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, "utf-8")
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=trusting"],
        ["experiment=recorded"],
        ["experiment=referring", "trusted_packages=${tracking.tags}"],
        ["callbacks=trusting"],
        ["-m", "experiment=trusting", "seed=1,2"],
        ["sweep=trusting"],
        ["experiment=trusting", "seed=1", "hydra.mode=MULTIRUN"],
    ],
)
def test_user_folder_file_cannot_trust_a_package(
    overrides: list[str], trusting_folder: str
) -> None:
    with pytest.raises(ConfigError) as excinfo:
        runs(trusting_folder, *overrides)
    messages = [str(it) for it in excinfo.value.issues if it.key == "trusted_packages"]
    assert len(messages) == 1, excinfo.value
    assert "trusted_packages=[foreign]: is set by a file" in messages[0]
    assert "add 'trusted_packages=[foreign]'" in messages[0]


def test_wandb_sweep_cannot_trust_a_package(trusting_folder: str) -> None:
    more = ",".join(map(str, range(300)))  # more jobs than are validated one by one
    for overrides in ((), (f"seed={more}",)):
        with pytest.raises(ConfigError, match="is set by a file"):
            preview_search(["-cd", trusting_folder, "sweep=trusting", *overrides])


@pytest.mark.parametrize(
    ("overrides", "trusted"),
    [
        (["experiment=trusting", "trusted_packages=[foreign,other]"], [("foreign", "other")]),
        (["experiment=trusting", "trusted_packages=[]"], [()]),
        (["experiment=trusting", "++trusted_packages=['foreign']"], [("foreign",)]),
        (["-m", "trusted_packages=[a],[b,c]"], [("a",), ("b", "c")]),
        (["sweep=trusting", "trusted_packages=[mine]"], [("mine",)]),
    ],
)
def test_command_line_trusts_packages(
    overrides: list[str], trusted: list[tuple[str, ...]], trusting_folder: str
) -> None:
    assert [run.trusted_packages for run in runs(trusting_folder, *overrides)] == trusted
