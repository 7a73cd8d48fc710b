"""Process group of a rank that torchrun or srun started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scalewise.hardware import DeviceKind
from scalewise.launch import external_rank
from scalewise.run_config import RunConfig

VARIABLES = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize(
    ("kind", "backend", "device"),
    [
        (DeviceKind.cpu, "gloo", None),
        (DeviceKind.cuda, "cpu:gloo,cuda:nccl", torch.device("cuda", 1)),
    ],
)
def test_process_group_of_an_external_rank_has_device_and_timeout(
    kind: DeviceKind,
    backend: str,
    device: torch.device | None,
    compose: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: list[tuple[str, dict[str, Any]]] = []
    devices: list[torch.device] = []
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: groups.append((backend, options))
    )
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values: None)
    run = compose("experiment=smoke", "launch.collective_timeout=7")
    run = replace(run, hardware=replace(run.hardware, device=kind))
    assert external_rank._broadcast_job(run, Path("run"), None) == (Path("run"), None)
    assert groups == [(backend, {"device_id": device, "timeout": timedelta(seconds=7)})]
    assert devices == ([device] if device else [])
