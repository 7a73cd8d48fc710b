"""NCCL Flight Recorder: variables of the ranks, and dumps in the reason of a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalewise.launch import flight_recorder
from scalewise.launch.outcomes import Outcome


def test_recorder_writes_to_the_run_folder(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    flight_recorder.enable_recorder(tmp_path, environment)
    assert environment == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_recorder_rank_",
    }


def test_recorder_settings_of_the_user_are_kept(tmp_path: Path) -> None:
    user_variables = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "10",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/elsewhere/rank_",
    }
    environment = dict(user_variables)
    flight_recorder.enable_recorder(tmp_path, environment)
    assert environment == user_variables


@pytest.mark.parametrize(
    ("status", "dumps", "is_named"),
    [("failed", 2, True), ("timeout", 1, True), ("failed", 0, False), ("ok", 2, False)],
)
def test_reason_of_a_failure_names_the_dumps(
    status: str, dumps: int, is_named: bool, tmp_path: Path
) -> None:
    for rank in range(dumps):
        (tmp_path / f"flight_recorder_rank_{rank}").touch()
    outcome = flight_recorder.add_dump_path(Outcome(status, "a reason", 0), tmp_path)
    note = f"; NCCL Flight Recorder: {tmp_path}/flight_recorder_rank_*" if is_named else ""
    assert outcome == Outcome(status, f"a reason{note}", 0)
