"""The checkpoint that ``resume=`` selects, and rejected ones."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from fixtures.fixes import assert_fixes_work

from scalewise import inputs
from scalewise.checkpoints import manifest, store
from scalewise.errors import CheckpointError, ConfigError
from scalewise.launch import locks
from scalewise.launch.checkpoint_lookup import (
    find_checkpoint,
    locked_find_checkpoint,
    resume_issues,
)
from scalewise.run_config import RunConfig
from scalewise.run_files import write_json

Compose = Callable[..., RunConfig]
STEPS = 100


def write_run(run: RunConfig, folder: Path, *steps: int, status: str = "interrupted") -> Path:
    """Write a run folder: config, status and a checkpoint for each of ``steps``."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "resolved.yaml").write_text(yaml.safe_dump(run.as_dict()))
    write_json(folder / "status.json", {"status": status})
    for step in steps:
        tensors = {"model": {"w": torch.zeros(1)}, "optimizer": {"exp_avg/w": torch.zeros(1)}}
        store.save_checkpoint(
            manifest.checkpoint_path(folder / "checkpoints", step),
            tensors,
            store.pack_state({"global_step": step}),
        )
    return folder


def lookup(run: RunConfig, folder: Path, **options: bool) -> Path | None:
    return find_checkpoint(run, folder, STEPS, **options)


def rejection_message(run: RunConfig, folder: Path) -> str:
    with pytest.raises(CheckpointError) as excinfo:
        lookup(run, folder)
    return str(excinfo.value)


@pytest.mark.parametrize("status", ["interrupted", "failed", "running", "timeout"])
@pytest.mark.parametrize("resume", ["last", "auto"])
def test_lookup_finds_the_newest_run_of_the_name(
    compose: Compose, tmp_path: Path, resume: str, status: str
) -> None:
    run = compose(f"resume={resume}")
    write_run(run, tmp_path / "2026-01-01_00-00-00", 50)
    newest = write_run(run, tmp_path / "2026-01-02_00-00-00", 3, 7, status=status)
    assert lookup(run, tmp_path / "2026-01-03_00-00-00") == manifest.checkpoint_path(
        newest / "checkpoints", 7
    )


@pytest.mark.parametrize("resume", ["last", "auto"])
def test_lookup_orders_runs_by_utc_start(compose: Compose, tmp_path: Path, resume: str) -> None:
    """After a change of the time zone, folder names are not in order."""
    run = compose(f"resume={resume}")
    start_times = {
        "2026-01-01_23-00-00": "2026-01-01T14:00:00+00:00",
        "2026-01-01_15-00-00": "2026-01-01T10:00:00-05:00",
        "2026-01-01_09-00-00": "2026-01-01T09:00:00+00:00",
    }
    for name, start_time in start_times.items():
        write_run(run, tmp_path / name, 5)
        write_json(tmp_path / name / "status.json", {"status": "failed", "started": start_time})
    newest = tmp_path / "2026-01-01_15-00-00" / "checkpoints"
    assert lookup(run, tmp_path / "now") == manifest.checkpoint_path(newest, 5)


@pytest.mark.parametrize("resume", ["last", "auto", "the folder"])
def test_lookup_rejects_a_running_run(compose: Compose, tmp_path: Path, resume: str) -> None:
    folder = write_run(compose(), tmp_path / "2026-01-01", 5)
    run = replace(compose(), resume=str(folder) if resume == "the folder" else resume)
    with locks.acquire_lock(folder):
        message = rejection_message(run, tmp_path / "now")
    assert f"is in use by process {os.getpid()} on {socket.gethostname()}" in message
    assert f"end it: kill {os.getpid()}" in message
    assert lookup(run, tmp_path / "now") == manifest.checkpoint_path(folder / "checkpoints", 5)


def test_lookup_checks_processes_without_file_locks(compose: Compose, tmp_path: Path) -> None:
    folder = write_run(compose(), tmp_path / "2026-01-01", 5)
    status = {"status": "running", "process": os.getppid(), "started": "2036-01-01T00:00:00+00:00"}
    write_json(folder / "status.json", {**status, "host": socket.gethostname()})
    message = rejection_message(compose("resume=last"), tmp_path / "now")
    assert f"is in use by process {os.getppid()}" in message
    write_json(folder / "status.json", {**status, "host": "elsewhere"})
    assert lookup(compose("resume=last"), tmp_path / "now") is not None


