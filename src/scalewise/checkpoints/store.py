"""Checkpoints on disk: a folder that is whole or absent, and loads no code.

``step-00000100/`` holds ``model/`` and ``optimizer/`` (safetensors, a file for each rank that holds
something of its own), ``average/`` where the run averages its weights (the same), ``training.pt``
(schedule, loops, callbacks; read with ``weights_only``) and ``manifest.json`` (sizes, checksums),
which is written last. The folder gets its name by one rename. Tensors are named as in the whole
model, so that any layout reads what any other wrote.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from scalewise import atomic, regular_files
from scalewise.errors import CheckpointError
from scalewise.tracking.run_files import read_json, write_json

FORMAT = "scalewise-checkpoint"
VERSION = 2
TRAINING, MANIFEST = "training.pt", "manifest.json"
TENSORS = ("model", "optimizer")
"""Folders that every checkpoint has, of tensors by name."""
AVERAGE = "average"
"""Folder of the moving average of the trained weights, by the names of ``model``."""
_NAME = re.compile(r"step-(\d{8,})")

EARLIER = "use an earlier checkpoint, or put a copy of this one back"
Group = dist.ProcessGroup | None
Tensors = Mapping[str, Mapping[str, Tensor]]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Returns where the checkpoint of ``step`` belongs under a run's ``checkpoints``."""
    return folder / f"step-{step:08d}"


@dataclass(frozen=True)
class PackedState:
    """What a checkpoint holds beside its tensors, as ``training.pt`` will hold it."""

    step: int
    content: bytes


def pack_state(training_state: Mapping[str, Any]) -> PackedState:
    """Returns plain data and tensors as they are now, whatever becomes of them later."""
    stream = io.BytesIO()
    torch.save(dict(training_state), stream)
    return PackedState(int(training_state["global_step"]), stream.getvalue())


def save_checkpoint(
    path: Path, tensors: Tensors, training_state: PackedState, group: Group = None
) -> None:
    """Writes a checkpoint folder at ``path``, replacing an older one.

    ``tensors`` are those of ``model`` and ``optimizer`` that this rank holds, by name. With a
    ``group`` its ranks write together, each what it alone holds. A process that dies here leaves a
    hidden partial folder, which nothing reads and the next save removes.
    """
    partial = path.parent / f".partial-{path.name}"
    leads = group is None or dist.get_rank(group) == 0
    try:
        with atomic.name_file_in_errors(path):
            _leader_first(group, lambda: _begin_save(partial, training_state, tensors), leads)
            for part, held in tensors.items():
                writer = HuggingFaceStorageWriter(str(partial / part), save_distributed=True)
                _write_tensors(_contiguous_copies(held), writer, group)
            _leader_first(group, lambda: _complete_save(partial, path, training_state.step), leads)
    except BaseException:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _begin_save(partial: Path, training_state: PackedState, parts: Iterable[str]) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    for leftover in partial.parent.glob(".partial-*"):
        if leftover.is_symlink():
            leftover.unlink()
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()  # not one that is there
    for part in parts:
        (partial / part).mkdir()
    (partial / TRAINING).write_bytes(training_state.content)


def _complete_save(partial: Path, path: Path, step: int) -> None:
    written = sorted(file for file in partial.rglob("*") if file.is_file())
    files = {str(file.relative_to(partial)): _fingerprint(file) for file in written}
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
    write_json(partial / MANIFEST, manifest)
    _sync(partial)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    _sync(path.parent)


def _contiguous_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors without gaps or shared memory, which the format refuses: as copies."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        address = tensor.to_local().data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()
        tied = tensor.numel() > 0 and address in seen
        seen.add(address)
        apart[name] = (tensor.clone() if tied else tensor).contiguous()
    return apart


