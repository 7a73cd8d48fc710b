"""Plans next to the record of ``scalewise bench gpu``, and the step scale fitted to it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from scalewise.bench import gpu_accuracy
from scalewise.config import paths
from scalewise.config.compose import compose

RECORDS = sorted((paths.project_root() / "experiments" / "records").glob("*/gpu.json"))
RECORD = next(path for path in RECORDS if path.parent.name == "h100")
COMPOSE = partial(compose, check_machine=False)
ESTIMATED = {
    "h100_8": "h100",
    "h100_8x4": "h100",
    "h100_nvl": "h100",
    "h100_pcie": "h100",
    "h200_8": "h200",
    "h200_nvl": "h100",
}
"""Profiles without runs of scalewise, with the profile whose scale is their estimate."""


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_profile_has_the_step_scale_of_its_record(record: Path) -> None:
    hardware = COMPOSE([f"hardware={record.parent.name}"]).hardware
    scale = gpu_accuracy.recorded_step_scale(record, COMPOSE)
    fitted = [float(f"{value:.4g}") for value in (scale.median, scale.low, scale.high)]
    assert [hardware.step_scale, hardware.step_shortest, hardware.step_longest] == fitted


@pytest.mark.parametrize("name", ESTIMATED)
def test_profile_without_runs_has_an_estimated_step_scale(name: str) -> None:
    profile, measured = (COMPOSE([f"hardware={each}"]).hardware for each in (name, ESTIMATED[name]))
    assert profile.step_scale == measured.step_scale
    assert profile.matmul_workspace_mib == measured.matmul_workspace_mib
    assert (profile.step_shortest, profile.step_longest) == (0.83, 1.25)


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_planned_memory_of_recorded_cases_is_accurate(record: Path) -> None:
    cases = gpu_accuracy.compare_cases(record, COMPOSE)
    assert len(cases) >= 11
    for case in cases:
        assert abs(case.memory) < 0.002, case


def test_accuracy_compares_successful_steps_with_a_new_plan(tmp_path: Path) -> None:
    entry = json.loads(RECORD.read_text("utf-8"))["cases"]["mfu_1b/block"]
    (case,) = (
        it for it in gpu_accuracy.compare_cases(RECORD, COMPOSE) if it.name == "mfu_1b/block"
    )
    step_s = entry["step_s"] | {"median": 2 * entry["step_s"]["median"]}
    cases = {
        "slow": entry | {"step_s": step_s, "planned_step_s": 1.0},
        "failed": {"status": "out_of_memory", "overrides": entry["overrides"]},
        "checkpoint": {"status": "ok", "overrides": entry["overrides"]},
    }
    record = tmp_path / "h100" / "gpu.json"
    record.parent.mkdir()
    record.write_text(json.dumps({"cases": cases}), "utf-8")
    (slow,) = gpu_accuracy.compare_cases(record, COMPOSE)
    assert slow.unscaled == pytest.approx(2 * case.unscaled)
    assert slow.time == pytest.approx((1 + case.time) / 2 - 1)
    assert slow.memory == case.memory
