"""Synchronization of a run folder with W&B: what is sent and what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scalewise import cli
from scalewise.launch.job import JobSpec, with_wandb_group
from scalewise.planner.communication import list_collectives
from scalewise.planner.plan import plan_record
from scalewise.run_config import RunConfig
from scalewise.run_files import WANDB_FACTS, MetricsFile
from scalewise.tracking import tables, wandb_api, wandb_sync
from scalewise.tracking.connection import server_error_text
from scalewise.tracking.wandb_api import wandb_environment
from scalewise.tracking.wandb_sync import SyncedRun, _missing_rows


@dataclass
class ServerRun:
    """Run in a server response."""

    summary: dict[str, Any] = field(default_factory=dict)


def folder_of(tmp_path: Path, steps: int, **status: Any) -> SyncedRun:
    (tmp_path / "resolved.yaml").write_text("trainer: {log_every: 4}\ntracking: {}\n")
    (tmp_path / "status.json").write_text(json.dumps({"status": "ok", **status}))
    rows = [{"step": step, "train/loss": float(step)} for step in range(1, steps + 1)]
    MetricsFile(tmp_path / "metrics.csv").append(rows)
    return SyncedRun.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("last_server_step", "windows"),
    [
        (None, [(4, 2.5), (8, 6.5), (10, 9.5)]),
        (4, [(8, 6.5), (10, 9.5)]),
        (6, [(8, 7.5), (10, 9.5)]),
        (10, []),
    ],
)
def test_sync_sends_steps_after_the_last_on_the_server(
    last_server_step: int | None, windows: list[tuple[int, float]], tmp_path: Path
) -> None:
    run_folder = folder_of(tmp_path, 10)
    server_run = ServerRun({} if last_server_step is None else {"step": last_server_step})
    assert [
        (row["step"], row["train/loss"]) for row in _missing_rows(run_folder, server_run)
    ] == windows


def test_sync_omits_steps_before_a_resume(tmp_path: Path) -> None:
    run_facts = {"id": "x", "resumed_from": "runs/a/b/checkpoints/step-00000008"}
    run_folder = folder_of(tmp_path, 10, wandb=run_facts)
    assert [row["step"] for row in _missing_rows(run_folder, ServerRun())] == [10]


def test_sync_validation_ends_a_window(tmp_path: Path) -> None:
    run_folder = folder_of(tmp_path, 2)
    file = MetricsFile(tmp_path / "metrics.csv", after_step=2)
    file.append([{"step": 3, "train/loss": 1.0, "val/loss": 5.0}, {"step": 4, "train/loss": 2.0}])
    assert [
        (row["step"], row.get("val/loss")) for row in _missing_rows(run_folder, ServerRun())
    ] == [
        (3, 5),
        (4, None),
    ]


def test_sync_marks_a_run_without_process_as_failed(tmp_path: Path) -> None:
    run_folder = folder_of(tmp_path, 1, status="running", exit_code=None)
    status, reason, code = run_folder.outcome
    assert (status, code) == ("failed", 1)
    assert "gone" in reason
    assert SyncedRun(tmp_path, {"status": "timeout", "reason": "r", "exit_code": 4}).outcome == (
        "timeout",
        "r",
        4,
    )


def test_sync_reads_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / WANDB_FACTS).write_text('{"id": "abc", "project": "p"}')
    run_folder = folder_of(tmp_path, 1, wandb={"mode": "disabled", "url": None})
    assert run_folder.wandb["id"] == "abc"


def test_sync_orders_attempts_by_time(tmp_path: Path) -> None:
    names = ("run-20260102_000000-b", "offline-run-20260101_000000-a", "run-20260103_000000-c")
    for name in names:
        wandb_folder = tmp_path / "wandb" / name
        wandb_folder.mkdir(parents=True)
        (wandb_folder / f"run-{name[-1]}.wandb").touch()
    assert [log.stem for log in SyncedRun(tmp_path, {}).logs] == ["run-a", "run-b", "run-c"]


def test_sync_builds_a_table_of_the_plan(compose: Callable[..., RunConfig]) -> None:
    run = compose("experiment=smoke", "parallelism=ddp", "hardware=cpu")
    plan: dict[str, Any] = plan_record(run)
    predicted_tables = tables.predicted_tables(plan)
    assert {"plan/ledger", "plan/phases", "plan/collectives"} <= set(predicted_tables)
    assert sum(size for _, size in predicted_tables["plan/ledger"].rows) == plan["plan/peak_bytes"]
    for kind, axes, payload, size, count, total in predicted_tables["plan/collectives"].rows:
        assert total == size * count, (kind, axes)
        assert kind, (kind, axes)
        assert payload, (kind, axes)
        assert isinstance(axes, str), (kind, axes)
    predicted_bytes = [
        collective.bytes * collective.count for collective in list_collectives(run.parallelism, run)
    ]
    assert sum(row[-1] for row in predicted_tables["plan/collectives"].rows) == sum(predicted_bytes)


def test_sync_tables_omit_unmeasured_values() -> None:
    plan = {"plan/peak_bytes": 80, "plan/step_s": None}
    measured = tables.measured_table(plan, {"memory/peak_bytes": 100, "time/step_s": 0.5})
    assert measured["plan/against_measured"].rows == [("memory/peak_bytes", "B", 80.0, 100.0, 0.8)]
    assert measured["memory/measured"].rows == [("peak", 100)]
    assert tables.measured_table({}, {}) == {}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("giving up\nwhile retrying: HTTP 429: {}", "limits the request rate (HTTP 429)"),
        ("returned error 401: {}", "rejects the API key (HTTP 401); run `wandb login`"),
        ("HTTP 503: gone", "failed (HTTP 503); try again later"),
        ("wandb: ERROR torn\n", "torn"),
        (KeyError(), "KeyError"),
    ],
)
def test_sync_client_errors_become_one_line(error: object, message: str) -> None:
    assert message in server_error_text(error)
    assert "\n" not in server_error_text(error)


def test_sync_ignores_run_variables_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_NAME": "n",
        "WANDB_DIR": "/d",
        "WANDB_ENTITY": "e",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with wandb_environment():
        assert "WANDB_MODE" not in wandb_api.os.environ
        assert "WANDB_NAME" not in wandb_api.os.environ
        assert wandb_api.os.environ["WANDB_DIR"] != "/d"
        assert wandb_api.os.environ["WANDB_ENTITY"] == "e"
    assert {name: wandb_api.os.environ[name] for name in environment} == environment


class TestRejections:
    def test_publish_without_a_folder_is_rejected(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["publish"]) == 2
        assert "scalewise publish runs/NAME/TIMESTAMP" in capsys.readouterr().err

    def test_publish_rejects_all_invalid_folders(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder_of(tmp_path, 1)
        assert cli.main(["publish", str(tmp_path), "nowhere", str(tmp_path / "x")]) == 2
        stderr = capsys.readouterr().err
        assert "config rejected, 2 issues" in stderr
        assert "nowhere is not a folder of a run or a sweep" in stderr

    def test_publish_without_a_key_is_rejected(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder_of(tmp_path, 1)
        assert cli.main(["publish", str(tmp_path)]) == 2
        assert "no API key is set" in (stderr := capsys.readouterr().err)
        assert "run `wandb login`, or set WANDB_API_KEY" in stderr

    def test_publish_without_a_server_is_rejected(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        folder_of(tmp_path, 1)
        assert cli.main(["publish", str(tmp_path)]) == 1
        stderr = capsys.readouterr().err
        assert stderr == "scalewise: http://127.0.0.1:9 does not respond; try again later\n"


class TestGroup:
    def test_group_of_a_single_run_is_its_folder(
        self, compose: Callable[..., RunConfig], tmp_path: Path
    ) -> None:
        run = compose("experiment=smoke")
        folder = tmp_path / "name" / "time"
        assert with_wandb_group(JobSpec(run), folder, None).tracking.group == "name/time"
        assert with_wandb_group(JobSpec(run, sweep="s/t"), folder, None).tracking.group == "s/t"
        run_with_group = compose("experiment=smoke", "tracking.group=mine")
        assert (
            with_wandb_group(JobSpec(run_with_group, sweep="s/t"), folder, None).tracking.group
            == "mine"
        )

    def test_group_of_a_resumed_run_is_the_first_attempt(
        self, compose: Callable[..., RunConfig], tmp_path: Path
    ) -> None:
        earlier_folder = tmp_path / "name" / "first"
        earlier_folder.mkdir(parents=True)
        resume = earlier_folder / "checkpoints" / "step-00000008"
        order, folder = JobSpec(compose("experiment=smoke")), tmp_path / "name" / "second"
        assert with_wandb_group(order, folder, resume).tracking.group == "name/second"
        (earlier_folder / "status.json").write_text('{"wandb": {"group": "name/zeroth"}}')
        assert with_wandb_group(order, folder, resume).tracking.group == "name/zeroth"


def test_sync_does_not_recreate_a_deleted_run(tmp_path: Path) -> None:
    run_folder = folder_of(tmp_path, 1, wandb={"id": "x", "project": "p"})
    wandb_folder = tmp_path / "wandb" / "run-20260101_000000-x"
    wandb_folder.mkdir(parents=True)
    (wandb_folder / "run-x.wandb").touch()
    (tmp_path / wandb_sync.PUBLISHED_FILE).write_text('{"path": "http://here/e/p/x"}')

    class Empty:
        url = "http://here"

        def find_run(self, path: str) -> None:
            return None

        def sync_log(self, *_: object) -> None:
            raise AssertionError("sent again")

    with pytest.raises(wandb_sync.ScalewiseError, match="deleted"):
        wandb_sync.deliver_run(Empty(), run_folder, "e", "p")  # type: ignore[arg-type]  # what is asked of it
