"""A folder of the user's by ``-cd``: files copied from the tree work there as they are."""

from pathlib import Path

import pytest
from fixtures.verbs import Noted

from scalewise.config import tree
from scalewise.config.door import open_door
from scalewise.errors import ConfigError
from scalewise.run import Run

SMOKE = (tree.root() / "experiments" / "smoke.yaml").read_text("utf-8")
FILES = {
    "experiment/copy.yaml": SMOKE,
    "experiment/deep/copy.yaml": SMOKE,
    "experiment/headed.yaml": f"# @package _global_\n{SMOKE}",
    "experiment/model_only.yaml": "# @package model\nwidth: 64\n",
    "experiment/broken.yaml": "trainer: [1\n",
    "experiments/as_in_the_tree.yaml": SMOKE,
    "sweep/copy.yaml": (tree.root() / "sweeps" / "learning_rate.yaml").read_text("utf-8"),
    "model/mine.yaml": (tree.root() / "conf" / "model" / "decoder_nano.yaml").read_text("utf-8"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        file = tmp_path / "own" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, "utf-8")
    return "own"


def runs(folder: str, *lines: str) -> list[Run]:
    verb = Noted()
    assert open_door(verb, ["-cd", folder, *lines]) == 0
    return verb.runs


@pytest.mark.parametrize("name", ["copy", "deep/copy", "headed", "as_in_the_tree", "smoke"])
def test_an_experiment(name: str, folder: str) -> None:
    (run,) = runs(folder, f"experiment={name}", "optimizer.lr=1e-2")
    assert (run.trainer.max_steps, run.optimizer.lr) == (30, 1e-2)
    assert run.choices["experiment"] == name


def test_a_sweep_runs_its_axes(folder: str) -> None:
    assert [run.optimizer.lr for run in runs(folder, "sweep=copy")] == [3e-4, 1e-3, 3e-3]


def test_a_package_of_its_own(folder: str) -> None:
    (run,) = runs(folder, "experiment=model_only")
    assert run.as_dict()["model"]["width"] == 64


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["model=mine", "optimizer.lrr=1"], "optimizer.lrr=1: no such key"),
        (["experiment=deep/copi"], "experiment=deep/copi: no such option; did you mean deep/copy"),
        (["model=min"], "model=min: no such option; did you mean mine?"),
        (["experiment=broken"], "broken.yaml cannot be read: while parsing"),
    ],
)
def test_a_refusal_knows_it(lines: list[str], complaint: str, folder: str) -> None:
    with pytest.raises(ConfigError) as caught:
        runs(folder, *lines)
    (found,) = caught.value.complaints
    assert complaint in str(found)


def test_it_is_forgotten(folder: str) -> None:
    runs(folder, "experiment=copy")
    with pytest.raises(ConfigError, match="no such option"):
        open_door(Noted(), ["experiment=copy"])
