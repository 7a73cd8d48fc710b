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
from scalewise.errors import CheckpointError, Complaint, as_typed
from scalewise.launch import locks
from scalewise.launch.locks import InUseError, Owner
from scalewise.output import print_lines
from scalewise.run import Run
from scalewise.tracking.files import RecordError, read_json, read_yaml
from scalewise.tracking.recorded import is_at_work, release_reserved, start_of_run
from scalewise.typed_override import typed

Alike = tuple[tuple[str, tuple[str, ...] | None], ...]
_FREE = ("weights", "dropout")
"""Fields of a model that may change between a checkpoint and its resumption."""


def checkpoint_for(run: Run, folder: Path, steps: int, *, in_sweep: bool = False) -> Path | None:
    """Returns the checkpoint to go on from to ``steps``, or None to start anew.

    ``resume`` is a path (a checkpoint or a run's folder), ``last`` (the newest run of this name)
    or ``auto`` (the same, if it did not finish; else a fresh start). Only ``auto`` goes on from one
    that leaves no step to take, of a run that was stopped after it. Raises ``CheckpointError``.
    """
    asked = run.resume
    if asked is None:
        return None
    if asked not in ("last", "auto"):
        path = _in(Path(asked).expanduser())
    else:
        path = _newest(asked, folder, in_sweep)
        if path is None and asked == "auto":
            return None
    if path is None:
        where = folder.parent if asked == "last" else asked
        raise CheckpointError.one(
            "resume", asked, f"no whole checkpoint under {where}", "give a path, or resume=null"
        )
    path = path.absolute()
    done = store.verify(path)
    refuse_living(asked, path.parents[1])
    complaints = list(differences(run, path.parents[1]))
    if done > steps or (done == steps and asked != "auto"):
        cure = f"set trainer.max_steps above {done}, or resume=null"
        complaints.append(Complaint("resume", asked, f"has done {done} of {steps} steps", cure))
    if complaints:
        raise CheckpointError(complaints)
    if done == steps:
        print_lines(f"resume: {path.parents[1]} has done all {steps} steps; its end follows")
    return path


@contextmanager
def locked_checkpoint(
    run: Run, folder: Path, steps: int, *, in_sweep: bool = False
) -> Iterator[Path | None]:
    """Yields ``checkpoint_for``; meanwhile no other process may choose the same newest run.

    The caller locks its own folder before it leaves, so that the next process finds that one.
    """
    while True:
        known = _newest_first(folder, in_sweep)
        path = checkpoint_for(run, folder, steps, in_sweep=in_sweep)
        if path is None or run.resume not in ("last", "auto"):
            yield path
            return
        try:
            lock = locks.acquire(path.parents[1])
        except InUseError as error:
            cure = f"wait for it, or end it: {error.owner.cure}"
            raise CheckpointError.one("resume", run.resume, str(error), cure) from None
        with lock:
            if _newest_first(folder, in_sweep) == known:
                yield path
                return


def differences(run: Run, folder: Path) -> Iterator[Complaint]:
    """Yields how the run that wrote a checkpoint differs where it must not."""
    earlier = read_yaml(folder / "resolved.yaml")
    if not earlier:
        return
    now = run.as_dict()
    inputs.add_missing(earlier, now)
    read_then = inputs.recorded_digests(folder)
    read_now = inputs.digests(now) if read_then else {}
    # None stands for a micro batch a rank: what must not differ is how many rows that makes.
    try:
        earlier["trainer"] = {"global_batch": _global_batch(earlier)}
    except (AttributeError, KeyError, TypeError, ValueError):
        reason = "is damaged: the batch of its trainer and parallelism is not there"
        raise RecordError.of(folder / "resolved.yaml", reason) from None
    now["trainer"] = {"global_batch": run.global_batch}
    own: Alike = (
        ("objective", ("_target_", "target", "arguments")),
        ("data", ("_target_", "target")),
    )
    ours: Alike = (
        ("model", None),
        ("adapter", None),
        ("quantization", None),
        ("optimizer", ("_target_",)),
        ("trainer", ("global_batch",)),
        ("data", None),
    )
    # How many rows a step of a user's module has, its loaders say alone.
    for group, keys in (*(own if run.objective.of_user else ours), ("seed", None)):
        if group not in earlier:  # written before there was such a group
            continue
        before, after = _part(earlier, group), _part(now, group)
        if before.get("_target_") != after.get("_target_"):  # people choose options by name
            then = _part(earlier, "choices").get(group, before.get("_target_"))
            yield _of_another(folder, group, run.choices.get(group), then)
            continue
        for key in keys or sorted({*before, *after}):
            # A list is empty where there was no such key.
            name = f"{group}.{key}" if key else group
            same = (before.get(key) or None) == (after.get(key) or None)
            if key in _FREE:
                continue
            if name in read_then:
                if read_now.get(name) != read_then[name]:
                    yield _of_other_content(folder, name, after.get(key), same=same)
            elif not same:
                yield _of_another(folder, name, after.get(key), before.get(key))


