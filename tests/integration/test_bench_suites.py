"""Suites of ``scalewise bench``: records and resumption, and cases that start processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.cli_runner import CliRunner

from scalewise.bench.process_cases import CommandCase
from scalewise.bench.scaling_cases import ScalingCase
from scalewise.bench.step_cases import ParallelCase
from scalewise.bench.suite import CaseError
from scalewise.config.compose import compose
from scalewise.run_files import load_json

TINY = (
    *("data=synthetic", "data.sequence=16", "model.layers=1", "model.width=64", "model.heads=1"),
    *("model.feedforward=64", "model.vocabulary=64", "tracking=none", "checkpoint=none"),
    *("schedule.warmup_steps=1", "trainer.validate_every=null", "trainer.micro_batch=2"),
    *("hardware=cpu", "parallelism=ddp"),
)


def test_bench_all_resumes_from_its_record(run_cli: CliRunner, tmp_path: Path) -> None:
    record = tmp_path / "experiments" / "records" / "cpu" / "all.json"
    record.parents[1].mkdir(parents=True)
    page = tmp_path / "README.md"
    page.write_text("<!-- comparison -->\n-\n<!-- /comparison -->\n", "utf-8")
    arguments = ("all", "cases=planner/*", "hardware=cpu")
    first = run_cli(*arguments, command="bench").assert_ok()
    assert "1/1 planner/plans: about" in first.out
    content = load_json(record)
    assert content["cases"]["planner/plans"]["figure"] > 0
    assert content["command"].startswith("scalewise bench all")
    assert first.folder.json("all.json") == content
    assert "| planner/plans |" in page.read_text("utf-8")
    second = run_cli(*arguments, command="bench").assert_ok()
    assert "1 of 1 cases are recorded" in second.out
    assert load_json(record)["cases"] == content["cases"]


def test_bench_gpu_requires_a_device(run_cli: CliRunner) -> None:
    result = run_cli("gpu", "record=false", "hardware=cpu", command="bench")
    assert result.code == 2
    assert "hardware=cpu: requires cuda" in result.err
    assert result.folders == []


def test_command_case_compares_with_the_import_of_torch(tmp_path: Path) -> None:
    run = compose(TINY)
    case = CommandCase("startup/x", 1, (), ("--help",), 1)
    entry = case.measure(run, tmp_path / "run")
    assert 0 < entry["figure"] < 1
    failing = CommandCase("startup/x", 1, (), ("no-such-command",), 1)
    with pytest.raises(CaseError, match="no-such-command"):
        failing.measure(run, tmp_path / "failing")


def test_cases_with_several_ranks_compare_with_hand_written_loops(tmp_path: Path) -> None:
    run = compose(TINY)
    entry = ParallelCase("parallel/x", 1, TINY, 2).measure(run, tmp_path / "parallel")
    assert (entry["ranks"], entry["pairs"]) == (2, 2)
    assert entry["loss"]["suite"] == pytest.approx(entry["loss"]["hand"], rel=1e-5)
    case = ScalingCase("scaling/x", 1, TINY, "ranks", (1, 2), 2)
    entry = case.measure(run, tmp_path / "scaling")
    assert [*entry["step_s"]] == [1, 2]
    assert entry["flops_exponent"] == pytest.approx(1.0)
