"""Run files are checked against their declared types; writers produce these types."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from fixtures.damage import WRONG_TYPE_VALUES
from fixtures.golden import GOLDEN_DIR

from scalewise import run_files
from scalewise.hpo.storage import TrialLink
from scalewise.launch.status_file import Status
from scalewise.record_types import RECORDS, StatusRecord, TrialRecord, type_mismatches
from scalewise.run_files import RecordError

STATUS = {
    "choices": {"objective": "causal_lm"},
    "overrides": ["seed=1"],
    "changed": [{"key": "seed", "default": 1, "value": 2}],
    "exit_code": None,
    "attempts": 1,
    "seconds": 7,
    "git_dirty": False,
    "machine": {"device": "cpu", "later": 1},
}


def mismatches(**changes: object) -> list[str]:
    return list(type_mismatches(STATUS | changes, StatusRecord))


def test_record_of_declared_types_is_accepted() -> None:
    assert mismatches() == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"choices": {"objective": [1]}}, "choices.objective is [1], not text"),
        ({"choices": []}, "choices is [], not a mapping"),
        ({"overrides": ["a", 2]}, "overrides[1] is 2, not text"),
        ({"overrides": "a"}, "overrides is a, not a list"),
        ({"changed": [{"key": "a", "default": 1}]}, "changed[0].value is missing"),
        ({"exit_code": 0.5}, "exit_code is 0.5, not an integer of 0 or more or null"),
        ({"attempts": True}, "attempts is true, not an integer of 0 or more"),
        ({"attempts": 2**63}, f"attempts is {2**63}, not an integer of 0 or more"),
        ({"exit_code": -7}, "exit_code is -7, not an integer of 0 or more or null"),
        ({"seconds": float("nan")}, "seconds is nan, not a number below 1e100"),
        ({"seconds": float("inf")}, "seconds is inf, not a number below 1e100"),
        ({"seconds": -1e308}, "seconds is -1e+308, not a number below 1e100"),
        ({"seconds": 10**400}, f"seconds is 1{'0' * 119}..., not a number below 1e100"),
        ({"git_dirty": 1}, "git_dirty is 1, not true or false or null"),
        ({"machine": {"cores": "4"}}, "machine.cores is 4, not an integer of 0 or more"),
    ],
)
def test_record_value_of_another_type_is_named(change: dict[str, object], expected: str) -> None:
    assert mismatches(**change) == [expected]


@pytest.mark.parametrize(
    "path", ["/etc", "..", "../x", "a/../..", "", ".", "a\0b", "x" * 300, "0/" + "x" * 300]
)
@pytest.mark.parametrize("key", ["folder", "planned_folder"])
def test_job_outside_of_its_sweep_is_rejected(key: str, path: str) -> None:
    job = {"number": 0, "folder": "0", "planned_folder": "lr/0", "status": "ok", "varied": {}}
    assert not [*type_mismatches({"jobs": [job]}, RECORDS["sweep.json"])]
    (reason,) = type_mismatches({"jobs": [job | {key: path}]}, RECORDS["sweep.json"])
    assert reason.startswith(f"jobs[0].{key} is ")
    assert reason.endswith(", not a folder in this folder")


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("value", ["number", "list", "text"])
def test_record_readers_reject_a_field_of_another_type(
    name: str, value: str, tmp_path: Path
) -> None:
    record_type = RECORDS[name]
    hints = get_type_hints(record_type) if isinstance(record_type, type) else {"any": str}
    for key in hints:
        content = json.dumps({key: WRONG_TYPE_VALUES[value]})
        (tmp_path / name).write_text(content, "utf-8")
        if not any(type_mismatches(json.loads(content), record_type)):
            continue
        load_file = run_files.load_yaml if name.endswith(".yaml") else run_files.load_json
        with pytest.raises(RecordError, match=rf"{name} is damaged: .+; restore it from a copy"):
            load_file(tmp_path / name)
        assert run_files.read_json(tmp_path / name) == {}, key


@pytest.mark.parametrize(
    ("recorded_value", "record_type"), [(Status, StatusRecord), (TrialLink, TrialRecord)]
)
def test_record_fields_are_all_declared(recorded_value: Any, record_type: Any) -> None:
    assert {field.name for field in fields(recorded_value)} == set(get_type_hints(record_type))


def test_golden_records_are_accepted() -> None:
    files = [file for file in (GOLDEN_DIR / "sweep").rglob("*") if file.name in RECORDS]
    assert {"status.json", "sweep.json", "plan.json", "resolved.yaml"} <= {f.name for f in files}
    for file in files:
        load_file = run_files.load_yaml if file.suffix == ".yaml" else run_files.load_json
        assert load_file(file), file
