"""Config nodes below ``hydra`` cannot run code from outside scalewise."""

import copy
import logging
import os
from pathlib import Path

import hydra
import pytest
import yaml
from fixtures.fixes import assert_fixes_work
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from scalewise.config import app, hydra_policy
from scalewise.config.app import Command, SweepJob, run_command
from scalewise.config.compose import compose
from scalewise.config.hydra_policy import hydra_session
from scalewise.errors import ConfigError
from scalewise.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("cpu_machine")

TARGETS = ("torch.hub.load", "shutil.copyfile", "sqlite3.connect", "os.makedirs")
"""Callables that Hydra itself lets a config name."""


class NoOpCommand(Command):
    """Command without effect."""

    def run_single(self, run: RunConfig, folder: Path) -> int:
        """Return success."""
        return 0

    def run_sweep(self, jobs: list[SweepJob], *_: object) -> list[object]:  # type: ignore[override]
        """Return success."""
        raise AssertionError(jobs)


def calls_of(target: str) -> dict[str, object]:
    """Config that creates the folder ``evil`` if any of its targets is called."""
    return {"_target_": target, "name": "evil"}


NODES: dict[str, dict[str, object]] = {
    **{f"callback-{target}": {"callbacks": {"x": calls_of(target)}} for target in TARGETS},
    "callback-own": {
        "callbacks": {"x": calls_of("hydra.experimental.callbacks.PickleJobInfoCallback")}
    },
    "callback-text": {"callbacks": "${oc.decode:'{x:{_target_:os.makedirs,name:evil}}'}"},
    "callback-entry": {"callbacks": {"x": "${data}"}},
    "launcher": {"launcher": calls_of("os.makedirs")},
    "launcher-of-hydra": {
        "launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}
    },
    "launcher-option": {"launcher": {"engine": calls_of("os.makedirs")}},
    "launcher-recursive": {"launcher": {"_recursive_": True, "engine": "${data}"}},
    "launcher-args": {"launcher": {"_args_": [calls_of("os.makedirs")]}},
    "sweeper": {"sweeper": calls_of("os.makedirs")},
    "sweeper-param": {"sweeper": {"params": {"seed": calls_of("os.makedirs")}}},
    "sweeper-list": {"sweeper": {"zip": {"seed": [[calls_of("os.makedirs")]]}}},
    "sweeper-optuna": {"sweeper": {"sampler": calls_of("optuna.samplers.TPESampler")}},
    "logging-factory": {"job_logging": {"handlers": {"x": {"()": "os.makedirs", "name": "evil"}}}},
    "logging-class": {"hydra_logging": {"handlers": {"x": {"class": "os.makedirs"}}}},
    "logging-external": {
        "hydra_logging": {
            "handlers": {"x": {"class": "logging.StreamHandler", "stream": "ext://this.s"}}
        }
    },
    "logging-lookup": {"job_logging": {"handlers": "${data}"}},
    "logging-file": {
        "job_logging": {"handlers": {"x": {"class": "logging.FileHandler", "filename": "evil"}}}
    },
    "logging-file-above": {
        "job_logging": {
            "handlers": {
                "x": {
                    "class": "logging.FileHandler",
                    "filename": "${hydra.runtime.output_dir}/../../evil",
                }
            }
        }
    },
    "job-name": {"job": {"name": "../../evil"}},
    "output-folder": {"output_subdir": "../../../evil"},
    "output-folder-text": {"output_subdir": "${oc.decode:../evil}"},
    "environment": {"job": {"env_set": {"LD_PRELOAD": "evil.so"}}},
    "elsewhere": {"runtime": {"choices": {"y": calls_of("os.makedirs")}}},
}


