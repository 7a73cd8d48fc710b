"""Options composed from cached schemas equal Hydra's compositions."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.scalewise_config_sources import ConfFolderSearchPath, ConfFolderSource
from scalewise.config import app, paths
from scalewise.config.hydra_policy import hydra_session

GROUPS = [group for group in paths.CLOSED_GROUPS if group != "hardware"]
MAX_OPTIONS = max(len(paths.option_names(group)) for group in GROUPS)
OVERRIDE_LISTS = [
    [
        f"{group}={names[index % len(names)]}"
        for group in GROUPS
        for names in [paths.option_names(group)]
    ]
    for index in range(MAX_OPTIONS)
]
"""Every option at least once."""


def composed(overrides: list[str]) -> DictConfig:
    app.prepare()
    with hydra_session():
        return hydra.compose("config", overrides=overrides)


@pytest.mark.parametrize("overrides", OVERRIDE_LISTS, ids=" ".join)
def test_composed_config_equals_plain_hydra(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = composed(overrides)
    monkeypatch.setattr(
        ConfFolderSearchPath, "manipulate_search_path", lambda self, search_path: None
    )
    expected = composed(overrides)
    assert OmegaConf.to_yaml(actual) == OmegaConf.to_yaml(expected)
    for group in GROUPS:
        assert OmegaConf.get_type(actual, group) is OmegaConf.get_type(expected, group), group
        assert OmegaConf.is_struct(actual[group]) is OmegaConf.is_struct(expected[group]), group


@pytest.mark.parametrize(
    ("text", "is_flat"),
    [
        ("lr: 0.5", True),
        ("lr: much", False),
        ("rate: 0.5", False),
        ("", True),
    ],
)
def test_file_with_a_schema_error_is_composed_by_hydra(
    text: str, is_flat: bool, tmp_path: Path
) -> None:
    app.prepare()
    (tmp_path / "mine.yaml").write_text(
        f"defaults:\n  - /schema/optimizer/adamw@_here_\n  - _self_\n\n{text}\n", "utf-8"
    )
    config = ConfFolderSource("main", str(tmp_path)).load_config("mine").config
    assert ("defaults" not in config) is is_flat
    assert ("_target_" in config) is is_flat


@pytest.mark.parametrize(
    "defaults",
    ["[/optimizer/adamw@_here_, _self_]", "[/schema/optimizer/none@_here_, _self_]", "[_self_]"],
)
def test_file_with_other_defaults_is_composed_by_hydra(defaults: str, tmp_path: Path) -> None:
    app.prepare()
    (tmp_path / "mine.yaml").write_text(f"defaults: {defaults}\nlr: 1.0\n", "utf-8")
    config = ConfFolderSource("main", str(tmp_path)).load_config("mine").config
    assert set(config) == {"defaults", "lr"}


def test_edited_file_is_read_again(tmp_path: Path) -> None:
    app.prepare()
    source, file = ConfFolderSource("main", str(tmp_path)), tmp_path / "mine.yaml"
    head = "defaults: [/schema/optimizer/adamw@_here_, _self_]"
    for rate in (0.5, 0.25):
        file.write_text(f"{head}\nlr: {rate}\n", "utf-8")
        for _ in range(2):
            config = source.load_config("mine").config
            assert isinstance(config, DictConfig), rate
            assert config.lr == rate, rate
            config.lr = 7.0  # belongs to the caller
