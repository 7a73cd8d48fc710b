"""Checkpoint lookup for ``resume=``, and the comparison of its config with the current run."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalewise import inputs, registry, regular_files
from scalewise.checkpoints import manifest
from scalewise.errors import CheckpointError, ConfigIssue, format_value
from scalewise.launch import locks
from scalewise.launch.config_hash import ADDED_OPTIONS
from scalewise.launch.locks import InUseError, LockOwner
from scalewise.renamed_targets import RENAMED_TARGETS, rename_targets
from scalewise.run_config import RunConfig
from scalewise.run_files import RecordError, load_yaml, read_json
from scalewise.tracking.sweep_record import is_running, release_reserved, run_start
from scalewise.typed_override import format_override

logger = logging.getLogger(__name__)

ComparedKeys = tuple[tuple[str, tuple[str, ...] | None], ...]
WARMUPS = ("batch_warmup", "sequence_warmup")
"""Options of the trainer on which the samples and tokens of a step depend."""
_MUTABLE_MODEL_FIELDS = ("weights", "dropout")
"""Fields of the model config that may change when a run is resumed."""


def find_checkpoint(
    run: RunConfig, folder: Path, steps: int, *, in_sweep: bool = False
) -> Path | None:
    """Checkpoint to resume a run of ``steps`` steps from, or None to train from scratch.

    ``resume`` is a path (a checkpoint or a run folder), ``last`` (the newest run of this name) or
    ``auto`` (the same if that run is unfinished, else from scratch). Only ``auto`` accepts a
    checkpoint of the last step, which a run stopped after it leaves. Raises ``CheckpointError``.
    """
    resume = run.resume
    if resume is None:
        return None
    if resume not in ("last", "auto"):
        path = _resolve_path(regular_files.expand_home(resume))
    else:
        path = _newest_checkpoint(resume, folder, in_sweep)
        if path is None and resume == "auto":
            return None
    if path is None:
        searched_path = folder.parent if resume == "last" else resume
        raise CheckpointError.for_key(
            "resume",
            resume,
            f"there is no complete checkpoint under {searched_path}",
            "set a path, or resume=null",
        )
    path = path.absolute()
    step = manifest.step_of(path)
    reject_running(resume, path.parents[1])
    issues = list(resume_issues(run, path.parents[1]))
    if step > steps or (step == steps and resume != "auto"):
        fix = f"set trainer.max_steps above {step}, or resume=null"
        issues.append(
            ConfigIssue("resume", resume, f"the checkpoint is at step {step} of {steps}", fix)
        )
    if issues:
        raise CheckpointError(issues)
    if step == steps:
        logger.info(f"resume: {path.parents[1]} has completed all {steps} steps; finishing the run")
    return path


@contextmanager
def locked_find_checkpoint(
    run: RunConfig, folder: Path, steps: int, *, in_sweep: bool = False
) -> Iterator[Path | None]:
    """Yield ``find_checkpoint`` while a lock keeps other processes from resuming the same run.

    The caller has to lock its own folder inside the block, so that the next process finds that one.
    """
    while True:
        earlier_runs = _earlier_runs(folder, in_sweep)
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
            if _earlier_runs(folder, in_sweep) == earlier_runs:
                yield path
                return


def resume_issues(run: RunConfig, folder: Path) -> Iterator[ConfigIssue]:
    """Yield the config differences to the run of a checkpoint that make resuming invalid.

    Raises ``RecordError`` if its ``resolved.yaml`` is damaged; yields nothing if it is missing.
    """
    recorded_config = rename_targets(load_yaml(folder / "resolved.yaml"), RENAMED_TARGETS)
    if not recorded_config:
        return
    current_config = run.as_dict()
    inputs.add_missing(recorded_config, current_config)
    recorded_digests = inputs.recorded_digests(folder)
    current_digests = inputs.content_digests(current_config) if recorded_digests else {}
    # None means one micro-batch per rank: compare the resulting number of samples.
    try:
        recorded_trainer = {
            "global_batch": _global_batch(recorded_config),
            **_select_keys(_group_values(recorded_config, "trainer"), WARMUPS),
        }
        recorded_config["trainer"] = recorded_trainer
    except (AttributeError, KeyError, TypeError, ValueError):
        reason = "is damaged: trainer and parallelism define no batch size"
        raise RecordError.for_file(folder / "resolved.yaml", reason) from None
    current_config["trainer"] = {
        "global_batch": run.global_batch,
        **_select_keys(_group_values(current_config, "trainer"), WARMUPS),
    }
    user_defined: ComparedKeys = (
        ("objective", ("_target_", "target", "arguments")),
        ("data", ("_target_", "target")),
    )
    built_in: ComparedKeys = (
        ("model", None),
        ("adapter", None),
        ("quantization", None),
        ("optimizer", ("_target_",)),
        ("trainer", ("global_batch", *WARMUPS)),
        ("data", None),
    )
    # The batch size of a user-defined module is not in its config.
    for group, keys in (
        *(user_defined if run.objective.is_user_defined else built_in),
        ("seed", None),
    ):
        if group not in recorded_config:  # written by a version without this group
            continue
        recorded_group, current_group = (
            _group_values(recorded_config, group),
            _group_values(current_config, group),
        )
        # The message names options, not classes.
        if recorded_group.get("_target_") != current_group.get("_target_"):
            recorded_choice = _group_values(recorded_config, "choices").get(
                group, recorded_group.get("_target_")
            )
            yield _config_issue(folder, group, run.choices.get(group), recorded_choice)
            continue
        for key in keys or sorted({*recorded_group, *current_group}):
            # An earlier version has no such key where a later one has an empty list or a default.
            recorded_value = recorded_group.get(key, ADDED_OPTIONS.get((group, key)))
            name = f"{group}.{key}" if key else group
            is_equal = (recorded_value or None) == (current_group.get(key) or None)
            if key in _MUTABLE_MODEL_FIELDS:
                continue
            if name in recorded_digests:
                if current_digests.get(name) != recorded_digests[name]:
                    yield _content_issue(folder, name, current_group.get(key), same_path=is_equal)
            elif not is_equal:
                yield _config_issue(folder, name, current_group.get(key), recorded_value)


def _content_issue(
    folder: Path, key: str, current_value: object, *, same_path: bool
) -> ConfigIssue:
    """Issue for input files whose content differs from that of the checkpoint."""
    reason = f"the checkpoint under {folder} was trained on files with other content"
    if same_path:
        reason = f"the files have changed since the checkpoint under {folder} was trained"
    return ConfigIssue(
        key, current_value, reason, f"set {key} to the original files, or resume=null"
    )


def _config_issue(
    folder: Path, key: str, current_value: object, recorded_value: object
) -> ConfigIssue:
    """Issue for a value that differs from that of the checkpoint."""
    reason = f"the checkpoint under {folder} was trained with {format_value(recorded_value)}"
    fixes = [f"set {format_override(key, recorded_value)}"]
    current_entries, recorded_entries = current_value or {}, recorded_value or {}
    if isinstance(current_entries, Mapping) and isinstance(recorded_entries, Mapping):
        fixes = [*_mapping_fixes(key, current_entries, recorded_entries)]
    return ConfigIssue(key, current_value, reason, ", ".join([*fixes, "or resume=null"]))


def _mapping_fixes(key: str, current_value: Any, recorded_value: Any) -> Iterator[str]:
    """Yield the fixes that restore the entries of a mapping."""
    changed_entries = {
        name: value for name, value in recorded_value.items() if current_value.get(name) != value
    }
    if changed_entries:
        keys = {
            name: f"{key}.{name}" if name in current_value else f"+{key}.{name}"
            for name in changed_entries
        }
        yield "set " + " ".join(
            format_override(keys[name], value) for name, value in changed_entries.items()
        )
    if extra := [f"{key}.{name}" for name in current_value if name not in recorded_value]:
        yield f"remove {' and '.join(extra)}"


def _global_batch(recorded_config: Mapping[str, Any]) -> int | None:
    """Global batch size of an earlier run, in samples; None if its strategy is unknown."""
    trainer, parallelism = (
        _group_values(recorded_config, "trainer"),
        {**_group_values(recorded_config, "parallelism")},
    )
    global_batch: int | None = trainer.get("global_batch")
    if global_batch is not None:
        return global_batch
    registry.import_options()
    parallelism_class = registry.registered_targets().get(parallelism.pop("_target_", ""))
    if parallelism_class is None:
        return None
    return int(trainer["micro_batch"]) * int(parallelism_class(**parallelism).data_parallel_size)


def _group_values(values: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    group_values = values.get(group)
    return group_values if isinstance(group_values, Mapping) else {"": group_values}


def _select_keys(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


def _resolve_path(path: Path) -> Path | None:
    """Undamaged checkpoint at ``path``, or the newest one of a run folder; None without one."""
    is_checkpoint = (path / manifest.MANIFEST).is_file() or not path.is_dir()
    if not is_checkpoint and (path / "checkpoints").is_dir():
        return _newest_complete_checkpoint(path / "checkpoints")
    if not is_checkpoint and manifest.list_checkpoints(path):
        return _newest_complete_checkpoint(path)
    manifest.verify_checkpoint(path.absolute())
    return path


def _newest_complete_checkpoint(folder: Path) -> Path | None:
    """Newest complete checkpoint; prints a line if a newer one is damaged."""
    checkpoint = manifest.newest_checkpoint(folder)
    *_, newest = manifest.list_checkpoints(folder).values() or [None]
    if checkpoint != newest:
        fallback = (
            f"resuming from {checkpoint.name}"
            if checkpoint
            else "the run has no other complete one"
        )
        logger.info(f"resume: {newest} is damaged; {fallback}")
    return checkpoint


def _earlier_runs(folder: Path, in_sweep: bool) -> list[Path]:
    """Other runs of the same name, or of the same job of the sweep, newest first."""
    if in_sweep:
        runs = [sweep / folder.name for sweep in folder.parents[1].glob("*")]
    else:
        runs = list(folder.parent.glob("*"))
    other_runs = [run for run in runs if run != folder and run.is_dir()]
    return sorted(other_runs, key=lambda run: (run_start(run), run.name), reverse=True)


def reject_running(resume: str, folder: Path) -> None:
    """Raise ``CheckpointError`` if a process runs or resumes the run in ``folder``."""
    owner = locks.lock_owner(folder)
    if owner is None:
        status = read_json(folder / "status.json")
        host = socket.gethostname()
        if status.get("host") != host or not is_running(status):
            release_reserved(folder)
            return
        owner = LockOwner(str(status["process"]), host)
    reason = f"{folder} is in use by {owner}"
    fix = f"wait for it, or end it: {owner.kill_command}"
    raise CheckpointError.for_key("resume", resume, reason, fix)


def _newest_checkpoint(resume: str, folder: Path, in_sweep: bool) -> Path | None:
    """Newest complete checkpoint of the earlier runs; None without one."""
    is_damaged = False
    for earlier_run in _earlier_runs(folder, in_sweep):
        reject_running(resume, earlier_run)
        if resume == "auto" and read_json(earlier_run / "status.json").get("status") == "ok":
            return None
        if checkpoint := _newest_complete_checkpoint(earlier_run / "checkpoints"):
            if is_damaged:
                logger.info(f"resume: resuming from {checkpoint} of an earlier run")
            return checkpoint
        is_damaged = is_damaged or bool(manifest.list_checkpoints(earlier_run / "checkpoints"))
    return None
