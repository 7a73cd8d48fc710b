"""Learning rate schedules compared with torch."""

import itertools
from collections.abc import Callable

import pytest
import torch

from scalewise.lr_schedules import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    ScheduleConfig,
    WarmupStableDecayConfig,
)
from scalewise.training.lightning_module import build_lr_scheduler

SCHEDULES: list[ScheduleConfig] = [
    ConstantConfig(warmup_steps=7),
    CosineConfig(warmup_steps=7, final=0.2),
    LinearConfig(warmup_steps=7, final=0.3),
    WarmupStableDecayConfig(warmup_steps=7, decay=0.25, final=0.1),
]


def rates(spec: ScheduleConfig, steps: int) -> list[float]:
    return [spec.lr_factor(step, steps) for step in range(steps)]


class TestSchedules:
    @pytest.mark.parametrize("spec", SCHEDULES, ids=lambda spec: type(spec).__name__)
    def test_schedule_warms_up_to_the_peak(self, spec: ScheduleConfig) -> None:
        rates_by_step = rates(spec, 48)
        assert rates_by_step[:8] == pytest.approx([(step + 1) / 8 for step in range(8)])
        assert rates_by_step[7] == max(rates_by_step) == 1.0
        assert all(a >= b for a, b in itertools.pairwise(rates_by_step[7:]))
        assert rates_by_step[-1] == pytest.approx(getattr(spec, "final", 1.0))
        assert spec.lr_factor(1000, 48) == rates_by_step[-1]

    def test_schedule_wsd_is_constant_until_decay(self) -> None:
        rates_by_step = rates(WarmupStableDecayConfig(warmup_steps=0, decay=0.25, final=0.0), 41)
        assert rates_by_step[:31] == [1.0] * 31
        assert rates_by_step[31:] == pytest.approx([0.9 - 0.1 * step for step in range(10)])
        assert rates(WarmupStableDecayConfig(decay=0.0), 11) == [1.0] * 11
        assert rates(WarmupStableDecayConfig(decay=1.0), 5) == [1.0, 0.75, 0.5, 0.25, 0.0]

    @pytest.mark.parametrize(
        ("spec", "torch_schedule"),
        [
            (
                CosineConfig(final=0.1),
                lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=30, eta_min=0.05),
            ),
            (
                LinearConfig(final=0.25),
                lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, total_iters=30),
            ),
        ],
    )
    def test_schedule_shapes_equal_torch(
        self, spec: ScheduleConfig, torch_schedule: Callable[..., object]
    ) -> None:
        assert self._walk(lambda o: build_lr_scheduler(spec, o, 31), 30) == pytest.approx(
            self._walk(torch_schedule, 30)
        )

    def _walk(self, build: Callable[..., object], steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        schedule = build(optimizer)
        rates_by_step = []
        for _ in range(steps):
            rates_by_step.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return [*rates_by_step, optimizer.param_groups[0]["lr"]]

    def test_rewarmup_rises_from_0_to_the_schedule(self) -> None:
        spec = CosineConfig(warmup_steps=4, rewarmup_steps=3)
        factors = [spec.rewarmup_factor(step, 10) for step in range(10, 16)]
        assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
        assert spec.rewarmup_factor(10, None) == 1.0
        assert CosineConfig(warmup_steps=4).rewarmup_factor(10, 10) == 1.0
        resume_step: int | None = 20
        with_resume = self._walk(lambda o: build_lr_scheduler(spec, o, 31, lambda: resume_step), 30)
        plain = self._walk(lambda o: build_lr_scheduler(spec, o, 31), 30)
        # A scheduler starts at step 0, long before the resume.
        assert with_resume[20:23] == pytest.approx(
            [rate * (index + 1) / 4 for index, rate in enumerate(plain[20:23])]
        )
        assert with_resume[23:] == plain[23:]

    def test_schedule_warmup_of_the_full_run(self) -> None:
        assert CosineConfig(warmup_steps=5).lr_factor(5, 5) == 1.0