@pytest.mark.parametrize("flags", [[], ["-m"]], ids=["run", "multirun"])
@pytest.mark.parametrize("node", NODES.values(), ids=NODES)
def test_experiment_file_cannot_run_code(
    node: dict[str, object], flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own/experiments").mkdir(parents=True)
    Path("own/experiments/x.yaml").write_text(yaml.safe_dump({"hydra": node}))
    before = list(logging.getLogger().handlers)
    with pytest.raises(ConfigError) as excinfo:
        run_command(NoOpCommand(), [*flags, "-cd", "own", "experiment=x"])
    assert any(issue.key.startswith("hydra") for issue in excinfo.value.issues)
    assert logging.getLogger().handlers == before
    assert os.listdir() == ["own"]


@pytest.mark.parametrize("group", ["callbacks", "launcher", "sweeper", "job_logging"])
@pytest.mark.parametrize("flags", [[], ["-m"]], ids=["run", "multirun"])
def test_config_group_file_cannot_run_code(
    group: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"own/hydra/{group}").mkdir(parents=True)
    config: dict[str, object] = calls_of("os.makedirs")
    if group == "callbacks":
        config = {"x": config}
    if group == "job_logging":
        config = {"version": 1, "root": {"handlers": []}, "handlers": {"x": {"()": "os.makedirs"}}}
    Path(f"own/hydra/{group}/x.yaml").write_text(yaml.safe_dump(config))
    added = "+" if group == "callbacks" else ""
    with pytest.raises(ConfigError) as excinfo:
        run_command(NoOpCommand(), [*flags, "-cd", "own", f"{added}hydra/{group}=x"])
    assert any(issue.key.startswith("hydra") for issue in excinfo.value.issues)
    assert os.listdir() == ["own"]


@pytest.mark.parametrize(
    "overrides",
    [
        "+hydra.callbacks.x._target_=os.makedirs",
        "hydra.launcher._target_=os.makedirs",
        "hydra.sweeper._target_=hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "++hydra.sweeper._recursive_=true",
        "~hydra.launcher._recursive_",
        "+hydra.job.env_set.PYTHONPATH=x",
        "hydra.job.name=a/b",
        "hydra.output_subdir=../../evil",
        "hydra.output_subdir=/tmp/evil",
        "hydra.output_subdir=..",
        "hydra.searchpath=[pkg://json]",
        "hydra.searchpath=[pkg:///json]",
    ],
)
def test_override_cannot_run_code(overrides: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        compose([overrides])
    (issue,) = excinfo.value.issues
    assert issue.key.startswith("hydra")
    assert_fixes_work([overrides], issue, compose)
    with pytest.raises(ConfigError, match=issue.key.replace(".", r"\.")):
        run_command(NoOpCommand(), [overrides])


@pytest.mark.parametrize("flag", ["--config-path", "--config-dir"])
def test_config_search_path_imports_no_package(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("evil_configs.py").write_text("open('ran', 'w')")
    with pytest.raises(ConfigError):
        run_command(NoOpCommand(), [flag, "pkg://evil_configs"])
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        "hydra/job_logging=default",
        "hydra/job_logging=stdout",
        "hydra/job_logging=disabled",
        "hydra/hydra_logging=default",
        "hydra/hydra_logging=hydra_debug",
        "hydra/launcher=packed",
        "hydra/launcher=slurm",
        "hydra/sweeper=optuna",
        "hydra/sweeper=screen",
        "+hydra.sweeper.params.seed='1,2'",
        "hydra.job.env_copy=[PATH]",
        "hydra.run.dir=elsewhere",
        "hydra.output_subdir=.hydra",
        "hydra.searchpath=[pkg://scalewise.config]",
    ],
)
def test_policy_accepts_hydra_plugins_of_scalewise(overrides: str) -> None:
    compose([overrides])


def test_policy_does_not_affect_other_applications() -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

    before = ConfigLoaderImpl.load_configuration, ConfigSearchPathImpl.append
    with hydra_policy.enforce_policy(), hydra_policy.enforce_policy():
        assert ConfigLoaderImpl.load_configuration is not before[0]
    assert (ConfigLoaderImpl.load_configuration, ConfigSearchPathImpl.append) == before


NAMES = st.sampled_from(["x", "params", "handlers", "root", "engine", "0", "class", "_args_"])
SCALARS = st.sampled_from([1, None, True, "x", "${data}", "${oc.env:HOME}", "ext://sys.stdout"])
TARGET_NODES = st.sampled_from(
    [
        {"_target_": "os.makedirs", "name": "evil"},
        {"_target_": "${oc.decode:os.makedirs}"},
        {"_target_": "hydra_plugins.scalewise_launcher.ScalewiseLauncher", "x": 1},
        {"_target_": None, "_partial_": True},
        {"_target_": ["os.makedirs"]},
    ]
)
NESTED_NODES = st.recursive(
    TARGET_NODES,
    lambda inner: st.one_of(
        st.builds(lambda name, value, leaf: {"y": leaf, name: value}, NAMES, inner, SCALARS),
        st.builds(lambda value, leaf: [leaf, value], inner, SCALARS),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def hydra_node() -> DictConfig:
    """Default ``hydra`` node, without struct flags."""
    app.prepare()
    with hydra_session():
        hydra_config = hydra.compose("config", return_hydra_config=True).hydra
    container = OmegaConf.to_container(hydra_config, resolve=False)
    return OmegaConf.create({"hydra": container})


NODE_PATHS = (
    *("callbacks", "callbacks.x", "launcher.x", "sweeper.x", "sweeper.params.x", "job_logging.x"),
    *("hydra_logging.handlers.x.y", "help.x", "run.x", "runtime.choices.x", "env.x", "new"),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(NODE_PATHS),
    value=NESTED_NODES,
)
def test_policy_finds_nested_targets(hydra_node: DictConfig, path: str, value: object) -> None:
    config = copy.deepcopy(hydra_node)
    OmegaConf.update(config, f"hydra.{path}", value, merge=False, force_add=True)
    assert list(hydra_policy.policy_issues(config))


def test_defaults_have_no_foreign_targets(hydra_node: DictConfig) -> None:
    assert list(hydra_policy.policy_issues(hydra_node)) == []
