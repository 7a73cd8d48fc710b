"""Job specs round-trip through files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scalewise import registry
from scalewise.errors import ScalewiseError
from scalewise.launch import executor
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import JobSpec
from scalewise.run_config import RunConfig

registry.import_options()
SPECS = [(group, name) for group, named in registry.OPTIONS.items() for name in named]
SPECS.remove(("model", "decoder"))  # required field, set in every composed run


def round_trip(run: RunConfig, folder: Path) -> bool:
    order = JobSpec(
        run, "scalewise train", varied={"seed": "1"}, sweep="a/b", changed=[{"key": "x"}]
    )
    task = SweepTask(3, order, folder / "3")
    executor.write_task(task, folder / "order.json")
    return executor.read_task(folder / "order.json") == task


@pytest.mark.parametrize(("group", "name"), SPECS)
def test_job_specs_round_trip(
    group: str, name: str, compose: Callable[..., RunConfig], tmp_path: Path
) -> None:
    spec = registry.OPTIONS[group][name]
    assert round_trip(replace(compose(), **{group: spec()}), tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        "data=text data.paths=[a.txt,b.txt] callbacks=[guard,ema]",
        "parallelism=mesh parallelism.shards=2 parallelism.tensor=2 parallelism.attention=gather",
        "tracking.tags=[a,b] tracking.mode=offline trusted_packages=[mine] resume=last",
    ],
)
def test_job_spec_keeps_overrides(
    overrides: str, compose: Callable[..., RunConfig], tmp_path: Path
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    assert round_trip(compose(*overrides.split(), check_machine=False), tmp_path)


def test_missing_job_spec_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ScalewiseError, match="is not visible from this machine"):
        executor.read_task(tmp_path / "order.json")
