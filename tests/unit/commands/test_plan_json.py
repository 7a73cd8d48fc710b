"""``scalewise plan --json``: one JSON object on stdout, with the exit codes of the text output."""

import json
from typing import Any

import pytest

from scalewise.cli import main

MODEL = ("model=llama_160m", "data=synthetic")
Capture = pytest.CaptureFixture[str]


def plan_json(capsys: Capture, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    """Run ``scalewise plan --json`` and parse its output."""
    assert main(["plan", *MODEL, *arguments, "--json"]) == exit_code
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_plan_has_fit_memory_and_time(capsys: Capture) -> None:
    plan = plan_json(capsys, "hardware=h100")
    assert (plan["fit"], plan["suggested_fix"], plan["changes"]) == ("fits", None, [])
    assert sum(plan["ledger"].values()) == plan["plan/peak_bytes"] == max(plan["phases"].values())
    reserved = plan["reserved_bytes"]
    assert plan["plan/peak_bytes"] < reserved["low"] <= reserved["typical"] <= reserved["high"]
    shortest, longest = plan["step_s_range"]
    assert shortest < plan["plan/step_s"] < longest
    assert plan["tokens_per_s"] == pytest.approx(plan["tokens_per_step"] / plan["plan/step_s"])
    assert 0 < plan["mfu"] < 1


def test_plan_that_does_not_fit_suggests_overrides(capsys: Capture) -> None:
    overrides = ("hardware=h100", "data.sequence=2048", "trainer.micro_batch=64")
    plan = plan_json(capsys, *overrides, exit_code=3)
    assert plan["fit"] == "out_of_memory"
    assert plan["suggested_fix"]
    assert plan_json(capsys, *overrides, *plan["suggested_fix"])["fit"] == "fits"


def test_plan_without_rates_has_null_times(capsys: Capture) -> None:
    plan = plan_json(capsys, "hardware=h100", "hardware.memory_gb_per_s=null")
    times = ("plan/step_s", "step_s_range", "tokens_per_s", "mfu", "dollars_per_billion_tokens")
    assert {key: plan[key] for key in times} == dict.fromkeys(times)


def test_search_has_its_best_run_on_the_front(capsys: Capture) -> None:
    overrides = ("hardware=h100_8", "plan.search=layout", "trainer.global_batch=64")
    result = plan_json(capsys, *overrides, "data.sequence=256")
    assert result["tried"] > 100
    front = [plan["plan/step_s"] for plan in result["pareto_front"]]
    assert front == sorted(front)
    assert result["best"]["plan/step_s"] <= 1.05 * front[0]


def test_limit_search_has_the_limit_and_all_tried_values(capsys: Capture) -> None:
    result = plan_json(capsys, "hardware=h100", "plan.search=micro_batch")
    assert result["key"] == "trainer.micro_batch"
    fits = {row["value"]: row["fit"] for row in result["tried"]}
    assert fits[result["limit"]] == "fits"
    nothing = plan_json(
        capsys, "hardware=h100", "plan.search=sequence", "hardware.memory_gib=3", exit_code=3
    )
    assert nothing["limit"] is None


def test_sweep_has_one_plan_per_job(capsys: Capture) -> None:
    result = plan_json(capsys, "-m", "hardware=h100,a100_80g")
    assert [job["varied"] for job in result["jobs"]] == [
        {"hardware": "h100"},
        {"hardware": "a100_80g"},
    ]
    assert all(job["fit"] == "fits" for job in result["jobs"])


def test_sweep_plans_the_valid_jobs_and_lists_the_rejected_ones(capsys: Capture) -> None:
    layout = ("hardware=h100_8", "parallelism=tensor", "parallelism.tensor=2,5")
    result = plan_json(capsys, "-m", *layout, exit_code=2)
    assert [job["varied"] for job in result["jobs"]] == [{"parallelism.tensor": "2"}]
    (rejected,) = result["rejected"]
    assert rejected["varied"] == {"parallelism.tensor": "5"}
    assert "does not divide model.heads=12" in rejected["issues"][0]
    assert main(["plan", *MODEL, "-m", *layout]) == 2
    output = capsys.readouterr().out
    assert output.index("1 job;") < output.index("rejected: parallelism.tensor=5")
    assert "- parallelism.tensor=5: does not divide model.heads=12" in output


def test_sweep_without_valid_jobs_is_rejected(capsys: Capture) -> None:
    layout = ("hardware=h100_8", "parallelism=tensor", "parallelism.tensor=5,7")
    assert main(["plan", *MODEL, "-m", *layout, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "parallelism.tensor=7: does not divide model.heads=12" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [("hardware=h100",), ("-m", "hardware=h100,h200"), ("hardware=h100", "plan.search=layout")],
    ids=" ".join,
)
def test_trace_is_rejected(arguments: tuple[str, ...], capsys: Capture) -> None:
    assert main(["plan", *MODEL, *arguments, "plan.method=trace", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "plan.method=trace: has no JSON output" in captured.err
