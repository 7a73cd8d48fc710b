"""AdamW with paged moments: order of prefetches, updates and waits, with fake CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bitsandbytes import functional
from torch import Tensor, nn

from scalewise.compat.torch import FakeTensorMode
from scalewise.optimizers.build import build_from_groups
from scalewise.optimizers.config import PagedAdamWConfig
from scalewise.strategies.optimizer_state_dict import state_tensors


class FakeEvent:
    """Event of a fake stream, which records that it is waited for."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def record_event(self) -> FakeEvent:
        self._calls.append("record")
        return self

    def synchronize(self) -> None:
        self._calls.append("wait")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of bitsandbytes and of CUDA, in order; a device synchronization is an error."""
    made: list[str] = []

    def get_paged(*shape: int, device: torch.device) -> Tensor:
        return torch.zeros(shape)

    def synchronize(*_: Any) -> None:
        raise AssertionError("the step synchronizes the device")

    monkeypatch.setattr(functional, "get_paged", get_paged)
    monkeypatch.setattr(functional, "prefetch_tensor", lambda t: made.append(f"fetch {len(t)}"))
    monkeypatch.setattr(
        functional, "optimizer_update_32bit", lambda _, g, *a, **k: made.append(f"update {len(g)}")
    )
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: FakeEvent(made))
    return made


def cuda_parameter(rows: int) -> nn.Parameter:
    """Fake parameter with a gradient; the state is real."""
    with FakeTensorMode():
        parameter = nn.Parameter(torch.empty(rows, 4, device="cuda"))
        parameter.grad = torch.empty_like(parameter)
    return parameter


def test_paged_step_prefetches_moments_and_does_not_synchronize(calls: list[str]) -> None:
    parameters = [cuda_parameter(rows) for rows in (8, 16)]
    groups = [{"params": parameters, "weight_decay": 0.0}]
    optimizer = build_from_groups(PagedAdamWConfig(), groups)
    optimizer.step()
    each = [[*["fetch " + size] * 2, "update " + size] for size in ("8", "16")]
    assert calls == [*each[0], *each[1], "record"]


def test_paged_state_is_read_after_the_step(calls: list[str]) -> None:
    parameter = cuda_parameter(8)
    optimizer = build_from_groups(
        PagedAdamWConfig(), [{"params": [parameter], "weight_decay": 0.0}]
    )
    state_tensors([optimizer], {parameter: "weight"})
    assert calls == []
    optimizer.step()
    calls.clear()
    assert state_tensors([optimizer], {parameter: "weight"}).keys() == {
        "step/weight",
        "exp_avg/weight",
        "exp_avg_sq/weight",
    }
    assert calls == ["wait"]
