"""Outcomes as data: exit codes, suggested fixes and status.json."""

import json
import signal
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fixtures.hf_checkpoints import RANDOM_T5

from scalewise.launch import exit_reports, rank_worker
from scalewise.launch.outcomes import Outcome
from scalewise.launch.status_file import Status, git_state
from scalewise.launch.suggested_overrides import suggested_overrides
from scalewise.run_config import RunConfig
from scalewise.run_files import WANDB_FACTS, read_json, write_json
from scalewise.typed_override import command_line


def make_status(**changes: Any) -> Status:
    start_time = datetime.now(UTC) - timedelta(seconds=90)
    fields: dict[str, Any] = {
        "verb": "train",
        "name": "a-run",
        "question": "",
        "command": "scalewise train",
        "choices": {},
        "overrides": (),
        "varied": {},
        "changed": (),
        "world_size": 1,
        "config_hash": "0123456789abcdef",
        "started": start_time.isoformat(timespec="seconds"),
    }
    return Status(**fields | changes)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome("ok"), 0),
        (Outcome("failed"), 1),
        (Outcome("refused"), 2),
        (Outcome("out_of_memory"), 3),
        (Outcome("timeout"), 4),
        (Outcome("interrupted", signal_number=2), 130),
        (Outcome("interrupted", signal_number=15), 143),
    ],
)
def test_status_exit_codes(outcome: Outcome, code: int) -> None:
    assert outcome.exit_code == code


@pytest.mark.parametrize(
    ("outcome", "overrides", "expected"),
    [
        (Outcome("ok"), [], []),
        (Outcome("failed", "anything"), [], []),
        (Outcome("failed", "the loss is nan at step 3; lower optimizer.lr, or"), [],
         ["optimizer.lr=0.0001"]),
        (Outcome("out_of_memory"), [],
         ["trainer.micro_batch=4 trainer.global_batch=8", "objective.loss_chunk=1024",
          "memory=checkpoint_full"]),
        (Outcome("out_of_memory"),
         ["trainer.micro_batch=1", "precision=bf16_mixed", "model.layers=12"],
         ["memory=checkpoint_full"]),
        (Outcome("out_of_memory"), ["trainer.micro_batch=3", "launch.memory_limit_gib=2"],
         ["trainer.micro_batch=1 trainer.global_batch=3", "memory=checkpoint_full",
          "launch.memory_limit_gib=null"]),
        (Outcome("out_of_memory"), ["hardware=v100", "precision=fp32"],
         ["trainer.micro_batch=4 trainer.global_batch=8", "objective.loss_chunk=1024",
          "memory=checkpoint_full"]),
        (Outcome("out_of_memory"), ["hardware=h100", "data.sequence=8192", "model=llama3_8b",
          "parallelism=pipeline", "parallelism.pipeline=4", "trainer.micro_batch=4"],
         ["memory=checkpoint_full"]),
        (Outcome("out_of_memory"), ["hardware=h100", "precision=bf16_true", "model=llama3_8b",
          "trainer.micro_batch=1"],
         ["optimizer.offload=true"]),
        (Outcome("out_of_memory"), ["hardware=h100", "precision=bf16_true", "model=llama3_8b",
          "trainer.micro_batch=1", "data.sequence=5120", "compile=none"],
         ["memory=checkpoint_selective", "optimizer.offload=true"]),
        (Outcome("out_of_memory"), ["hardware=h100", "precision=bf16_true", "model=llama3_8b",
          "parallelism=ddp", "parallelism.replicas=2", "trainer.micro_batch=1",
          "data.sequence=8192", "optimizer=sgd"],
         ["memory=checkpoint_full"]),
        (Outcome("out_of_memory"), [*RANDOM_T5, "objective=seq2seq", "data=synthetic",
          "data.target_length=64"],
         ["trainer.micro_batch=4 trainer.global_batch=8", "memory=checkpoint_full"]),
        (Outcome("out_of_memory"), ["objective=module",
          "objective.target=fixtures.user_module.MyModule",
          "data.target=fixtures.user_module.MyData", "trusted_packages=[fixtures]"],
         ["precision=bf16_mixed"]),
        (Outcome("failed", "the loss is nan at step 3; lower optimizer.lr"),
         ["objective=module", "objective.target=fixtures.user_module.MyModule",
          "data.target=fixtures.user_module.MyData", "trusted_packages=[fixtures]"], []),
        (Outcome("timeout"), ["launch.timeout=30"],
         ["launch.timeout=60", "checkpoint.every=100"]),
        (Outcome("timeout"), ["launch.timeout=2.5", "checkpoint.every=5"], ["launch.timeout=5"]),
        (Outcome("interrupted", signal_number=15), [], ["resume=last"]),
    ],
)  # fmt: skip
def test_status_fixes_compose(
    compose: Callable[..., RunConfig], outcome: Outcome, overrides: list[str], expected: list[str]
) -> None:
    run = compose(*overrides, check_machine=False)
    suggestions = suggested_overrides(outcome, run, has_checkpoint=True)
    assert [fix["override"] for fix in suggestions] == expected
    assert all(fix["why"].endswith(".") for fix in suggestions)
    for fix in suggestions:
        compose(*overrides, *fix["override"].split(), check_machine=False)