def test_lookup_gives_two_processes_different_runs(compose: Compose, tmp_path: Path) -> None:
    """The second process finds the run locked, first by the lookup and then by the new folder."""
    source = write_run(compose(), tmp_path / "2026-01-01", 5)
    own_folder = tmp_path / "2026-01-02"
    run = compose("resume=last")
    with locked_find_checkpoint(run, own_folder, STEPS) as path:
        assert path == manifest.checkpoint_path(source / "checkpoints", 5)
        with (
            pytest.raises(CheckpointError, match=f"{source} is in use by process"),
            locked_find_checkpoint(run, tmp_path / "other", STEPS),
        ):
            pass
        own_folder.mkdir()
        (own_folder / "overrides.txt").touch()
        lock = locks.acquire_lock(own_folder)
    with lock, pytest.raises(CheckpointError, match=f"{own_folder} is in use by process"):
        lookup(run, tmp_path / "other")
    with locked_find_checkpoint(replace(run, resume=str(source)), own_folder, STEPS) as path:
        assert path is not None
        with locked_find_checkpoint(
            replace(run, resume=str(source)), own_folder, STEPS
        ) as second_path:
            assert second_path == path


def test_lookup_auto_starts_from_scratch_after_a_finished_run(
    compose: Compose, tmp_path: Path
) -> None:
    write_run(compose(), tmp_path / "2026-01-01", 50)
    finished_folder = write_run(compose(), tmp_path / "2026-01-02", 60, status="ok")
    run_folder = tmp_path / "2026-01-03"
    assert lookup(compose("resume=auto"), run_folder) is None
    assert lookup(compose("resume=last"), run_folder) == manifest.checkpoint_path(
        finished_folder / "checkpoints", 60
    )


def test_lookup_skips_a_run_without_checkpoint(compose: Compose, tmp_path: Path) -> None:
    older = write_run(compose(), tmp_path / "2026-01-01", 5)
    write_run(compose(), tmp_path / "2026-01-02")
    run_without_checkpoint = write_run(compose(), tmp_path / "2026-01-03", 9)
    (file,) = (
        manifest.checkpoint_path(run_without_checkpoint / "checkpoints", 9) / "model"
    ).iterdir()
    os.truncate(file, 1)
    expected = manifest.checkpoint_path(older / "checkpoints", 5)
    assert lookup(compose("resume=last"), tmp_path / "2026-01-04") == expected


def test_lookup_without_checkpoints_is_rejected(compose: Compose, tmp_path: Path) -> None:
    run_folder = tmp_path / "runs" / "now"
    assert lookup(compose(), run_folder) is None
    assert lookup(compose("resume=auto"), run_folder) is None
    assert "no complete checkpoint under" in rejection_message(compose("resume=last"), run_folder)


def test_lookup_finds_the_same_job_of_the_last_sweep(compose: Compose, tmp_path: Path) -> None:
    for job in ("0", "1"):
        write_run(compose(), tmp_path / "2026-01-01" / job, 3 + int(job))
    path = lookup(compose("resume=auto"), tmp_path / "2026-01-02" / "1", in_sweep=True)
    assert path == manifest.checkpoint_path(tmp_path / "2026-01-01/1/checkpoints", 4)


