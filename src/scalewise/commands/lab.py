"""``scalewise lab``: experiments with expected outcomes, their last results, and their grades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from scalewise import regular_files
from scalewise.bench import lab_record, record
from scalewise.commands import show_grades
from scalewise.config import app, labs
from scalewise.config.compose import compose
from scalewise.config.labs import Lab
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.expectations import Expectation
from scalewise.hardware import DeviceKind, this_machine
from scalewise.plain_console import get_console, styled_text
from scalewise.planner.plan import build_plan
from scalewise.reports import grading, records
from scalewise.reports.grading import GradedCase
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.run_files import read_json
from scalewise.sweep_question import SweepQuestion
from scalewise.tracking.sweep_record import sweep_start
from scalewise.typed_override import command_line

RUNS = Path("runs")
"""Folder of runs, below the current folder."""
STYLES = {"passed": "green", "failed": "red"}


def main(arguments: Sequence[str]) -> int:
    """Run ``scalewise lab [NAME]``, ``lab grade FOLDER...`` or ``lab record NAME``.

    Return the exit code.
    """
    app.prepare()
    match list(arguments):
        case []:
            _print_labs()
            return 0
        case ["grade", *folders]:
            return _grade_folders([regular_files.expand_home(folder) for folder in folders])
        case ["record", name, *overrides]:
            return _record_lab(labs.find_lab(name), overrides)
        case [name] if name != "record":
            _print_lab(labs.find_lab(name))
            return 0
    forms = ("scalewise lab", "lab NAME", "lab grade FOLDER", "lab record NAME")
    reason = "no lab given" if list(arguments) == ["record"] else "too many arguments"
    raise ConfigError.for_key("", "", reason, ", or scalewise ".join(forms))


def _print_labs() -> None:
    """Print one line per lab: name, status, question."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("lab", "cases", "status", "question and hypothesis"):
        table.add_column(head, justify="right" if head == "cases" else "left", overflow="fold")
    for lab in labs.find_labs().values():
        status = _status(lab)
        table.add_row(
            lab.name,
            str(len(lab.expectations)),
            styled_text((status, STYLES.get(status, "dim"))),
            f"{lab.question} {lab.hypothesis}",
        )
    get_console().print(table)


def _print_lab(lab: Lab) -> None:
    """Print question, hypothesis, expectations and the last result of a lab."""
    print_lines(lab.question, f"Hypothesis: {lab.hypothesis}", f"Status: {_status(lab)}")
    predict, train = (command_line(it, [f"sweep={lab.name}"]) for it in ("plan", "train"))
    print_lines(f"Prediction: {predict}", f"Run: {train}", "")
    if folders := _sweep_folders(lab.name):
        print_lines(f"Last result: {folders[-1]}")
    show_grades.print_grades(_grade(lab.expectations, folders), lab.answer)


def _status(lab: Lab) -> str:
    """Status of a lab: never run, passed, failed, or planned only if this machine cannot run it."""
    if folders := _sweep_folders(lab.name):
        passed = all(case.passed for case in _grade(lab.expectations, folders))
        return "passed" if passed else "failed"
    run = compose([f"sweep={lab.name}"], check_machine=False)
    needs_cuda = run.hardware.device is DeviceKind.cuda
    return "planned only" if needs_cuda and not this_machine().gpus else "never run"


def _sweep_folders(name: str) -> list[Path]:
    """Folders of the sweeps of a lab below ``runs``, the oldest first."""
    return sorted((file.parent for file in (RUNS / name).glob("*/sweep.json")), key=sweep_start)