def _write_tensors(tensors: dict[str, Any], writer: HuggingFaceStorageWriter, group: Group) -> None:
    try:
        with _local_planner():
            state_dict_saver.save(
                tensors, storage_writer=writer, process_group=group, no_dist=group is None
            )
    except CheckpointException as failure:
        rank, (cause, _) = min(failure.failures.items())
        if isinstance(cause, OSError | MemoryError):
            raise cause from None
        said = f"rank {rank} could not save: {cause}"
        if type(cause).__name__ == "PanicException":  # safetensors found no memory for a file
            raise MemoryError(said) from None
        raise CheckpointError.for_key("checkpoint", rank, said) from cause


@contextmanager
def _local_planner() -> Iterator[None]:
    """Keeps torch from asking whether a rank means to write or read by itself: it does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _leader_first(group: Group, action: Callable[[], None], is_leader: bool) -> None:
    """Lets the leading rank work while the others wait; where it fails, all do."""
    failure: Exception | None = None
    if is_leader:
        try:
            action()
        except Exception as error:  # raised below, once every rank knows
            failure = error
    if group is not None:
        told = [str(failure) if failure else None]
        dist.broadcast_object_list(told, group_src=0, group=group)
        if told[0] and not is_leader:
            failure = CheckpointError.for_key("checkpoint", told[0], "rank 0 could not save")
    if failure is not None:
        raise failure


def load_state(path: Path) -> dict[str, Any]:
    """Returns what a checkpoint holds beside its tensors.

    Raises ``CheckpointError`` for a folder that is foreign, truncated or holds objects.
    """
    verify_checkpoint(path)
    try:
        state = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    except (MemoryError, OSError):
        raise
    except Exception as error:  # torch raises many kinds for a file of another program
        reason = f"cannot be read: {TRAINING} is damaged or holds objects, which are not loaded"
        raise CheckpointError.for_key("resume", path, reason, EARLIER) from error
    if not isinstance(state, dict):
        raise CheckpointError.for_key("resume", path, f"{TRAINING} is of another program", EARLIER)
    return state


def _read_error(path: Path, name: str, error: object) -> CheckpointError:
    reason = f"{name} cannot be read: {' '.join(str(error).split())[:200]}"
    return CheckpointError.for_key("resume", path, reason, EARLIER)


def tensor_shapes(path: Path, part: str) -> dict[str, torch.Size]:
    """Returns the whole shape of each tensor under ``model`` or ``optimizer``, by name."""
    return {name: held.size for name, held in _read_metadata(path, part).items()}


def _read_metadata(path: Path, part: str) -> dict[str, TensorStorageMetadata]:
    try:
        known = HuggingFaceStorageReader(str(path / part)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError) as error:
        raise _read_error(path, part, error) from error
    return {name: held for name, held in known.items() if isinstance(held, TensorStorageMetadata)}


def read_into(path: Path, part: str, destination: Mapping[str, Tensor]) -> None:
    """Fills tensors, or a layout's shards of them, from ``model`` or ``optimizer``, by name."""
    known = tensor_shapes(path, part)
    if missing := sorted(destination.keys() - known.keys()):
        reason = f"lacks {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise CheckpointError.for_key("resume", path, reason, "set the model that wrote it")
    for name, tensor in destination.items():
        if known[name] != tensor.shape:
            reason = f"{name} is {tuple(known[name])}, the model has {tuple(tensor.shape)}"
            raise CheckpointError.for_key("resume", path, reason, "set the model that wrote it")
    try:
        reader = HuggingFaceStorageReader(str(path / part))
        with _local_planner():
            state_dict_loader.load({**destination}, storage_reader=reader, no_dist=True)
    except (CheckpointException, SafetensorError, OSError) as error:
        raise _read_error(path, part, error) from error


