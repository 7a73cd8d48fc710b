"""Sweeps of cases: expected outcomes, their grades, and ``scalewise lab``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner
from fixtures.documentation import FENCE, ROOT

from scalewise.bench.lab_record import answers_text
from scalewise.config.labs import find_lab

FILE = """
defaults:
  - override /hydra/sweeper: cases
question: Does the large run fit?
hydra:
  mode: MULTIRUN
  sweeper:
    hypothesis: The large run is out of memory.
    answer: The large run is {large.status}, the small one {small.status}.
    cases:
      large: {overrides: +inject=oom, expect: {status: out_of_memory}}
      small: {overrides: seed=3, expect: {peak_memory_gib: [0, 1], loss_within: {other: 0.5}}}
      other: {overrides: seed=4, expect: {STATUS}}
"""


@pytest.fixture
def lab_folder(tmp_path: Path) -> Path:
    """User folder with the sweep ``mine``."""
    folder = tmp_path / "own"
    (folder / "sweeps").mkdir(parents=True)
    (folder / "sweeps" / "mine.yaml").write_text(FILE.replace("STATUS", "status: ok"))
    return folder


def test_sweep_of_cases_is_graded(run_cli: CliRunner, lab_folder: Path) -> None:
    line = ("-cd", str(lab_folder), "sweep=mine", *UNTRACKED)
    result = run_cli(*line).assert_ok()
    assert "3 of 3 cases as expected" in result.out
    folder = result.folder
    assert folder.json("sweep.json")["cases"]["large"] == {
        "expect": {"status": "out_of_memory"},
        "plan": "fits",
    }
    assert [job.status["name"] for job in folder.jobs] == ["large", "small", "other"]
    report = (folder.path / "report.html").read_text("utf-8")
    assert report.index('id="expectations"') < report.index('id="answer"')
    assert "The large run is out_of_memory, the small one ok." in report
    assert "The hypothesis held: 3 of 3 cases as expected" in " ".join(result.out.split())
    graded = run_cli("grade", "runs", command="lab").assert_ok()
    assert "mine" in graded.out
    assert "3 of 3 cases as expected" in graded.out

    (lab_folder / "sweeps" / "mine.yaml").write_text(FILE.replace("STATUS", "status: failed"))
    again = run_cli(*line, "hydra.sweeper.only=[other]")
    assert again.code == 1, again.failure_report
    assert "fail: ok, expected failed" in " ".join(again.out.split())
    regraded = run_cli("grade", "runs", command="lab")
    assert regraded.code == 1, regraded.failure_report
    assert "2 of 3 cases as expected" in regraded.out


def test_cases_are_planned_with_their_expectations(run_cli: CliRunner, lab_folder: Path) -> None:
    line = ("-cd", str(lab_folder), "sweep=mine", *UNTRACKED)
    result = run_cli(*line, command="plan")
    assert result.code == 1, result.failure_report  # a plan does not know of injected faults
    assert "2 of 3 cases as expected" in result.out
    only = run_cli(*line, "hydra.sweeper.only=[small,other]", command="plan").assert_ok()
    assert "2 of 2 cases as expected" in only.out


def _walk(*replaced: tuple[str, str]) -> list[str]:
    """Arguments of each command of the walk in docs/lab.md, with words replaced."""
    text = (ROOT / "docs" / "lab.md").read_text("utf-8")
    section = text.split("## A walk")[1].split("\n## ")[0]
    commands = [match["text"].strip() for match in FENCE.finditer(section)]
    for words, replacement in replaced:
        commands = [line.replace(words, replacement) for line in commands]
    return commands


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_walk_through_the_cpu_lab_works_as_written(run_cli: CliRunner) -> None:
    for line in _walk():
        _, command, *arguments = shlex.split(line)
        result = run_cli(*arguments, command=command, timeout=1800).assert_ok()
        if command == "train" and "only" not in line:
            assert "18 of 18 cases as expected" in result.out


def test_walk_through_one_case_of_the_cpu_lab(run_cli: CliRunner) -> None:
    small = "model.layers=2 trainer.max_steps=2 data.megabytes=0.5 hydra.sweeper.only=[one_device]"
    lines = _walk(
        (" 'hydra.sweeper.only=[bf16_true,bf16_mixed]'", ""), ("=lab_cpu", f"=lab_cpu {small}")
    )
    assert [shlex.split(line)[1] for line in lines] == ["lab", "plan", "train", "train", "lab"]
    for line in dict.fromkeys(lines):
        _, command, *arguments = shlex.split(line)
        result = run_cli(*arguments, command=command)
        assert result.code == int(command == "lab" and "grade" in line), result.failure_report
    assert "fail: not run" in result.out
    assert "1 of 18 cases as expected" in result.out


def test_labs_are_listed_with_question_and_status(run_cli: CliRunner) -> None:
    listed = run_cli(command="lab").assert_ok().out
    assert "lab_litgpt" in listed
    assert "planned only" in listed
    shown = run_cli("lab_litgpt", command="lab").assert_ok().out
    assert "Hypothesis: " in shown
    assert "fail: not run" in shown
    run_cli("lab_gpu", command="lab").assert_rejected("is not a lab", "lab_cpu")
    run_cli("grade", command="lab").assert_rejected("no folder given")


CPU_LABS = (
    "lab_adapters",
    "lab_mup",
    "lab_optimization",
    "lab_parallelism",
    "lab_pipeline",
    "lab_precision",
    "lab_quantization",
    "lab_long_sequences",
    "lab_scaling",
    "lab_scaling_law",
)


@pytest.mark.parametrize("name", [*CPU_LABS, "lab_communication"])
def test_cpu_lab_is_planned_as_expected(name: str, run_cli: CliRunner) -> None:
    out = run_cli(f"sweep={name}", command="plan").assert_ok().out
    num_cases = len(find_lab(name).expectations)
    assert f"{num_cases} of {num_cases} cases as expected" in out


def test_slow_link_lab_predicts_its_answer(run_cli: CliRunner) -> None:
    result = run_cli("sweep=lab_slow_link", command="plan").assert_ok()
    assert "6 of 6 cases as expected" in result.out
    assert "Predicted answer: On a link of 400 Gb/s" in result.out


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CPU_LABS)
def test_cpu_lab_meets_its_expectations(name: str, run_cli: CliRunner) -> None:
    result = run_cli(f"sweep={name}", "tracking=none", timeout=1500).assert_ok()
    assert "The hypothesis held" in result.out


def test_lab_is_recorded_in_a_checkout_only(run_cli: CliRunner) -> None:
    line = ("record", "lab_slow_link")
    run_cli(*line, command="lab").assert_rejected("run it in a checkout of scalewise")
    (run_cli.cwd / "experiments" / "records").mkdir(parents=True)
    run_cli(*line, command="lab").assert_ok()
    file = run_cli.cwd / "experiments" / "records" / "h100" / "labs.json"
    entry = json.loads(file.read_text("utf-8"))["lab_slow_link"]
    assert entry["predicted"].startswith("On a link of 400 Gb/s a step takes ")
    assert (entry["measured"], entry["cases"]["fsdp"]["happened"]) == ("", "fits")
    text = answers_text(file.parents[1])
    assert f"## {entry['question']}" in text
    assert "**Measured:** not yet; planned for H100" in text


def test_plan_of_a_lab_replaces_no_measured_record(run_cli: CliRunner) -> None:
    folder = run_cli.cwd / "experiments" / "records" / "h100"
    folder.mkdir(parents=True)
    content = json.dumps({"lab_slow_link": {"measured": "A step takes 1 s."}})
    (folder / "labs.json").write_text(content)
    result = run_cli("record", "lab_slow_link", command="lab")
    result.assert_rejected("has a measured result", "run it first: scalewise train sweep=")
    assert (folder / "labs.json").read_text() == content


def test_litgpt_lab_is_planned_as_expected(run_cli: CliRunner) -> None:
    result = run_cli("sweep=lab_litgpt", command="plan").assert_ok()
    assert "19 of 19 cases as expected" in result.out
    unfit = [line.split()[0] for line in result.out.splitlines() if "out_of_memory" in line]
    assert unfit == ["tinyllama", "13b"]


def test_blip2_lab_is_planned_as_expected(run_cli: CliRunner) -> None:
    result = run_cli("sweep=lab_blip2", "hardware=a100_80g", command="plan").assert_ok()
    assert "18 of 18 cases as expected" in result.out
    statuses = {
        status: [line.split()[0] for line in result.out.splitlines() if f" {status} " in line]
        for status in ("out_of_memory", "host_out_of_memory")
    }
    assert statuses == {
        "out_of_memory": ["baseline", "largest_model", "largest_model_batch_1"],
        "host_out_of_memory": ["offload"],
    }
