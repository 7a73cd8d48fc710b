"""Goodput of recorded attempts, by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from scalewise.goodput import (
    ATTEMPTS_FILE,
    AttemptProgress,
    append_progress,
    compute_goodput,
    read_attempts,
)
from scalewise.reports import html_report
from scalewise.reports.compare import compare_run
from scalewise.reports.goodput_table import goodput_section
from scalewise.reports.records import RunRecord, read_run

FIRST = AttemptProgress(
    started=1000.0,
    trained=1010.0,
    recorded=1026.0,
    start_step=0,
    step=4,
    steps_s=13.0,  # 10 s, then 1 s each
    first_step_s=10.0,
    validation_s=0.0,
    checkpoint_s=1.0,
)
FIRST_LINES = [
    FIRST,
    replace(FIRST, recorded=1035.0, step=10, steps_s=19.0, validation_s=2.0),
]
"""Ten steps, the last four of which are trained again."""
SECOND = AttemptProgress(
    started=1100.0,
    trained=1105.0,
    recorded=1120.0,
    start_step=6,
    step=16,
    steps_s=10.0,
    first_step_s=1.0,
    validation_s=2.0,
    checkpoint_s=1.5,
)


def test_first_step_is_compared_with_steps_of_its_batch() -> None:
    """Four steps of 10, 1, 1 and 1 s, then six with a larger batch, of 4 s each."""
    line = replace(FIRST, step=10, steps_s=37.0, recorded=1060.0)
    with_stages = replace(line, first_batch_steps=4, first_batch_s=13.0)
    for attempt, expected in ((line, 10 - 27 / 9), (with_stages, 9.0)):
        goodput = compute_goodput([[attempt]])
        assert goodput is not None
        assert goodput.lost_s["first_step"] == pytest.approx(expected)
        assert goodput.useful_s == pytest.approx(37 - expected)


def test_goodput_of_two_attempts() -> None:
    goodput = compute_goodput([FIRST_LINES, [SECOND]])
    assert goodput is not None
    assert goodput.attempts == 2
    assert goodput.useful_s == pytest.approx(6 + 10)
    assert goodput.lost_s == pytest.approx(
        {
            "start": 10 + 5,
            "first_step": 9,
            "validation": 2 + 2,
            "checkpoint": 1 + 1.5,
            "repeated": 4,
            "between": 65,
            "other": (25 - 19 - 2 - 1) + (15 - 10 - 2 - 1.5),
        }
    )
    assert goodput.wall_s == pytest.approx(1120 - 1000)
    assert goodput.fraction == pytest.approx(16 / 120)


def test_steps_are_repeated_once_by_attempts_that_resume_from_the_same_checkpoint() -> None:
    third = replace(SECOND, started=1200.0, trained=1201.0, recorded=1215.0)
    goodput = compute_goodput([FIRST_LINES, [SECOND], [third]])
    assert goodput is not None
    assert goodput.useful_s == pytest.approx(6 + 10)
    assert goodput.lost_s["repeated"] == pytest.approx(4 + 10)


def test_repeated_time_is_interpolated_within_a_log_interval() -> None:
    resumed = replace(SECOND, start_step=7)
    goodput = compute_goodput([[FIRST_LINES[1]], [resumed]])
    assert goodput is not None
    assert goodput.lost_s["repeated"] == pytest.approx(3)


def test_goodput_without_a_step_is_none(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == []
    assert compute_goodput([]) is None


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    append_progress(tmp_path, FIRST)
    good = asdict(FIRST)
    lines = [
        "",
        "[1]",
        "{",
        json.dumps({**good, "step": "4"}),
        json.dumps({**good, "step": True}),
        json.dumps({key: value for key, value in good.items() if key != "step"}),
        json.dumps(good).replace("13.0", "NaN"),
    ]
    with (tmp_path / ATTEMPTS_FILE).open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    append_progress(tmp_path, SECOND)
    assert read_attempts(tmp_path) == [[FIRST], [SECOND]]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    status: dict[str, Any] = {"status": "ok", "name": "long", "attempts": 1}
    (tmp_path / "status.json").write_text(json.dumps(status), encoding="utf-8")
    for line in FIRST_LINES:
        append_progress(tmp_path, line)
    return tmp_path


def read(folder: Path) -> RunRecord:
    run = read_run(folder)
    assert run is not None
    return run


def test_report_has_the_goodput_of_several_attempts_only(run_folder: Path) -> None:
    (job,) = compare_run(read(run_folder)).jobs
    assert goodput_section(job) is None
    append_progress(run_folder, SECOND)
    (job,) = compare_run(read(run_folder)).jobs
    section = goodput_section(job)
    assert section is not None
    assert section.finding == "13% of 2 min 00 s in two attempts"
    assert section.numbers is not None
    rows = dict(section.numbers.rows)
    assert rows["Training"] == ("16.0 s", "13.3%")
    assert rows["Between attempts"] == ("1 min 05 s", "54.2%")
    assert rows["Wall time"] == ("2 min 00 s", "100.0%")
    assert "Steps that a later attempt trained again" in rows
    page = html_report.write_page(run_folder).read_text("utf-8")
    assert "13% of 2 min 00 s in two attempts" in page
