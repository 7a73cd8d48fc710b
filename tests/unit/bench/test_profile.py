"""Hardware profiles: the scale of step times that is learned from runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalewise.bench import profile
from scalewise.errors import ConfigError
from scalewise.hardware import Hardware
from scalewise.launch.status_file import versions

HARDWARE = Hardware(memory_gib=8.0, fp32_tflops=1.0, memory_gb_per_s=10.0)
TORCH = versions()["torch"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return profile.write_profile(
        HARDWARE, {"launch_us": 3.0}, ["calibrate` once."], tmp_path / "mine.yaml"
    )


def write_finished_run(
    folder: Path, measured_s: float, predicted_s: float = 0.1, **settings: Any
) -> None:
    """Write the files of a run folder that ``learn`` reads."""
    folder.mkdir(parents=True)
    hardware = {"launch_us": 3.0, "memory_gib": 8.0, "fp32_tflops": 1.0, "memory_gb_per_s": 10.0}
    hardware |= {
        "device": "auto",
        "context_gib": 0.0,
        "matmul_workspace_mib": 0.0,
        "product_share": 0.8,
        "attention_share": 0.45,
    }
    hardware |= {"bandwidth_share": 0.85, "nodes": 1, "step_scale": 1.0} | settings.get("used", {})
    status = {
        "status": settings.get("status", "ok"),
        "versions": {"torch": settings.get("torch", TORCH)},
    }
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "plan.json").write_text(json.dumps({"plan/step_s": predicted_s}))
    (folder / "summary.json").write_text(json.dumps({"metrics": {"time/step_s": measured_s}}))
    (folder / "resolved.yaml").write_text(yaml.safe_dump({"hardware": hardware}))


def test_step_scale_is_the_median_with_its_spread(file: Path, tmp_path: Path) -> None:
    for index, measured_s in enumerate((0.12, 0.15, 0.30)):
        write_finished_run(tmp_path / "runs" / "a" / str(index), measured_s)
    scale = profile.learn_step_scale(tmp_path / "runs", file)
    assert (scale.median, scale.runs) == (pytest.approx(1.5), 3)
    assert scale.low == pytest.approx((1.2 + 0.2 * 0.3) / 1.5)  # the decile lies between two
    assert scale.high == pytest.approx((3.0 - 0.2 * 1.5) / 1.5)
    text = file.read_text()
    assert text.startswith("# Measured by `scalewise calibrate` once.\n# Step scale fitted on ")
    stored_profile = yaml.safe_load(text)
    assert stored_profile["step_scale"] == 1.5
    assert stored_profile["launch_us"] == 3.0
    second_scale = profile.learn_step_scale(
        tmp_path / "runs", file
    )  # only the other figures are used
    assert second_scale == scale
    assert file.read_text().count("Step scale fitted") == 1


def test_step_scale_removes_the_recorded_scale(file: Path, tmp_path: Path) -> None:
    for index in range(3):
        write_finished_run(tmp_path / "runs" / str(index), 0.2, 0.1, used={"step_scale": 2.0})
    assert profile.learn_step_scale(tmp_path / "runs", file).median == pytest.approx(4.0)


def test_step_scale_is_reset_by_calibration(file: Path, tmp_path: Path) -> None:
    for index in range(3):
        write_finished_run(tmp_path / "runs" / str(index), 0.2)
    profile.learn_step_scale(tmp_path / "runs", file)
    profile.write_profile(Hardware(step_scale=2.0), {"launch_us": 4.0}, ["calibrate` again."], file)
    assert "step_scale" not in yaml.safe_load(file.read_text())
    with pytest.raises(ConfigError, match="0 runs in"):
        profile.learn_step_scale(tmp_path / "runs", file)


@pytest.mark.parametrize(
    "settings",
    [
        {"status": "failed"},
        {"torch": "1.0"},
        {"used": {"launch_us": 9.0}},
        {"predicted_s": None},
        {"measured_s": None},
    ],
    ids=str,
)
def test_step_scale_ignores_other_runs(
    settings: dict[str, Any], file: Path, tmp_path: Path
) -> None:
    before = file.read_text()
    for index in range(2):
        write_finished_run(tmp_path / "runs" / str(index), 0.2)
    write_finished_run(tmp_path / "runs" / "other", **({"measured_s": 0.2} | settings))
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"2 runs in .* at least 3 are required"):
        profile.learn_step_scale(tmp_path / "runs", file)
    assert file.read_text() == before
