"""Cases of ``scalewise bench all`` at small sizes, in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalewise.bench import cpu_cases, process_cases, scaling_cases
from scalewise.bench.comparison import compare_in_turn, ratio_entry
from scalewise.bench.component_cases import CheckpointCase, LoaderCase, PlannerCase
from scalewise.bench.process_cases import ResumeCase, WarmJobCase
from scalewise.bench.scaling_cases import ScalingCase, fit_exponent
from scalewise.bench.step_cases import TRAINERS, StepCase
from scalewise.bench.suite import Case, CaseError
from scalewise.bench.suite_table import figure_table
from scalewise.bench.sweep import JobOverhead
from scalewise.config.compose import compose
from scalewise.run_config import RunConfig
from scalewise.validation.run_issues import iter_issues

TINY = (
    *("data=synthetic", "data.sequence=16", "model.layers=1", "model.width=64", "model.heads=1"),
    *("model.feedforward=64", "model.vocabulary=64", "tracking=none", "checkpoint=none"),
    *("schedule.warmup_steps=1", "trainer.validate_every=null", "trainer.micro_batch=2"),
    "hardware=cpu",
)


def tiny_run(*overrides: str) -> RunConfig:
    """Run of a tiny model."""
    return compose((*TINY, *overrides))


@pytest.mark.parametrize("case", cpu_cases.CASES, ids=lambda case: case.name)
def test_cpu_case_composes(case: Case) -> None:
    run = compose((*case.overrides, "hardware=cpu"))
    assert not run.tracking.is_enabled or case.name == "startup/help"
    if isinstance(case, ScalingCase):
        runs = [scaling_cases.AXES[case.axis](run, size) for size in case.sizes]
        assert [list(iter_issues(sized_run)) for sized_run in runs] == [[]] * len(runs)
        flops = [sized_run.flops_per_step for sized_run in runs]
        assert flops == sorted({*flops})


def test_cpu_cases_have_distinct_names_and_fit_in_25_minutes() -> None:
    names = [case.name for case in cpu_cases.CASES]
    assert len({*names}) == len(names)
    assert sum(case.seconds for case in cpu_cases.CASES) <= 25 * 60


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("trainer", ["scalewise", "lightning", "hugging_face"])
def test_step_case_trains_the_same_model(trainer: str, precision: str, tmp_path: Path) -> None:
    if trainer == "hugging_face":
        pytest.importorskip("accelerate")
    case = StepCase("step/x", 1, TINY, 3, trainer)
    entry = case.measure(tiny_run(f"precision={precision}"), tmp_path / "run")
    assert entry["pairs"] == 3
    assert 0 < entry["low"] <= entry["figure"] <= entry["high"]
    assert entry["unit"] == "of a hand-written loop"
    tolerance = 1e-6 if (trainer, precision) == ("scalewise", "fp32") else 1e-2
    assert entry["loss"]["suite"] == pytest.approx(entry["loss"]["hand"], rel=tolerance)
    assert "self-check" in case.describe(entry)


def test_step_case_skips_a_missing_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAINERS, "litgpt", ("scalewise.bench.absent:fit", "absent_package"))
    with pytest.raises(CaseError, match="requires the package absent_package"):
        StepCase("step/x", 1, TINY, 3, "litgpt").measure(tiny_run(), tmp_path)


def test_ratio_is_noisy_if_the_baseline_differs_from_itself() -> None:
    entry = ratio_entry([2.0, 2.0], [1.0, 1.0, 1.0], 1.031, "x")
    assert (entry["figure"], entry["status"]) == (2.0, "noisy")
    assert "takes 1.031 of itself, not 0.97 to 1.03" in entry["reason"]
    assert "status" not in ratio_entry([2.0, 2.0], [1.0, 1.0, 1.0], 1.029, "x")


def test_measurements_in_turn_are_paired() -> None:
    order: list[str] = []

    def record(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    entry = compare_in_turn(2, lambda: record("b", 2.0), lambda: record("m", 1.0), "b", extra=1)
    assert order == ["b", "m", "b", "b", "m", "b", "b"]
    assert (entry["figure"], entry["self_check"], entry["extra"]) == (0.5, 1.0, 1)


def test_warm_job_case_compares_fresh_processes_with_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overheads(*seconds: float) -> list[JobOverhead]:
        return [JobOverhead(value, value) for value in seconds]

    measured = (overheads(0.5, 0.5), overheads(10.0, 10.1, 10.0))
    monkeypatch.setattr(process_cases.sweep, "measure_overheads", lambda *arguments: measured)
    entry = WarmJobCase("launch/x", 1, TINY, 2).measure(tiny_run(), tmp_path)
    assert entry["figure"] == pytest.approx(0.5 / 10.05)
    assert entry["self_check"] == pytest.approx(1.01)


def test_resume_case_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    entry = ResumeCase("resume/x", 1, TINY, 1).measure(tiny_run(), tmp_path)
    assert entry["figure"] > 0
    resumed = (tmp_path / "2" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in resumed[1:]] == ["1", "2", "3"]
    scratch = (tmp_path / "1" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in scratch[1:]] == ["1"]


@pytest.mark.parametrize("background", ["false", "true"])
def test_checkpoint_case_saves_repeatedly(background: str, tmp_path: Path) -> None:
    case = CheckpointCase("checkpoint/x", 1, TINY, 2)
    entry = case.measure(tiny_run(f"checkpoint.background={background}"), tmp_path / "run")
    assert entry["pairs"] == 2
    assert entry["measured_s"] > 0
    assert not (tmp_path / "run").exists()


def test_loader_case_reads_the_same_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalewise.bench.component_cases.MEASURED_TOKENS", 320)
    entry = LoaderCase("loader/x", 1, TINY, 2).measure(tiny_run(), tmp_path)
    assert entry["tokens_per_s"] == pytest.approx(320 / entry["measured_s"])


def test_planner_case_measures_a_rate(tmp_path: Path) -> None:
    entry = PlannerCase("planner/x", 1, TINY, 3, 2).measure(tiny_run(), tmp_path)
    assert entry["unit"] == "plans/s"
    assert 0 < entry["low"] <= entry["figure"] <= entry["high"]


def test_exponent_of_a_power_law() -> None:
    times = {size: [3e-3 * size**1.5 * noise for noise in (0.98, 1.0, 1.03)] for size in (1, 2, 8)}
    exponent = fit_exponent(times)
    assert exponent.value == pytest.approx(1.5)
    assert 1.45 < exponent.low < 1.5 < exponent.high < 1.55


@pytest.mark.parametrize(
    ("axis", "sizes", "flops_exponent"),
    [("depth", (1, 2), 0.9), ("width", (64, 128), 1.8), ("sequence", (8, 16), 1.0)],
)
def test_scaling_case_fits_an_exponent(
    axis: str, sizes: tuple[int, int], flops_exponent: float, tmp_path: Path
) -> None:
    case = ScalingCase("scaling/x", 1, TINY, axis, sizes, 2)
    entry = case.measure(tiny_run(), tmp_path / "run")
    assert [*entry["step_s"]] == [*sizes]
    small, large = entry["step_s"].values()
    assert entry["low"] <= entry["figure"] <= entry["high"]
    assert (entry["figure"] > 0) == (large > small)
    assert entry["flops_exponent"] == pytest.approx(flops_exponent, abs=0.15)
    assert "hand-written loop" in case.describe(entry)


def test_aims_read_the_figures_of_successful_cases() -> None:
    entries: dict[str, dict[str, Any]] = {
        "overhead/scalewise": {"status": "ok", "figure": 1.3},
        "startup/help": {"status": "ok", "figure": 0.2},
        "loader/corpus": {"status": "noisy", "figure": 0.2},
    }
    evaluated = {aim.text: aim.evaluate(entries) for aim in cpu_cases.AIMS}
    reached = [aim["reached"] for aim in evaluated.values()]
    assert reached.count(True) == reached.count(False) == 1
    names = {case.name for case in cpu_cases.CASES}
    for aim in cpu_cases.AIMS:  # each aim reads an existing case
        figures = {name: {"status": "ok", "figure": 0.0} for name in names}
        assert replace(aim).evaluate(figures)["figure"] == 0.0, aim.text


def test_figure_table_shows_intervals_and_noise() -> None:
    figures = {"figure": 1.25, "low": 1.2, "high": 1.3, "unit": "of a hand-written loop"}
    entries = {
        "a": {"status": "ok", **figures, "self_check": 1.0},
        "b": {"status": "noisy", **figures, "self_check": 1.1},
        "c": {"status": "ok", **figures, "figure": 1234.5, "unit": "plans/s"},
        "d": {"status": "out_of_memory"},
    }
    *_, first, second, third, fourth = figure_table(entries)
    assert "1.250 | 1.200 to 1.300 | of a hand-written loop |" in first
    assert first.endswith("1.000 |")
    assert "1.100 (noisy)" in second
    assert "1,234" in third
    assert "out of memory" in fourth
    assert len({len(line) for line in (first, second, third, fourth)}) == 1