def _grade_folders(folders: Sequence[Path]) -> int:
    """Print the grades of the labs below ``folders``; return 0 if every case is as expected.

    Cases of several sweeps of one lab are graded together; the newest run of a case counts. The
    expectations are those of the installed lab, else those that the sweep recorded.
    """
    issues = [
        ConfigIssue("", "", f"{folder} is not a folder")
        for folder in folders
        if not folder.is_dir()
    ]
    files = [file for folder in folders for file in _sweep_files(folder)]
    if not folders or issues:
        raise ConfigError(issues or [ConfigIssue("", "", "no folder given", "lab grade FOLDER")])
    sweeps: dict[str, list[Path]] = {}
    for folder in sorted((file.parent for file in files), key=sweep_start):
        if name := _lab_name(folder):
            sweeps.setdefault(name, []).append(folder)
    if not sweeps:
        reason = f"no sweep of cases in {', '.join(map(str, folders))}"
        raise ConfigError.for_key("", "", reason, "run a lab: scalewise train sweep=lab_cpu")
    passed = True
    for name, sweep_folders in sweeps.items():
        installed = labs.find_labs().get(name)
        expectations = installed.expectations if installed else {}
        print_lines(f"{name}: {', '.join(map(str, sweep_folders))}")
        cases = _grade(expectations, sweep_folders)
        show_grades.print_grades(cases, installed.answer if installed else "")
        passed = passed and all(case.passed for case in cases)
    return 0 if passed else 1


def _record_lab(lab: Lab, overrides: Sequence[str]) -> int:
    """Write the last result of a lab to the records of the checkout; return 0 if it is as expected.

    A lab that never ran here is recorded with its plans, with ``overrides`` of every case.
    """
    base = compose([f"sweep={lab.name}", *overrides], check_machine=False)
    path = record.record_path(lab_record.NAME, base.hardware)
    folders = _sweep_folders(lab.name)
    if not folders and read_json(path).get(lab.name, {}).get("measured"):
        reason = f"has a measured result in {path}, and no run in this folder that could replace it"
        fix = f"run it first: scalewise train sweep={lab.name}"
        raise ConfigError.for_key("sweep", lab.name, reason, fix)
    cases = _grade(lab.expectations, folders) if folders else _plan_cases(lab, overrides)
    question = SweepQuestion(lab.question, lab.hypothesis, lab.answer)
    entry = lab_record.lab_entry(question, cases, planned=not folders)
    command = command_line("lab", ["record", lab.name, *overrides])
    content = record.build_record({**entry, "hardware": base.hardware.match or "cpu"}, command)
    record.write_record(path, lab_record.merge_entry(path, lab.name, content))
    show_grades.print_grades(cases, lab.answer, planned=not folders)
    print_lines(f"Recorded in {path}")
    return 0 if all(case.passed for case in cases) else 1


def _plan_cases(lab: Lab, overrides: Sequence[str]) -> list[GradedCase]:
    outcomes = {}
    for case in lab.cases:
        plan = build_plan(
            compose([f"sweep={lab.name}", *overrides, *case.overrides], check_machine=False)
        )
        outcomes[case.name] = show_grades.plan_outcome(plan)
    return grading.grade_plans(lab.expectations, outcomes)


def _sweep_files(folder: Path) -> list[Path]:
    """Records of sweeps in a folder, in its sweeps and in their folders: runs/NAME/TIME."""
    return [file for depth in ("", "*/", "*/*/") for file in folder.glob(f"{depth}sweep.json")]


def _read_sweep(folder: Path) -> SweepRecord:
    record = records.read_record(folder)
    assert isinstance(record, SweepRecord)
    return record


def _lab_name(folder: Path) -> str:
    """Name of the sweep file of a sweep of cases; empty for other sweeps."""
    sweep = _read_sweep(folder)
    names = [str(run.choices["sweep"]) for run in sweep.jobs if run.choices.get("sweep")]
    return (names or [sweep.name])[0] if sweep.expectations else ""


def _grade(expectations: Mapping[str, Expectation], folders: Sequence[Path]) -> list[GradedCase]:
    """Grade the newest run of each case; ``folders``: sweeps of one lab, the oldest first."""
    runs: dict[str, RunRecord] = {}
    fit_statuses: dict[str, str] = {}
    recorded: dict[str, Expectation] = {}
    for folder in folders:
        sweep = _read_sweep(folder)
        runs |= grading.runs_by_case(sweep)
        fit_statuses |= sweep.fit_statuses
        recorded |= sweep.expectations
    return grading.grade_runs(expectations or recorded, runs, fit_statuses)
