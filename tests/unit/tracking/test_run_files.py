"""Files of a run folder: atomic, and continued after a resume."""

import csv
import json
from pathlib import Path

import pytest

from scalewise.metric_names import METRICS
from scalewise.run_files import MetricsFile, read_json, write_json, write_text


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def steps_of(path: Path) -> list[int]:
    return [int(row["step"]) for row in rows_of(path)]


def test_json_round_trips(tmp_path: Path) -> None:
    content = {"a": [1, None, "é"], "path": tmp_path}
    write_json(tmp_path / "x.json", content)
    assert read_json(tmp_path / "x.json") == content | {"path": str(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_killed_writer_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "x", "old")

    def dies(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", dies)
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "3", "\xff"])
def test_json_without_object_reads_as_empty(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "x.json").write_bytes(content.encode("latin-1"))
    assert read_json(tmp_path / "x.json") == {}


def test_metrics_csv_has_a_column_per_metric_and_a_row_per_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.csv")
    file.append([{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": None}])
    file.append([{"step": 3, "val/loss": 1e-30}])
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert header.split(",") == list(METRICS)
    rows = rows_of(tmp_path / "metrics.csv")
    assert [row["train/loss"] for row in rows] == ["2.5", "", ""]
    assert float(rows[2]["val/loss"]) == 1e-30


def test_undeclared_metric_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unheard/of"):
        MetricsFile(tmp_path / "metrics.csv").append([{"step": 1, "unheard/of": 1}])


def test_resume_drops_metrics_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    MetricsFile(path).append({"step": step, "train/loss": step / 3} for step in range(1, 6))
    before = rows_of(path)
    MetricsFile(path, after_step=3).append([{"step": 4}])
    assert steps_of(path) == [1, 2, 3, 4]
    assert rows_of(path)[:3] == before[:3]


def test_resume_in_another_folder_copies_metrics(tmp_path: Path) -> None:
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    MetricsFile(first).append({"step": step} for step in range(1, 4))
    MetricsFile(second, after_step=2, earlier=first).append([{"step": 3}])
    assert steps_of(second) == [1, 2, 3]
    assert steps_of(first) == [1, 2, 3]
    MetricsFile(tmp_path / "c.csv", after_step=2, earlier=tmp_path / "absent.csv")
    assert steps_of(tmp_path / "c.csv") == []


@pytest.mark.parametrize("truncated_row", ["3", "3,0.1,", "", ",,,,", "abc,1"])
def test_truncated_last_row_is_dropped(tmp_path: Path, truncated_row: str) -> None:
    path = tmp_path / "metrics.csv"
    MetricsFile(path).append({"step": step} for step in (1, 2))
    with path.open("a") as file:
        file.write(truncated_row)
    MetricsFile(path, after_step=9)
    assert steps_of(path) == [1, 2]


def test_columns_of_another_version_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,old/metric,train/loss\n1,5,2.5\n")
    MetricsFile(path, after_step=9)
    (row,) = rows_of(path)
    assert row["train/loss"] == "2.5"
    assert list(row) == list(METRICS)
    json.dumps(row)