@pytest.mark.parametrize("subpath", ["", "checkpoints", "checkpoints/step-00000007"])
def test_lookup_accepts_run_and_checkpoint_paths(
    compose: Compose, tmp_path: Path, subpath: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(compose(), tmp_path / "run", 3, 7)
    expected = manifest.checkpoint_path(folder / "checkpoints", 7)
    assert lookup(compose(f"resume='{folder / subpath}'"), tmp_path / "now") == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert lookup(compose(f"resume='~/run/{subpath}'"), tmp_path / "now") == expected
    monkeypatch.chdir(tmp_path)
    assert lookup(compose(f"resume='run/{subpath}'"), tmp_path / "now") == expected


@pytest.mark.parametrize("resume_value", ["run", "run/checkpoints", "last"])
def test_lookup_skips_a_damaged_checkpoint_with_a_message(
    compose: Compose, tmp_path: Path, resume_value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(compose(), tmp_path / "run", 3, 7)
    damaged = manifest.checkpoint_path(folder / "checkpoints", 7)
    (damaged / manifest.TRAINING).write_bytes(b"")
    resume = resume_value if resume_value == "last" else tmp_path / resume_value
    path = lookup(compose(f"resume='{resume}'"), tmp_path / "now")
    assert path == manifest.checkpoint_path(folder / "checkpoints", 3)
    stdout = capsys.readouterr().out
    assert stdout == f"resume: {damaged} is damaged; resuming from step-00000003\n"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "there is no such checkpoint folder"),
        (lambda path: path.write_text(""), "there is no such checkpoint folder"),
        (lambda path: path.mkdir(), "is not a scalewise checkpoint"),
        (lambda path: (path / "checkpoints").mkdir(parents=True), "no complete checkpoint under"),
    ],
)
def test_lookup_rejects_other_paths(
    compose: Compose, tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    make(tmp_path / "x")
    run = replace(compose(), resume=f"{tmp_path}/x")
    assert reason in rejection_message(run, tmp_path / "now")


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (["optimizer.lr=1", "trainer.max_steps=5", "schedule=linear", "name=other"], []),
        (["precision=bf16_mixed", "checkpoint.every=1", "model.dropout=0.1"], []),
        (["model.layers=2"], ["model.layers"]),
        (["optimizer=sgd"], ["optimizer"]),
        (["adapter=lora"], ["adapter"]),
        (["trainer.micro_batch=4", "trainer.global_batch=8"], []),
        (["trainer.micro_batch=4"], ["trainer.global_batch"]),
        (["trainer.global_batch=16"], ["trainer.global_batch"]),
        (["optimizer.lr=1", "optimizer.weight_decay=0", "optimizer.beta2=0.5"], []),
        (["data.sequence=64", "seed=9"], ["data.sequence", "seed"]),
        (["data=synthetic"], ["data"]),
        (["+trainer.sequence_warmup={a:{until_step:2,sequence:8}}"], ["trainer.sequence_warmup"]),
        (["hardware=cpu", "parallelism=ddp", "trainer.micro_batch=4", "trainer.global_batch=8"],
         []),
        (["hardware=cpu", "parallelism=ddp"], ["trainer.global_batch"]),
        (["hardware=cpu", "parallelism=tensor"], []),
        (["hardware=cpu", "parallelism=fsdp", "trainer.micro_batch=4", "trainer.global_batch=8"],
         []),
    ],
)  # fmt: skip
def test_resume_rejects_changed_settings(
    compose: Compose, tmp_path: Path, overrides: list[str], keys: list[str]
) -> None:
    folder = write_run(compose(), tmp_path / "run", 3)
    run = compose(*overrides, f"resume={folder}")
    issues = list(resume_issues(run, folder))
    assert sorted(issue.key for issue in issues) == keys

    def resumed(changes: Sequence[str]) -> None:
        run = compose(*changes)
        if run.resume and (resume_rejections := list(resume_issues(run, folder))):
            raise ConfigError(resume_rejections)

    for issue in issues:
        assert_fixes_work([*overrides, f"resume={folder}"], issue, resumed)
    if keys:
        message = rejection_message(run, tmp_path / "now")
        assert all(f"{key}=" in message for key in keys)
    else:
        assert lookup(run, tmp_path / "now") is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["parallelism=ddp"], ["trainer.micro_batch=16"]),
        (["parallelism=hsdp", "trainer.micro_batch=2"], []),
        (["parallelism=context", "trainer.micro_batch=4"], ["trainer.global_batch=4"]),
        (["parallelism=ddp", "trainer.micro_batch=2"], ["trainer.micro_batch=4"]),
    ],
)
def test_resume_compares_the_batch_of_the_earlier_strategy(
    compose: Compose, tmp_path: Path, before: list[str], after: list[str]
) -> None:
    earlier_run, run = compose("hardware=cpu", *before), compose("hardware=cpu", *after)
    folder = write_run(earlier_run, tmp_path / "run", 3)
    assert earlier_run.global_batch == run.global_batch
    assert list(resume_issues(run, folder)) == []
    (issue,) = resume_issues(compose("trainer.global_batch=7"), folder)
    assert (issue.key, issue.value) == ("trainer.global_batch", 7)
    assert f"trained with {earlier_run.global_batch}" in issue.reason
    assert f"trainer.global_batch={earlier_run.global_batch}" in issue.fix


def test_resume_rejects_an_unknown_earlier_strategy(compose: Compose, tmp_path: Path) -> None:
    folder = write_run(compose("trainer.global_batch=8"), tmp_path / "run", 3)
    resolved = yaml.safe_load((folder / "resolved.yaml").read_text())
    resolved["parallelism"] = {"_target_": "somebodys.Layout"}
    (folder / "resolved.yaml").write_text(yaml.safe_dump(resolved))
    assert list(resume_issues(compose(), folder)) == []


