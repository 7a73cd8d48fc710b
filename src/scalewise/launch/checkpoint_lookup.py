"""Finds the checkpoint that ``resume=`` means, and refuses one of another run."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalewise import inputs
from scalewise.checkpoints import store
from scalewise.config import registry
from scalewise.config.renamed_targets import RENAMED_TARGETS, rename_targets
from scalewise.console import print_lines
from scalewise.errors import CheckpointError, ConfigIssue, format_value
from scalewise.launch import locks
from scalewise.launch.locks import InUseError, LockOwner
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import RecordError, load_yaml, read_json
from scalewise.tracking.sweep_record import is_running, release_reserved, run_start
from scalewise.typed_override import format_override

Compared = tuple[tuple[str, tuple[str, ...] | None], ...]
_UNCOMPARED = ("weights", "dropout")
"""Fields of a model that may change between a checkpoint and its resumption."""


def find_checkpoint(
    run: RunConfig, folder: Path, steps: int, *, in_sweep: bool = False
) -> Path | None:
    """Returns the checkpoint to go on from to ``steps``, or None to start anew.

    ``resume`` is a path (a checkpoint or a run's folder), ``last`` (the newest run of this name)
    or ``auto`` (the same, if it did not finish; else a fresh start). Only ``auto`` goes on from one
    that leaves no step to take, of a run that was stopped after it. Raises ``CheckpointError``.
    """
    asked = run.resume
    if asked is None:
        return None
    if asked not in ("last", "auto"):
        path = _value_at(Path(asked).expanduser())
    else:
        path = _newest_checkpoint(asked, folder, in_sweep)
        if path is None and asked == "auto":
            return None
    if path is None:
        where = folder.parent if asked == "last" else asked
        raise CheckpointError.for_key(
            "resume", asked, f"no whole checkpoint under {where}", "give a path, or resume=null"
        )
    path = path.absolute()
    done = store.verify_checkpoint(path)
    reject_running(asked, path.parents[1])
    issues = list(resume_issues(run, path.parents[1]))
    if done > steps or (done == steps and asked != "auto"):
        fix = f"set trainer.max_steps above {done}, or resume=null"
        issues.append(ConfigIssue("resume", asked, f"has done {done} of {steps} steps", fix))
    if issues:
        raise CheckpointError(issues)
    if done == steps:
        print_lines(f"resume: {path.parents[1]} has done all {steps} steps; its end follows")
    return path


@contextmanager
def locked_find_checkpoint(
    run: RunConfig, folder: Path, steps: int, *, in_sweep: bool = False
) -> Iterator[Path | None]:
    """Yields ``checkpoint_for``; meanwhile no other process may choose the same newest run.

    The caller locks its own folder before it leaves, so that the next process finds that one.
    """
    while True:
        known = _newest_first(folder, in_sweep)
        path = find_checkpoint(run, folder, steps, in_sweep=in_sweep)
        if path is None or run.resume not in ("last", "auto"):
            yield path
            return
        try:
            lock = locks.acquire_lock(path.parents[1])
        except InUseError as error:
            fix = f"wait for it, or end it: {error.owner.kill_command}"
            raise CheckpointError.for_key("resume", run.resume, str(error), fix) from None
        with lock:
            if _newest_first(folder, in_sweep) == known:
                yield path
                return


def resume_issues(run: RunConfig, folder: Path) -> Iterator[ConfigIssue]:
    """Yields how the run that wrote a checkpoint differs where it must not.

    Raises ``RecordError`` where its ``resolved.yaml`` is damaged; without one nothing is compared.
    """
    earlier = rename_targets(load_yaml(folder / "resolved.yaml"), RENAMED_TARGETS)
    if not earlier:
        return
    now = run.as_dict()
    inputs.add_missing(earlier, now)
    read_then = inputs.recorded_digests(folder)
    read_now = inputs.content_digests(now) if read_then else {}
    # None stands for a micro batch a rank: what must not differ is how many rows that makes.
    try:
        earlier["trainer"] = {"global_batch": _global_batch(earlier)}
    except (AttributeError, KeyError, TypeError, ValueError):
        reason = "is damaged: the batch of its trainer and parallelism is not there"
        raise RecordError.for_file(folder / "resolved.yaml", reason) from None
    now["trainer"] = {"global_batch": run.global_batch}
    own: Compared = (
        ("objective", ("_target_", "target", "arguments")),
        ("data", ("_target_", "target")),
    )
    ours: Compared = (
        ("model", None),
        ("adapter", None),
        ("quantization", None),
        ("optimizer", ("_target_",)),
        ("trainer", ("global_batch",)),
        ("data", None),
    )
    # How many rows a step of a user's module has, its loaders say alone.
    for group, keys in (*(own if run.objective.is_user_defined else ours), ("seed", None)):
        if group not in earlier:  # written before there was such a group
            continue
        before, after = _group_values(earlier, group), _group_values(now, group)
        if before.get("_target_") != after.get("_target_"):  # people choose options by name
            then = _group_values(earlier, "choices").get(group, before.get("_target_"))
            yield _run_issues(folder, group, run.choices.get(group), then)
            continue
        for key in keys or sorted({*before, *after}):
            # A list is empty where there was no such key.
            name = f"{group}.{key}" if key else group
            same = (before.get(key) or None) == (after.get(key) or None)
            if key in _UNCOMPARED:
                continue
            if name in read_then:
                if read_now.get(name) != read_then[name]:
                    yield _content_issue(folder, name, after.get(key), same_path=same)
            elif not same:
                yield _run_issues(folder, name, after.get(key), before.get(key))


def _content_issue(
    folder: Path, key: str, current_value: object, *, same_path: bool
) -> ConfigIssue:
    """Returns the complaint about input files of other content than those of a checkpoint."""
    reason = f"the checkpoint under {folder} was trained on files of other content"
    if same_path:
        reason = f"its files have changed since the checkpoint under {folder} was trained on them"
    return ConfigIssue(
        key, current_value, reason, f"give {key} with the same files, or resume=null"
    )


def _run_issues(
    folder: Path, key: str, current_value: object, recorded_value: object
) -> ConfigIssue:
    reason = f"the checkpoint under {folder} was trained with {format_value(recorded_value)}"
    fixes = [f"set {format_override(key, recorded_value)}"]
    if isinstance(current_value, Mapping) or isinstance(recorded_value, Mapping):
        fixes = [*_entries(key, current_value or {}, recorded_value or {})]
    return ConfigIssue(key, current_value, reason, ", ".join([*fixes, "or resume=null"]))


def _entries(key: str, current_value: Any, recorded_value: Any) -> Iterator[str]:
    """Yields how the entries of a mapping become what they were."""
    changed = {
        name: value for name, value in recorded_value.items() if current_value.get(name) != value
    }
    if changed:
        keys = {
            name: f"{key}.{name}" if name in current_value else f"+{key}.{name}" for name in changed
        }
        yield "set " + " ".join(
            format_override(keys[name], value) for name, value in changed.items()
        )
    if extra := [f"{key}.{name}" for name in current_value if name not in recorded_value]:
        yield f"leave out {' and '.join(extra)}"


def _global_batch(recorded_config: Mapping[str, Any]) -> int | None:
    """Returns the rows of one optimizer step of an earlier run; None if its layout is unknown."""
    trainer, layout = (
        _group_values(recorded_config, "trainer"),
        {**_group_values(recorded_config, "parallelism")},
    )
    given: int | None = trainer.get("global_batch")
    if given is not None:
        return given
    registry.import_options()
    kind = registry.registered_targets().get(layout.pop("_target_", ""))
    if kind is None:
        return None
    return int(trainer["micro_batch"]) * int(kind(**layout).data_parallel_size)


def _group_values(values: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    part = values.get(group)
    return part if isinstance(part, Mapping) else {"": part}


def _value_at(path: Path) -> Path | None:
    if (path / store.MANIFEST).is_file() or not path.is_dir():
        return path
    if (path / "checkpoints").is_dir():
        return _newest_whole_checkpoint(path / "checkpoints")
    return _newest_whole_checkpoint(path) if store.list_checkpoints(path) else path


def _newest_whole_checkpoint(folder: Path) -> Path | None:
    """Returns the newest whole checkpoint, and says so if a newer one is damaged."""
    found = store.newest_checkpoint(folder)
    *_, newest = store.list_checkpoints(folder).values() or [None]
    if found != newest:
        instead = f"going on from {found.name}" if found else "no other of that run is whole"
        print_lines(f"resume: {newest} is damaged; {instead}")
    return found


def _newest_first(folder: Path, in_sweep: bool) -> list[Path]:
    """Returns the runs beside ``folder``: of the same name, or of the same job of the sweep."""
    if in_sweep:
        runs = [found / folder.name for found in folder.parents[1].glob("*")]
    else:
        runs = list(folder.parent.glob("*"))
    found = [run for run in runs if run != folder and run.is_dir()]
    return sorted(found, key=lambda run: (run_start(run), run.name), reverse=True)


def reject_running(resume: str, folder: Path) -> None:
    """Raises ``CheckpointError`` if a process still runs or resumes the run in ``folder``."""
    holder = locks.lock_owner(folder)
    if holder is None:
        status = read_json(folder / "status.json")
        host = socket.gethostname()
        if status.get("host") != host or not is_running(status):
            release_reserved(folder)
            return
        holder = LockOwner(str(status["process"]), host)
    reason = f"{folder} is in use by {holder}"
    fix = f"wait for it, or end it: {holder.kill_command}"
    raise CheckpointError.for_key("resume", resume, reason, fix)


def _newest_checkpoint(resume: str, folder: Path, in_sweep: bool) -> Path | None:
    """Returns the newest whole checkpoint of the runs beside ``folder``."""
    damaged = False
    for earlier in _newest_first(folder, in_sweep):
        reject_running(resume, earlier)
        if resume == "auto" and read_json(earlier / "status.json").get("status") == "ok":
            return None
        if found := _newest_whole_checkpoint(earlier / "checkpoints"):
            if damaged:
                print_lines(f"resume: going on from {found} of an earlier run")
            return found
        damaged = damaged or bool(store.list_checkpoints(earlier / "checkpoints"))
    return None
