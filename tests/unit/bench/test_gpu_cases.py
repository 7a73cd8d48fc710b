"""Cases of ``scalewise bench gpu``: all compose and can be planned for the devices they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scalewise.bench import gpu_cases
from scalewise.bench.training_case import WARM_UP_STEPS, TrainingCase
from scalewise.config.compose import compose
from scalewise.hardware import DeviceKind
from scalewise.planner.fit_check import check_fit
from scalewise.planner.step_time import predict_step_time

LARGE = {"mfu_8b/block_4_deep"}
"""Cases that an H100 skips."""


TRAINED = [case for case in gpu_cases.CASES if isinstance(case, TrainingCase)]


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_gpu_case_has_a_plan(case: TrainingCase) -> None:
    run = compose([*case.overrides, "hardware=h100"], check_machine=False)
    assert (run.trainer.max_steps or 0) > WARM_UP_STEPS + 2
    assert (run.world_size, run.tracking.is_enabled) == (1, False)
    fit, step = check_fit(run), predict_step_time(run)
    assert step is not None
    assert fit.status.is_out_of_memory == (case.name in LARGE), (fit.status, fit.reserved)
    assert 0.02 < step.seconds < 4
    if case.name in LARGE:
        on_h200 = compose([*case.overrides, "hardware=h200"], check_machine=False)
        assert not check_fit(on_h200).status.is_out_of_memory


def test_gpu_cases_without_a_plan_are_checkpoints_that_compose() -> None:
    others = [case for case in gpu_cases.CASES if case not in TRAINED]
    assert [case.name for case in others] == ["checkpoint/sync", "checkpoint/background"]
    runs = [compose([*case.overrides, "hardware=h100"], check_machine=False) for case in others]
    assert [run.checkpoint.background for run in runs] == [False, True]


def test_gpu_cases_have_distinct_names_and_fit_in_twenty_minutes() -> None:
    names = [case.name for case in gpu_cases.CASES]
    assert len({*names}) == len(names)
    assert sum(name.startswith("memory") for name in names) >= 20
    on_h100 = [case.seconds for case in gpu_cases.CASES if case.name not in LARGE]
    assert sum(on_h100) <= 20 * 60
    assert gpu_cases.SUITE.device is DeviceKind.cuda


def test_gpu_aims_are_computed_from_successful_cases() -> None:
    ok = {"status": "ok", "step_error": None, "data_share": 0.002}
    entries = {
        "mfu_1b/block": {**ok, "mfu": 0.4},
        "mfu_1b/fp8": {**ok, "mfu": 0.9},
        "mfu_8b/block_4": {**ok, "mfu": 0.56, "tokens_per_s": 100.0},
        "mfu_8b/fp8_4": {**ok, "mfu": 0.7, "tokens_per_s": 130.0},
        "memory/none": {**ok, "peak_error": -0.06},
        "memory/lora": {**ok, "peak_error": 0.01},
        "memory/dora": {"status": "out_of_memory"},
        "checkpoint/background": {"status": "ok", "figure": 0.04},
    }
    aims = [replace(aim).evaluate(entries) for aim in gpu_cases.AIMS]
    assert [aim["figure"] for aim in aims] == [0.4, 0.56, 1.3, 0.06, None, 0.04, 0.002]
    assert [aim["reached"] for aim in aims] == [False, True, True, False, None, True, True]


def test_fp8_speedup_is_that_of_the_most_blocks_measured() -> None:
    entries = {
        f"mfu_8b/{name}": {"status": "ok", "tokens_per_s": tokens}
        for name, tokens in {"block_4": 100.0, "fp8_4": 120.0, "block_4_deep": 40.0}.items()
    }
    (aim,) = (aim for aim in gpu_cases.AIMS if "fp8" in aim.text)
    assert aim.evaluate(entries)["figure"] == 1.2
    entries["mfu_8b/fp8_4_deep"] = {"status": "ok", "tokens_per_s": 52.0}
    assert aim.evaluate(entries)["figure"] == 1.3
