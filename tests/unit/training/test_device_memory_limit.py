"""``launch.memory_limit_gib`` on a CUDA device is passed to torch as a fraction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from scalewise.hardware import DeviceKind
from scalewise.launch_config import Launch
from scalewise.run_config import RunConfig
from scalewise.training.trainer import RankInfo, set_device
from scalewise.units import GIB


@pytest.mark.parametrize(("limit", "fractions"), [(80.0, [0.5]), (200.0, [1.0]), (None, [])])
def test_memory_limit_is_passed_to_torch_as_a_fraction(
    limit: float | None,
    fractions: list[float],
    compose: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 160 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fractions.append)
    run = compose("experiment=smoke")
    run = replace(
        run,
        hardware=replace(run.hardware, device=DeviceKind.cuda),
        launch=Launch(memory_limit_gib=limit),
    )
    set_device(run, RankInfo(rank=0, local_rank=0, local_world_size=1))
    assert set_fractions == fractions