def test_resume_rejects_a_run_without_remaining_steps(compose: Compose, tmp_path: Path) -> None:
    folder = write_run(compose(), tmp_path / "run", STEPS)
    message = rejection_message(compose(f"resume={folder}"), tmp_path / "now")
    assert "the checkpoint is at step 100 of 100" in message
    assert "trainer.max_steps above 100" in message
    assert lookup(compose("resume=auto"), tmp_path / "now") == manifest.checkpoint_path(
        folder / "checkpoints", STEPS
    )
    assert "the checkpoint is at step 100 of 100" in rejection_message(
        compose("resume=last"), tmp_path / "now"
    )


def test_resume_accepts_an_absent_config(compose: Compose, tmp_path: Path) -> None:
    assert list(resume_issues(compose(), tmp_path)) == []


@pytest.mark.parametrize("content", ["", "[1", "- 1\n", "model: text", "seed: [1]"])
def test_resume_names_a_damaged_config(compose: Compose, tmp_path: Path, content: str) -> None:
    (tmp_path / "resolved.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"resolved\.yaml is damaged.*; restore it from a copy"):
        list(resume_issues(compose(), tmp_path))


@pytest.mark.parametrize("trainer", [0.5, {}, {"micro_batch": "text"}, [], "text"], ids=repr)
def test_resume_names_a_config_without_batch(
    compose: Compose, tmp_path: Path, trainer: object
) -> None:
    values = {**compose().as_dict(), "trainer": trainer}
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=f"{tmp_path}/resolved.yaml is damaged") as excinfo:
        list(resume_issues(compose(), tmp_path))
    assert "restore it from a copy" in str(excinfo.value)


def write_resolved_run(run: RunConfig, folder: Path) -> Path:
    """Write the files that a run records before it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resolved.yaml").write_text(yaml.safe_dump(run.as_dict()))
    inputs.write_inputs(run.as_dict(), folder)
    return folder


def reasons(run: RunConfig, folder: Path) -> dict[str, str]:
    return {issue.key: issue.reason for issue in resume_issues(run, folder)}


def test_resume_accepts_moved_files(compose: Compose, tmp_path: Path) -> None:
    for disk in ("disk1", "disk2"):
        (tmp_path / disk).mkdir()
        (tmp_path / disk / "text.txt").write_text("some text")
        (tmp_path / disk / "tokenizer.json").write_text("{}")

    def run_on_disk(disk: str) -> RunConfig:
        files = f"data.paths=[{disk}/text.txt]", f"data.tokenizer={disk}/tokenizer.json"
        return compose("data=text", *files)

    folder = write_resolved_run(run_on_disk("disk1"), tmp_path / "runs" / "a")
    assert reasons(run_on_disk("disk2"), folder) == {}
    assert reasons(run_on_disk(str(tmp_path / "disk1")), folder) == {}
    (tmp_path / "disk2" / "text.txt").write_text("other text")
    reason_start = "was trained on files with other content"
    assert reasons(run_on_disk("disk2"), folder) == {
        "data.paths": f"the checkpoint under {folder} {reason_start}"
    }
    (tmp_path / "disk1" / "tokenizer.json").write_text("{ }")
    reason_text = f"the files have changed since the checkpoint under {folder} was trained"
    assert reasons(run_on_disk("disk1"), folder) == {"data.tokenizer": reason_text}


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_resume_of_earlier_versions_has_no_special_tokens(
    compose: Compose, tmp_path: Path, has_tokenizer: bool
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "x.txt").write_text("some text")
    overrides = [f"data.tokenizer={'tokenizer.json' if has_tokenizer else 'null'}"]
    run = compose("data=text", "data.paths=[x.txt]", *overrides)
    values = yaml.safe_load(yaml.safe_dump(run.as_dict()))
    del values["data"]["special_tokens"]
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values))
    issue_keys = [issue.key for issue in resume_issues(run, tmp_path)]
    assert issue_keys == ["data.special_tokens"] * has_tokenizer
    if has_tokenizer:
        (issue,) = resume_issues(run, tmp_path)
        assert issue.fix == "set data.special_tokens=false, or resume=null"
        overrides.append("data.special_tokens=false")
    assert not list(resume_issues(compose("data=text", "data.paths=[x.txt]", *overrides), tmp_path))
