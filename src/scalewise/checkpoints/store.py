"""Checkpoints on disk: a folder that is whole or absent, and loads no code.

``step-00000100/`` holds ``model.safetensors`` (the weights), ``training.pt`` (optimizer, schedule,
loops, callbacks; read with ``weights_only``) and ``manifest.json`` (sizes and checksums), which is
written last. The folder gets its name by one rename.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from scalewise.errors import CheckpointError
from scalewise.tracking.files import read_json, write_json

FORMAT = "scalewise-checkpoint"
VERSION = 1
WEIGHTS, TRAINING, MANIFEST = "model.safetensors", "training.pt", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")


def path_of(folder: Path, step: int) -> Path:
    """Returns where the checkpoint of ``step`` belongs under a run's ``checkpoints``."""
    return folder / f"step-{step:08d}"


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a Lightning checkpoint dictionary to the folder ``path``, replacing an older one.

    A process that dies here leaves a hidden partial folder, which nothing reads and the next
    save of the same run removes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(".partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = path.parent / f".partial-{path.name}"
    partial.mkdir()
    try:
        weights, aliases = _untied(state["state_dict"])
        save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        rest = {key: value for key, value in state.items() if key != "state_dict"}
        torch.save({**rest, "aliases": aliases}, partial / TRAINING)
        files = {name: _fingerprint(partial / name) for name in (WEIGHTS, TRAINING)}
        manifest = {"format": FORMAT, "version": VERSION, "step": state["global_step"]}
        write_json(partial / MANIFEST, {**manifest, "files": files})
        _sync(partial)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load(path: Path) -> dict[str, Any]:
    """Returns the Lightning checkpoint dictionary held in the folder ``path``, on the CPU.

    Raises ``CheckpointError`` for a folder that is foreign, truncated or holds objects.
    """
    verify(path)
    try:
        weights = load_file(path / WEIGHTS)
        state = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError.one("resume", path, f"cannot be read: {reason}") from error
    try:
        aliases = state.pop("aliases")
        weights |= {alias: weights[name] for alias, name in aliases.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError.one("resume", path, f"{TRAINING} is of another program") from error
    return {**state, "state_dict": weights}


def verify(path: Path) -> int:
    """Returns the step of a whole checkpoint; raises ``CheckpointError`` with what is wrong."""
    if not path.is_dir():
        raise CheckpointError.one("resume", path, "there is no such checkpoint folder")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError.one(
            "resume", path, f"is no scalewise checkpoint (no {MANIFEST} of its format)"
        )
    if manifest.get("version") != VERSION:
        raise CheckpointError.one(
            "resume", path, f"has format version {manifest.get('version')}, not {VERSION}"
        )
    files, step = manifest.get("files"), manifest.get("step")
    whole = isinstance(files, dict) and files.keys() == {WEIGHTS, TRAINING}
    if not whole or not isinstance(step, int):
        raise CheckpointError.one("resume", path, f"its {MANIFEST} is damaged")
    assert isinstance(files, dict)
    for name, written in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError.one("resume", path, f"lacks {name}")
        size = file.stat().st_size
        expected = written.get("bytes") if isinstance(written, dict) else None
        if size != expected:
            reason = f"is truncated: {name} has {size} of {expected} bytes"
            raise CheckpointError.one("resume", path, reason, "use an earlier checkpoint")
        if _fingerprint(file) != written:
            reason = f"is damaged: the checksum of {name} differs"
            raise CheckpointError.one("resume", path, reason, "use an earlier checkpoint")
    return step


def steps(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints under a run's ``checkpoints`` folder by step, oldest first."""
    found = {
        int(match[1]): child
        for child in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(child.name)) and (child / MANIFEST).is_file()
    }
    return dict(sorted(found.items()))


def latest(folder: Path) -> Path | None:
    """Returns the newest whole checkpoint under ``folder``; damaged ones are passed over."""
    for path in reversed(steps(folder).values()):
        try:
            verify(path)
        except CheckpointError:
            continue
        return path
    return None


def _untied(
    state_dict: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns each tensor once, contiguous, and the other names of those that have several."""
    first: dict[tuple[object, ...], str] = {}
    weights, aliases = {}, {}
    for name, tensor in state_dict.items():
        view = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        known = first.setdefault(view, name)
        if known == name or not tensor.numel():
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            weights[name] = tensor.detach().contiguous() if whole else tensor.detach().clone()
        else:
            aliases[name] = known
    return weights, aliases


def _fingerprint(file: Path) -> dict[str, int]:
    checksum, size = 0, 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
        os.fsync(stream.fileno())
    return {"bytes": size, "crc32": checksum}


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def best_of(folder: Path) -> tuple[int, float] | None:
    """Returns the step and the validation loss of the best checkpoint, if one is marked."""
    marked = read_json(folder / "best.json")
    step, loss = marked.get("step"), marked.get("val/loss")
    return (step, loss) if isinstance(step, int) and isinstance(loss, float) else None


def mark_best(folder: Path, step: int, loss: float) -> None:
    """Notes which checkpoint is the best."""
    write_json(folder / "best.json", {"step": step, "val/loss": loss})


def prune(folder: Path, keep: int) -> None:
    """Removes all but the ``keep`` newest checkpoints and the best one; 0 keeps all."""
    if not keep:
        return
    best = best_of(folder)
    for step, path in list(steps(folder).items())[:-keep]:
        if best is None or step != best[0]:
            gone = folder / f".partial-{path.name}"  # half removed, it would look whole
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
