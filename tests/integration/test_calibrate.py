"""``scalewise calibrate``: a hardware profile of this machine, and plans that use it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from fixtures.cli_runner import UNTRACKED, CliRunner

KEYS = {
    "fp32_reached_tflops",
    "bf16_reached_tflops",
    "attention_share",
    "memory_gb_per_s",
    "bandwidth_share",
    "launch_us",
    "loader_tokens_per_s",
    "disk_gb_per_s",
    "link_latency_us",
}


def profile(cwd: Path, name: str) -> str:
    return (cwd / "conf" / "hardware" / f"{name}.yaml").read_text("utf-8")


def test_calibrate_measures_a_profile_that_plan_uses(run_cli: CliRunner) -> None:
    result = run_cli("seconds=0.05", "name=mine", "hardware=cpu", command="calibrate").assert_ok()
    text = profile(run_cli.cwd, "mine")
    assert text.startswith("# Measured by `scalewise calibrate` on 20")
    assert "torch 2." in text.splitlines()[0]
    assert "launch_us " in text.split("defaults:")[0]  # relative spread
    profile_options = yaml.safe_load(text)
    assert profile_options.keys() >= KEYS
    assert all(profile_options[key] > 0 for key in KEYS)
    assert {path.name for path in run_cli.cwd.iterdir()} == {"conf"}
    (usage_line,) = [
        usage_line for usage_line in result.out.splitlines() if usage_line.startswith("use it: ")
    ]
    assert usage_line == "use it: scalewise plan -cd conf hardware=mine ..."
    plan_result = run_cli("-cd", "conf", *UNTRACKED, "hardware=mine", command="plan").assert_ok()
    assert "tok/s" in plan_result.out
    run_cli("seconds=0.05", "name=mine", "hardware=cpu", command="calibrate").assert_ok()  # again


@pytest.mark.exhaustive
def test_calibrate_fits_step_scale_from_runs(run_cli: CliRunner) -> None:
    run_cli("seconds=0.05", "name=mine", "hardware=cpu", command="calibrate").assert_ok()
    learn_options = ("learn=runs", "name=mine")
    (run_cli.cwd / "runs").mkdir()
    run_cli(*learn_options, command="calibrate").assert_rejected(
        "0 runs in runs", "at least 3 are required"
    )
    overrides = ("-cd", "conf", *UNTRACKED, "hardware=mine")
    first, *_ = run_cli("-m", *overrides, "seed=1,2,3").assert_ok().folder.jobs
    result = run_cli(*learn_options, command="calibrate").assert_ok()
    assert "measured step time: " in result.out
    assert "3 runs" in result.out
    scale = yaml.safe_load(profile(run_cli.cwd, "mine"))["step_scale"]
    plan_record = run_cli(*overrides).assert_ok().newest.json("plan.json")
    assert plan_record["plan/step_s"] == pytest.approx(
        scale * first.json("plan.json")["plan/step_s"]
    )
    assert sum(plan_record["step_parts"].values()) == pytest.approx(plan_record["plan/step_s"])


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (("learn=gone", "name=new"), ["learn=gone", "is not a folder", "new.yaml does not exist"]),
        (
            ("learn=conf", "name=theirs", "model=gpt2_124m"),
            ["model=gpt2_124m is not supported with learn=conf"],
        ),
        (("name=mine",), ["name=mine", "was not written by a calibration"]),
        (("name=a/b",), ["name=a/b", "is not a file name"]),
        (("seconds=0",), ["seconds=0", "must be positive"]),
        (("secnds=1", "name=a/b"), ["secnds", "did you mean seconds?", "is not a file name"]),
        (("modle=x",), ["did you mean model?"]),
        (("--fast",), ["--fast is not supported: calibrate accepts overrides only"]),
    ],
)
def test_calibrate_rejects_invalid_arguments(
    overrides: tuple[str, ...], messages: list[str], run_cli: CliRunner
) -> None:
    folder = run_cli.cwd / "conf" / "hardware"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("device: cpu\n")
    (folder / "theirs.yaml").write_text("# Measured by `scalewise calibrate` once.\n")
    run_cli(*overrides, command="calibrate").assert_rejected(*messages)
    assert (folder / "mine.yaml").read_text() == "device: cpu\n"


def test_calibrate_measures_nothing_if_the_profile_cannot_be_written(run_cli: CliRunner) -> None:
    (run_cli.cwd / "conf").write_text("")
    result = run_cli("seconds=0.05", "hardware=cpu", command="calibrate")
    result.assert_rejected("conf/hardware cannot be written")
    assert "tflops" not in result.out