@pytest.mark.parametrize("saved", [True, False])
def test_status_suggests_resume_only_with_a_checkpoint(
    saved: bool, compose: Callable[..., RunConfig], tmp_path: Path
) -> None:
    if saved:
        (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    outcome = Outcome("interrupted", signal_number=15)
    fixes = make_status().with_outcome(outcome, compose(), 1, tmp_path).cures
    assert [fix["override"] for fix in fixes] == ["resume=last"] * saved


def test_status_of_an_ended_run(compose: Callable[..., RunConfig], tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    write_json(tmp_path / WANDB_FACTS, {"mode": "offline", "id": "x"})
    outcome = Outcome("out_of_memory", "no memory", 1, ("last", "lines"))
    make_status().with_outcome(outcome, compose(), 2, tmp_path).write(tmp_path)
    status = read_json(tmp_path / "status.json")
    expected = {
        "status": "out_of_memory",
        "reason": "no memory",
        "exit_code": 3,
        "rank": 1,
        "attempts": 2,
        "log_tail": ["last", "lines"],
        "wandb": {"mode": "offline", "id": "x"},
    }
    assert {key: status[key] for key in expected} == expected
    assert 89 <= float(str(status["seconds"])) <= 95
    assert datetime.fromisoformat(str(status["ended"])) > datetime.fromisoformat(
        str(status["started"])
    )


def test_status_of_a_running_run(tmp_path: Path) -> None:
    make_status().write(tmp_path)
    record = json.loads((tmp_path / "status.json").read_text())
    assert (record["status"], record["exit_code"], record["ended"]) == ("running", None, None)
    assert {"device", "cores", "memory_bytes"} <= record["machine"].keys()
    assert {"python", "torch", "lightning", "wandb"} <= record["versions"].keys()


def test_status_command_can_be_pasted() -> None:
    command = command_line("train", ["data.paths=[a b/*.txt]", "seed=1"])
    assert command == "scalewise train 'data.paths=[a b/*.txt]' seed=1"


def test_status_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state() == {"git_commit": None, "git_dirty": None}


@pytest.mark.parametrize("changes", ["", " M a.py"])
def test_status_with_git(changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        git_output = "abc123\n" if "rev-parse" in command else f"{changes}\n"
        return subprocess.CompletedProcess(command, 0, git_output, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert git_state() == {"git_commit": "abc123", "git_dirty": bool(changes)}


@pytest.mark.parametrize("status", ["failed", "out_of_memory", "refused", "timeout"])
def test_failure_after_a_signal_is_interrupted(status: str) -> None:
    outcome = Outcome(status, "InductorError: g++ failed", 1, ("tail",))
    assert outcome.after_signal(0) is outcome
    after = outcome.after_signal(signal.SIGTERM)
    assert (after.status, after.exit_code, after.rank) == ("interrupted", 143, 1)
    assert after.reason == "SIGTERM, then InductorError: g++ failed"
    assert after.log_tail == ("tail",)


@pytest.mark.parametrize("outcome", [Outcome("ok"), Outcome("interrupted", "", None, (), 2)])
def test_signal_keeps_an_unrelated_outcome(outcome: Outcome) -> None:
    assert outcome.after_signal(signal.SIGTERM) is outcome


@pytest.mark.parametrize(
    "signal_number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2]
)
def test_rank_error_after_a_signal_is_interrupted(
    signal_number: int,
    compose: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def fit(*_: object) -> None:
        rank_worker.STOP._handle_signal(signal_number, None)
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr(rank_worker, "fit_run", fit)
    monkeypatch.setattr(rank_worker.STOP, "install", lambda: None)
    monkeypatch.setattr(rank_worker.STOP, "received_signal", 0)  # restored after the test
    exit_reports.prepare_reports(tmp_path)
    outcome = rank_worker.run_attempt(compose("tracking=none"), tmp_path, None, None)
    assert (outcome.status, outcome.signal_number) == ("interrupted", signal_number)
    assert "C++ compile error" in outcome.reason
    assert exit_reports.read_reports(tmp_path)[0].status == "interrupted"
