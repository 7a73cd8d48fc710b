"""An order that went through a file is the order that was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scalewise.config import registry
from scalewise.errors import ScalewiseError
from scalewise.launch import orders
from scalewise.launch.engine import Task
from scalewise.launch.job import Order
from scalewise.run import Run

registry.discover()
SPECS = [(group, name) for group, named in registry.OPTIONS.items() for name in named]
SPECS.remove(("model", "decoder"))  # it has no defaults; every composed run has one


def comes_back(run: Run, folder: Path) -> bool:
    order = Order(run, "scalewise train", varied={"seed": "1"}, sweep="a/b", changed=[{"key": "x"}])
    task = Task(3, order, folder / "3")
    orders.write(task, folder / "order.json")
    return orders.read(folder / "order.json") == task


@pytest.mark.parametrize(("group", "name"), SPECS)
def test_every_spec(group: str, name: str, compose: Callable[..., Run], tmp_path: Path) -> None:
    spec = registry.OPTIONS[group][name]
    assert comes_back(replace(compose(), **{group: spec()}), tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "data=text data.paths=[a.txt,b.txt] callbacks=[guard,ema]",
        "parallelism=mesh parallelism.shards=2 parallelism.tensor=2 parallelism.attention=gather",
        "tracking.tags=[a,b] tracking.mode=offline trusted_packages=[mine] resume=last",
    ],
)
def test_what_was_typed(line: str, compose: Callable[..., Run], tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    assert comes_back(compose(*line.split(), here=False), tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScalewiseError, match="cannot be seen from this machine"):
        orders.read(tmp_path / "order.json")
