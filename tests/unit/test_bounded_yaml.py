"""YAML that expands or nests without bound is rejected with the name of its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from fixtures.run_folders import make_run

from scalewise import bounded_yaml, cli
from scalewise.bounded_yaml import YamlLimitError
from scalewise.run_files import read_yaml

LIST_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
MAPPING_BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}\n" for n in range(1, 40)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} [{{<<: *a0}}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)
)
REJECTED_TEXTS = {
    "lists": LIST_BOMB,
    "mappings": MAPPING_BOMB,
    "merge keys": MERGE_BOMB,
    "deep flow": "question: " + "[" * 100_000 + "]" * 100_000,
    "deep and cut off": "question: " + "[" * 100_000,
    "deep blocks": "".join(f"{' ' * n}k:\n" for n in range(700)),
    "self": "question: &a [*a]",
    "unknown alias": "question: *nowhere",
}


@pytest.mark.parametrize("text", REJECTED_TEXTS.values(), ids=REJECTED_TEXTS)
def test_bounded_yaml_rejects_unbounded_documents(text: str) -> None:
    with pytest.raises(yaml.YAMLError if text.endswith("nowhere") else YamlLimitError):
        bounded_yaml.load_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: 1",
        "a: &x [1, 2]\nb: *x\nc: {d: *x}",
        "- {a: [{b: [c]}]}",
        "a: &x {y: 1}\nb: {<<: *x}",
    ],
)
def test_bounded_yaml_equals_safe_load(text: str) -> None:
    assert bounded_yaml.load_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", REJECTED_TEXTS.values(), ids=REJECTED_TEXTS)
@pytest.mark.parametrize(
    ("file", "choice"),
    [
        ("experiments/bad.yaml", "experiment=bad"),
        ("sweep/bad.yaml", "sweep=bad"),
        ("model/bad.yaml", "model=bad"),
        ("hydra/launcher/bad.yaml", "hydra/launcher=bad"),
    ],
)
def test_bounded_yaml_checks_user_config_folders(
    text: str, file: str, choice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert cli.main(["plan", "-cd", str(tmp_path), choice]) == 2
    assert "scalewise: config rejected" in capsys.readouterr().err


@pytest.mark.parametrize("text", REJECTED_TEXTS.values(), ids=REJECTED_TEXTS)
def test_bounded_yaml_checks_resolved_configs(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", steps=4)
    (run / "resolved.yaml").write_text(text)
    assert read_yaml(run / "resolved.yaml") == {}
    for command in ("evaluate", "export"):
        assert cli.main([command, str(run)]) == 2, command
    assert "resolved.yaml" in capsys.readouterr().err