def full_tensors(
    path: Path, part: str = "model", names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Returns the tensors of ``model`` or ``optimizer`` as a single device would hold them.

    ``names``: of these alone, those that are there; None: of all.
    """
    known = _read_metadata(path, part)
    room = {
        name: torch.empty(known[name].size, dtype=known[name].properties.dtype)
        for name in (known if names is None else known.keys() & set(names))
    }
    read_into(path, part, room)
    return room


def has_tensors(path: Path, part: str) -> bool:
    """Returns whether a checkpoint has a folder of tensors."""
    return (path / part).is_dir()


def released_weights(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Returns the whole weights to evaluate and export: the averaged ones, where there are some.

    ``names``: of these alone, those that are there; None: of all.
    """
    held = full_tensors(path, "model", names)
    if has_tensors(path, AVERAGE):
        averaged = full_tensors(path, AVERAGE, held)
        held |= {name: tensor.to(held[name].dtype) for name, tensor in averaged.items()}
    return held


def verify_checkpoint(path: Path) -> int:
    """Returns the step of a whole checkpoint; raises ``CheckpointError`` with what is wrong."""
    for name, reason in damaged_files(path):
        raise CheckpointError.for_key("resume", path, f"is damaged ({name}: {reason})", EARLIER)
    return step_of(path)


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint, by its manifest; raises ``CheckpointError``."""
    return _manifest(path)[0]


def damaged_files(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the files that are not as they were written, by name, and what is wrong with each.

    Raises ``CheckpointError`` for a folder that has no manifest to compare with.
    """
    for name, written in _manifest(path)[1].items():
        file = path / name
        expected = written["bytes"]
        if not file.is_file():
            yield name, "is missing"
        elif (size := file.stat().st_size) != expected:
            yield name, f"has {size} of {expected} bytes"
        elif _fingerprint(file) != written:
            yield name, "has another checksum"


def _manifest(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns the step of a checkpoint, and size and checksum of its files by name."""
    if not path.is_dir():
        raise CheckpointError.for_key("resume", path, "there is no such checkpoint folder")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError.for_key(
            "resume", path, f"is no scalewise checkpoint (no {MANIFEST} of its format)", EARLIER
        )
    if manifest.get("version") != VERSION:
        raise CheckpointError.for_key(
            "resume", path, f"has format version {manifest.get('version')}, not {VERSION}"
        )
    files, step = manifest.get("files"), manifest.get("step")
    if step is None or files is None or TRAINING not in files:
        raise CheckpointError.for_key("resume", path, f"its {MANIFEST} is damaged", EARLIER)
    return step, files


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints under a run's ``checkpoints`` folder by step, oldest first."""
    found = {
        int(match[1]): child
        for child in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(child.name)) and (child / MANIFEST).is_file()
    }
    return dict(sorted(found.items()))


def newest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest whole checkpoint under ``folder``; damaged ones are passed over."""
    for path in reversed(list_checkpoints(folder).values()):
        try:
            verify_checkpoint(path)
        except CheckpointError:
            continue
        return path
    return None


def adopt_checkpoint(path: Path, folder: Path) -> None:
    """Makes a whole checkpoint one of ``folder`` too: by hard links, or else as a copy."""
    if (folder / path.name).exists():
        return
    partial = folder / f".partial-{path.name}"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(path, partial, copy_function=_link_or_copy)
    partial.rename(folder / path.name)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _fingerprint(file: Path) -> dict[str, int]:
    checksum, size = 0, 0
    with regular_files.open_binary(file) as stream:
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


def best_checkpoint(folder: Path) -> tuple[int, float] | None:
    """Returns the step and the validation loss of the best checkpoint, if one is marked."""
    marked = read_json(folder / "best.json")
    return (marked["step"], marked["val/loss"]) if marked else None


def mark_best(folder: Path, step: int, loss: float) -> None:
    """Notes which checkpoint is the best."""
    write_json(folder / "best.json", {"step": step, "val/loss": loss})


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Removes all but the ``keep`` newest checkpoints and the best one; 0 keeps all."""
    if not keep:
        return
    best = best_checkpoint(folder)
    for step, path in list(list_checkpoints(folder).items())[:-keep]:
        if best is None or step != best[0]:
            gone = folder / f".partial-{path.name}"  # half removed, it would look whole
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