def _of_other_content(folder: Path, key: str, now: object, *, same: bool) -> Complaint:
    """Returns the complaint about input files of other content than those of a checkpoint."""
    reason = f"the checkpoint under {folder} was trained on files of other content"
    if same:
        reason = f"its files have changed since the checkpoint under {folder} was trained on them"
    return Complaint(key, now, reason, f"give {key} with the same files, or resume=null")


def _of_another(folder: Path, key: str, now: object, then: object) -> Complaint:
    reason = f"the checkpoint under {folder} was trained with {as_typed(then)}"
    fixes = [f"set {typed(key, then)}"]
    if isinstance(now, Mapping) or isinstance(then, Mapping):
        fixes = [*_entries(key, now or {}, then or {})]
    return Complaint(key, now, reason, ", ".join([*fixes, "or resume=null"]))


def _entries(key: str, now: Any, then: Any) -> Iterator[str]:
    """Yields how the entries of a mapping become what they were."""
    changed = {name: value for name, value in then.items() if now.get(name) != value}
    if changed:
        keys = {name: f"{key}.{name}" if name in now else f"+{key}.{name}" for name in changed}
        yield "set " + " ".join(typed(keys[name], value) for name, value in changed.items())
    if extra := [f"{key}.{name}" for name in now if name not in then]:
        yield f"leave out {' and '.join(extra)}"


def _global_batch(earlier: Mapping[str, Any]) -> int | None:
    """Returns the rows of one optimizer step of an earlier run; None if its layout is unknown."""
    trainer, layout = _part(earlier, "trainer"), {**_part(earlier, "parallelism")}
    given: int | None = trainer.get("global_batch")
    if given is not None:
        return given
    registry.discover()
    kind = registry.targets().get(layout.pop("_target_", ""))
    if kind is None:
        return None
    return int(trainer["micro_batch"]) * int(kind(**layout).data_parallel_size)


def _part(values: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    part = values.get(group)
    return part if isinstance(part, Mapping) else {"": part}


def _in(path: Path) -> Path | None:
    if (path / store.MANIFEST).is_file() or not path.is_dir():
        return path
    if (path / "checkpoints").is_dir():
        return _latest(path / "checkpoints")
    return _latest(path) if store.steps(path) else path


def _latest(folder: Path) -> Path | None:
    """Returns the newest whole checkpoint, and says so if a newer one is damaged."""
    found = store.latest(folder)
    *_, newest = store.steps(folder).values() or [None]
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
    return sorted(found, key=lambda run: (start_of_run(run), run.name), reverse=True)


def refuse_living(asked: str, folder: Path) -> None:
    """Raises ``CheckpointError`` if a process still runs or resumes the run in ``folder``."""
    holder = locks.owner(folder)
    if holder is None:
        status = read_json(folder / "status.json")
        host = socket.gethostname()
        if status.get("host") != host or not is_at_work(status):
            release_reserved(folder)
            return
        holder = Owner(str(status["process"]), host)
    reason = f"{folder} is in use by {holder}"
    cure = f"wait for it, or end it: {holder.cure}"
    raise CheckpointError.one("resume", asked, reason, cure)


def _newest(asked: str, folder: Path, in_sweep: bool) -> Path | None:
    """Returns the newest whole checkpoint of the runs beside ``folder``."""
    damaged = False
    for earlier in _newest_first(folder, in_sweep):
        refuse_living(asked, earlier)
        if asked == "auto" and read_json(earlier / "status.json").get("status") == "ok":
            return None
        if found := _latest(earlier / "checkpoints"):
            if damaged:
                print_lines(f"resume: going on from {found} of an earlier run")
            return found
        damaged = damaged or bool(store.steps(earlier / "checkpoints"))
    return None
