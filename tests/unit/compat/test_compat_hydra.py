"""Private names of Hydra and OmegaConf: presence, signature and relied-on behaviour."""

import logging
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from inspect import signature
from io import StringIO
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from scalewise.compat import hydra as compat_hydra
from scalewise.compat import omegaconf as compat_omegaconf
from scalewise.config import app
from scalewise.config.hydra_policy import hydra_session


def parameters(function: Callable[..., Any]) -> list[str]:
    return [*signature(function).parameters]


@pytest.fixture
def loader() -> Iterator[Any]:
    app.prepare()
    with hydra_session() as session_loader:
        yield session_loader


def test_get_args_parser_has_a_flag_per_destination() -> None:
    parser = compat_hydra.get_args_parser()
    assert isinstance(parser, ArgumentParser)
    flags = vars(parser.parse_intermixed_args(["a=1", "-m", "b=2", "--cfg", "job"]))
    assert (flags["overrides"], flags["multirun"], flags["cfg"]) == (["a=1", "b=2"], True, "job")
    assert {"config_dir", "config_path", "experimental_rerun", "hydra_help"} <= set(flags)


def test_file_config_source_loads_a_file(tmp_path: Path) -> None:
    Path(tmp_path, "x.yaml").write_text("# @package _global_\na: 1\n")
    source = compat_hydra.FileConfigSource("test", f"file://{tmp_path}")
    result = source.load_config("x")
    assert (result.config, result.header["package"]) == ({"a": 1}, "_global_")


def test_config_source_helpers(tmp_path: Path) -> None:
    Path(tmp_path, "x.yaml").write_text("a: 1\n")
    source = compat_hydra.FileConfigSource("test", f"file://{tmp_path}")
    assert compat_hydra.normalized_file_name(source, "x") == "x.yaml"
    assert compat_hydra.header_dict(source, "# @package _global_\na: 1\n")["package"] == "_global_"
    names: list[str] = []
    compat_hydra.add_listed_name(source, names, "x", "x", ObjectType.CONFIG)
    compat_hydra.add_listed_name(source, names, "x", "x", ObjectType.GROUP)
    assert names == ["x"]


def test_composition_steps_have_the_expected_parameters() -> None:
    assert parameters(compat_hydra.parse_overrides) == ["self", "config_name", "overrides"]
    assert parameters(compat_hydra.compose_defaults) == ["self", "defaults", "repo"]
    assert parameters(compat_hydra.create_defaults_list) == [
        "repo",
        "config_name",
        "overrides_list",
        "prepend_hydra",
        "skip_missing",
    ]
    assert parameters(compat_hydra.create_interpolation_map) == [
        "overrides",
        "defaults_list",
        "self_added",
    ]
    assert parameters(compat_hydra.DefaultsList) == [
        "defaults",
        "defaults_tree",
        "config_overrides",
        "overrides",
    ]
    assert parameters(compat_hydra.Overrides) == ["repo", "overrides_list"]
    assert parameters(compat_hydra.IConfigRepository.load_config) == ["self", "config_path"]


def test_composition_steps_compose_a_config(loader: Any) -> None:
    assert isinstance(loader, compat_hydra.ConfigLoaderImpl)
    texts = ["optimizer=sgd", "seed=3"]
    overrides, repo = compat_hydra.parse_overrides(loader, "config", texts)
    assert overrides == OverridesParser.create().parse_overrides(texts)
    assert isinstance(repo, compat_hydra.CachingConfigRepository)
    defaults = compat_hydra.create_defaults_list(repo, "config", overrides, True, False)
    assert [override.input_line for override in defaults.config_overrides] == ["seed=3"]
    assert "optimizer/sgd" in [default.config_path for default in defaults.defaults]
    config = compat_hydra.compose_defaults(loader, defaults.defaults, repo)
    assert config.optimizer._target_.endswith("SGDConfig")
    assert config.seed != 3


