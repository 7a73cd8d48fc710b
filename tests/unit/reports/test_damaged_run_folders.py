"""Report pages of folders with missing, truncated and damaged files."""

from pathlib import Path
from typing import Any

import pytest
from fixtures.report_pages import text_of, words
from fixtures.run_folders import make_run, make_sweep

from scalewise.errors import ScalewiseError
from scalewise.reports import records
from scalewise.reports.html_report import write_page
from scalewise.run_files import RecordError


def test_page_without_summary_and_metrics(tmp_path: Path) -> None:
    source = text_of(write_page(make_run(tmp_path / "r", summary=False)))
    assert "The run finished." in source


def test_page_drops_a_truncated_last_line(run_folder: Path) -> None:
    file = run_folder / "metrics.csv"
    file.write_text(file.read_text("utf-8") + "201,9.9", "utf-8")
    run = records.read_run(run_folder)
    assert run is not None
    assert run.series["train/loss"].steps[-1] == 200


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"metrics": 3}', '{"metrics": {"train/loss": "x"}}']
)
def test_page_of_an_invalid_summary(run_folder: Path, content: str) -> None:
    (run_folder / "summary.json").write_text(content, "utf-8")
    assert write_page(run_folder).exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "step\n",
        "a,b\n1,2\n",
        "step,train/loss\n1,nan\n2,inf\n",
        "step,train/loss\n1,1e308\n2,-1e308\n3,1e308\n",
        "\0\0\n",
    ],
)
def test_page_of_invalid_metrics(run_folder: Path, content: str) -> None:
    (run_folder / "metrics.csv").write_text(content, "utf-8")
    assert write_page(run_folder).exists()


def test_page_reports_a_nan_loss(run_folder: Path) -> None:
    lines = "step,train/loss\n1,9\n2,8\n3,nan\n4,nan\n"
    (run_folder / "metrics.csv").write_text(lines, "utf-8")
    assert "becomes non-finite at step 3" in words(text_of(write_page(run_folder)))


@pytest.mark.parametrize("time", ["yesterday", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59-23"])
def test_page_omits_an_invalid_start_time(time: str, tmp_path: Path) -> None:
    assert write_page(make_run(tmp_path / "r", started=time)).exists()


def test_page_of_jobs_with_and_without_a_time_zone(tmp_path: Path) -> None:
    zones = ("", "+00:00")
    sweep = make_sweep(
        tmp_path / "s",
        {"seed": [1, 2]},
        lambda number, varied: {
            "started": f"2026-11-29T01:51:38{zones[number]}",
            "ended": f"2026-11-29T01:52:38{zones[number]}",
            "machine": {"device": "cpu"},
        },
    )
    assert write_page(sweep).exists()


@pytest.mark.parametrize("number", [1e308, -1e308])
def test_page_of_numbers_whose_sums_overflow(number: float, tmp_path: Path) -> None:
    plan = {"plan/peak_bytes": number, "plan/step_s": number, "ledger": {"a": number, "b": number}}
    metrics = {"train/loss": number, "time/step_s": number}
    assert write_page(make_run(tmp_path / "r", plan=plan, metrics=metrics)).exists()


@pytest.mark.parametrize(
    "field",
    [
        {"choices": {"objective": [1]}},
        {"changed": 3},
        {"machine": 3},
        {"versions": {"torch": None}},
        {"wandb": 3},
        {"cures": [{"override": "a=b"}]},
        {"log_tail": 3},
        {"seconds": "long"},
        {"seconds": 1e308},
        {"world_size": None},
        {"attempts": True},
        {"command": None},
    ],
    ids=str,
)
def test_page_rejects_a_field_of_another_type(tmp_path: Path, field: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match=rf"status.json is damaged: {next(iter(field))}"):
        write_page(make_run(tmp_path / "r", **field))


def test_page_shows_a_damaged_job(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "s", {"seed": [1, 2]}, lambda number, varied: {})
    make_run(sweep / "0", log_tail=3)
    assert write_page(sweep).exists()
    record = records.read_record(sweep)
    assert isinstance(record, records.SweepRecord)
    assert "status.json is damaged: log_tail is 3, not a list" in record.jobs[0].reason


@pytest.mark.parametrize("content", [None, "{}"])
def test_page_rejects_other_folders(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "status.json").write_text(content, "utf-8")
    with pytest.raises(ScalewiseError, match="neither a run"):
        write_page(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_page_names_a_damaged_status(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content, "utf-8")
    with pytest.raises(RecordError, match=r"status\.json is damaged"):
        write_page(tmp_path)
    assert not (tmp_path / "report.html").exists()