def test_replaced_composition_is_called_by_a_composition(loader: Any) -> None:
    calls: list[str] = []

    def record(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def record_call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return record_call

    with compat_hydra.replaced_composition(
        parse=record("parse", compat_hydra.parse_overrides),
        compose=record("compose", compat_hydra.compose_defaults),
        list_defaults=record("list", compat_hydra.create_defaults_list),
        map_choices=record("map", compat_hydra.create_interpolation_map),
    ):
        hydra.compose("config")
    assert {"parse", "compose", "list", "map"} == set(calls)
    calls.clear()
    hydra.compose("config")
    assert calls == []


def run_application(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[DictConfig]:
    """Run a Hydra application with ``config.yaml`` of the current folder; return its configs."""
    monkeypatch.setattr("sys.argv", ["application", *arguments])
    configs: list[DictConfig] = []
    main = hydra.main(version_base="1.3", config_path=str(Path.cwd()), config_name="config")
    main(configs.append)()
    return configs


@pytest.fixture
def application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[DictConfig]]:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(
        "a: 1\n"
        "defaults:\n  - override hydra/hydra_logging: none\n  - override hydra/job_logging: none\n"
        "hydra:\n  run:\n    dir: out\n"
    )
    return lambda *arguments: run_application(monkeypatch, *arguments)


def test_replaced_loading_sees_configs_search_paths_and_saved_files(
    application: Callable[..., list[DictConfig]],
) -> None:
    load = compat_hydra.ConfigLoaderImpl.load_configuration
    append = compat_hydra.ConfigSearchPathImpl.append
    calls: dict[str, list[Any]] = {"load": [], "append": [], "save": []}

    def load_recorded(*args: Any, **kwargs: Any) -> DictConfig:
        calls["load"].append(config := load(*args, **kwargs))
        return config

    def append_recorded(self: Any, provider: str, path: str, *args: Any) -> None:
        calls["append"].append((provider, path))
        append(self, provider, path, *args)

    def save_recorded(cfg: DictConfig, filename: str, output_dir: Path) -> None:
        calls["save"].append(f"{output_dir.name}/{filename}")

    with compat_hydra.replaced_loading(
        load_configuration=load_recorded, append=append_recorded, save_config=save_recorded
    ):
        (config,) = application()
    assert config == {"a": 1}
    assert [loaded.a for loaded in calls["load"]] == [1, 1], "for the mode and for the run"
    assert ("main", str(Path.cwd())) in calls["append"]
    names = ["config.yaml", "hydra.yaml", "overrides.yaml"]
    assert calls["save"] == [f".hydra/{name}" for name in names]
    assert not Path("out/.hydra").exists()
    assert compat_hydra.ConfigLoaderImpl.load_configuration is load


@pytest.mark.usefixtures("restored_logging")
def test_log_setup_hook_follows_each_setup(application: Callable[..., list[DictConfig]]) -> None:
    logger = logging.getLogger("scalewise.test_log_setup_hook")
    disabled: list[bool] = []

    def record() -> None:
        disabled.append(logger.disabled)
        logger.disabled = False

    with compat_hydra.log_setup_hook(record):
        application("hydra/hydra_logging=disabled", "hydra/job_logging=disabled")
    assert disabled == [True, True]
    application("hydra/job_logging=disabled")
    assert disabled == [True, True]


def test_replaced_path_class_creates_the_run_folder(
    application: Callable[..., list[DictConfig]],
) -> None:
    created: list[str] = []

    class RecordingPath(type(Path())):  # type: ignore[misc]
        def mkdir(self, *args: Any, **kwargs: Any) -> None:
            created.append(self.name)
            super().mkdir(*args, **kwargs)

    with compat_hydra.replaced_path_class(RecordingPath):
        application()
    assert created[0] == "out"


def test_run_job_hook_sees_the_config_before_the_folder_exists(
    application: Callable[..., list[DictConfig]],
) -> None:
    folder_exists: list[tuple[int, bool]] = []
    hook = compat_hydra.run_job_hook(
        lambda config: folder_exists.append((config.a, Path("out").exists()))
    )
    with hook:
        assert application() == [{"a": 1}]
    assert folder_exists == [(1, False)]
    assert Path("out").is_dir()


def test_without_mode_composition_composes_once(
    application: Callable[..., list[DictConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = compat_hydra.ConfigLoaderImpl.load_configuration
    load_calls: list[object] = []

    def count_call(*args: Any, **kwargs: Any) -> DictConfig:
        load_calls.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(compat_hydra.ConfigLoaderImpl, "load_configuration", count_call)
    with compat_hydra.without_mode_composition():
        assert application() == [{"a": 1}]
    assert len(load_calls) == 1


def test_suspended_application_is_restored(loader: Any) -> None:
    outer = GlobalHydra.instance().hydra
    with pytest.raises(ValueError, match="already initialized"):
        hydra.initialize_config_dir(str(Path.cwd()), version_base="1.3")
    with (
        compat_hydra.suspended_application(),
        hydra.initialize_config_dir(str(Path.cwd()), version_base="1.3"),
    ):
        assert GlobalHydra.instance().hydra is not outer
        assert GlobalHydra.instance().config_loader() is not loader
    assert GlobalHydra.instance().hydra is outer


def test_yaml_loader_is_read_at_each_load() -> None:
    original = compat_omegaconf.yaml_loader()
    assert issubclass(original, yaml.SafeLoader)

    class Loader(original):  # type: ignore[misc, valid-type]
        def get_single_data(self) -> object:
            return {"replaced": True}

    compat_omegaconf.replace_yaml_loader(Loader)
    try:
        assert OmegaConf.load(StringIO("a: 1")) == {"replaced": True}
        assert OmegaConf.create("a: 1") == {"replaced": True}
    finally:
        compat_omegaconf.replace_yaml_loader(original)
    assert OmegaConf.load(StringIO("a: 1")) == {"a": 1}


def test_nodes_move_between_configs() -> None:
    config = OmegaConf.create({"a": {"b": "${c}"}, "c": 2}, flags={"struct": True})
    nodes = compat_omegaconf.child_nodes(config)
    assert [*nodes] == ["a", "c"]
    for node in nodes.values():
        compat_omegaconf.detach(node)
        assert node._get_parent() is None, node
    copied_config = compat_omegaconf.build_config(compat_omegaconf.node_metadata(config), nodes)
    assert copied_config.a.b == 2
    assert OmegaConf.is_struct(copied_config)
    copied_config.a.b = 3
    assert compat_omegaconf.child_nodes(nodes["a"])["b"]._value() == "${c}"  # type: ignore[arg-type]


def test_interpolation_text_and_full_key() -> None:
    config = OmegaConf.create({"a": {"b": "${c}", "d": 1}, "c": 2})
    nodes = compat_omegaconf.child_nodes(config.a)
    assert compat_omegaconf.interpolation_text(nodes["b"]) == "${c}"
    assert compat_omegaconf.interpolation_text(nodes["d"]) == ""
    assert compat_omegaconf.full_key(nodes["b"]) == "a.b"


def test_interpolations_hook_sees_resolved_nodes() -> None:
    config = OmegaConf.create({"a": "${c}", "b": "${c}", "c": {"x": 2}})
    keys: list[str] = []
    with compat_omegaconf.interpolations_hook(
        lambda node: keys.append(compat_omegaconf.full_key(node))
    ):
        config.merge_with({"a": {"y": 3}})
    assert config.a == {"x": 2, "y": 3}, "a merge copies the target of an interpolation"
    assert "a" in keys
    assert "b" not in keys
    keys.clear()
    config.merge_with({"b": {"y": 4}})
    assert keys == []
