"""Checkpoint format: a folder that is written atomically, and loads no code.

A folder ``step-00000100/`` contains:

- ``model/`` and ``optimizer/``: safetensors, one file per rank that stores distinct tensors;
- ``average/``: the moving average of the weights in the same format, if the run has one;
- ``training.pt``: state of schedule, loops and callbacks, loaded with ``weights_only=True``;
- ``manifest.json``: sizes and checksums of the files, written last.

The folder is renamed to its final name when it is complete. Tensors have the names of the
unsharded model, so that every parallelism strategy can load checkpoints of all others.
"""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from scalewise import atomic
from scalewise.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    RECOVERY_FIX,
    TRAINING,
    VERSION,
    fingerprints,
    verify_checkpoint,
)
from scalewise.checkpoints.strided_shards import allocate_contiguous_rows, copy_strided_rows
from scalewise.errors import CheckpointError
from scalewise.models.init import local_tensor
from scalewise.run_files import write_json

AVERAGE = "average"
"""Folder of the moving average of the weights, with the names of ``model``."""
Group = dist.ProcessGroup | None
Tensors = Mapping[str, Mapping[str, Tensor]]
StagedTensors = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class PackedState:
    """Serialized training state of a checkpoint."""

    step: int
    """Optimizer step."""
    content: bytes
    """Content of ``training.pt``."""


def pack_state(training_state: Mapping[str, Any]) -> PackedState:
    """Serialize the training state, so that later changes do not affect the checkpoint."""
    stream = io.BytesIO()
    torch.save(dict(training_state), stream)
    return PackedState(int(training_state["global_step"]), stream.getvalue())


def save_checkpoint(
    path: Path, tensors: Tensors, training_state: PackedState, group: Group = None
) -> None:
    """Write a checkpoint folder, replacing an existing one.

    A process that is killed leaves a hidden partial folder, which the next checkpoint removes.

    Args:
        path: Checkpoint folder.
        tensors: Tensors of this rank by folder and name.
        training_state: Serialized training state.
        group: Process group whose ranks write together, each its distinct tensors.
    """
    partial = path.parent / f".partial-{path.name}"
    is_leader = group is None or dist.get_rank(group) == 0
    try:
        with atomic.name_file_in_errors(path):
            _leader_first(group, lambda: _begin_save(partial, training_state, tensors), is_leader)
            for part, named in tensors.items():
                writer = HuggingFaceStorageWriter(str(partial / part), save_distributed=True)
                _write_tensors(_contiguous_copies(named), writer, group)
            files, step = _fingerprint_files(partial, group), training_state.step
            _leader_first(group, lambda: _complete_save(partial, path, step, files), is_leader)
    except BaseException:
        if is_leader:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _begin_save(partial: Path, training_state: PackedState, parts: Iterable[str]) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    for leftover in partial.parent.glob(".partial-*"):
        if leftover.is_symlink():
            leftover.unlink()
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()  # fails if a leftover could not be removed
    for part in parts:
        (partial / part).mkdir()
    (partial / TRAINING).write_bytes(training_state.content)


def _fingerprint_files(partial: Path, group: Group) -> dict[str, dict[str, int]]:
    """Fingerprints of all files by name; each rank reads those that it wrote."""
    if group is None:
        return fingerprints(partial)
    own: dict[str, dict[str, int]] | str
    failure = None
    try:
        own = fingerprints(partial, dist.get_rank(group), dist.get_world_size(group))
    except OSError as error:  # raised below, after the other ranks know
        own, failure = str(error), error
    results: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(results, own, group=group)
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise failure or CheckpointError.for_key(
                "checkpoint", result, f"rank {rank} failed to save"
            )
    return dict(sorted(item for files in results for item in files.items()))


def _complete_save(
    partial: Path, path: Path, step: int, files: Mapping[str, Mapping[str, int]]
) -> None:
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
    write_json(partial / MANIFEST, manifest)
    atomic.sync_to_disk(partial)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    atomic.sync_to_disk(path.parent)


def _contiguous_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory or are not contiguous, as safetensors requires."""
    seen: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        address = local_tensor(tensor).data_ptr()
        is_tied = tensor.numel() > 0 and address in seen
        seen.add(address)
        copies[name] = (tensor.clone() if is_tied else tensor).contiguous()
    return copies


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
        reason = f"rank {rank} failed to save: {cause}"
        if type(cause).__name__ == "PanicException":  # safetensors panics without memory
            raise MemoryError(reason) from None
        raise CheckpointError.for_key("checkpoint", rank, reason) from cause


@contextmanager
def _local_planner() -> Iterator[None]:
    """Silence torch's warning about saving and loading without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _leader_first(group: Group, action: Callable[[], None], is_leader: bool) -> None:
    """Run ``action`` on rank 0 while the others wait; raise its error on all ranks."""
    failure: Exception | None = None
    if is_leader:
        try:
            action()
        except Exception as error:  # raised below, after the broadcast
            failure = error
    if group is not None:
        message = [str(failure) if failure else None]
        dist.broadcast_object_list(message, group_src=0, group=group)
        if message[0] and not is_leader:
            failure = CheckpointError.for_key("checkpoint", message[0], "rank 0 failed to save")
    if failure is not None:
        raise failure


def load_state(path: Path) -> dict[str, Any]:
    """Load the training state of a checkpoint; each rank verifies other files of it.

    Raises:
        CheckpointError: the folder is not a checkpoint, is damaged, or contains pickled objects.
    """
    is_distributed = dist.is_initialized()
    verify_checkpoint(
        path,
        dist.get_rank() if is_distributed else 0,
        dist.get_world_size() if is_distributed else 1,
    )
    try:
        state = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    except (MemoryError, OSError):
        raise
    except Exception as error:  # torch raises many types for files of other programs
        reason = f"cannot be read: {TRAINING} is damaged or contains objects, which are not loaded"
        raise CheckpointError.for_key("resume", path, reason, RECOVERY_FIX) from error
    if not isinstance(state, dict):
        reason = f"{TRAINING} was not written by scalewise"
        raise CheckpointError.for_key("resume", path, reason, RECOVERY_FIX)
    return state


def _read_error(path: Path, name: str, error: object) -> CheckpointError:
    reason = f"{name} cannot be read: {' '.join(str(error).split())[:200]}"
    return CheckpointError.for_key("resume", path, reason, RECOVERY_FIX)


def tensor_shapes(path: Path, part: str) -> dict[str, torch.Size]:
    """Unsharded shape of each tensor of a folder, by name."""
    return {name: metadata.size for name, metadata in _read_metadata(path, part).items()}


def _read_metadata(path: Path, part: str) -> dict[str, TensorStorageMetadata]:
    try:
        entries = HuggingFaceStorageReader(str(path / part)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError) as error:
        raise _read_error(path, part, error) from error
    return {name: it for name, it in entries.items() if isinstance(it, TensorStorageMetadata)}


def read_into(path: Path, part: str, destination: Mapping[str, Tensor]) -> None:
    """Load tensors of a folder in place, by name; DTensors load their local shards.

    Raises:
        CheckpointError: a tensor is missing, has another shape or cannot be read.
    """
    shapes = tensor_shapes(path, part)
    fix = "use the model config of the run that saved it"
    if missing := sorted(destination.keys() - shapes.keys()):
        reason = f"lacks {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise CheckpointError.for_key("resume", path, reason, fix)
    for name, tensor in destination.items():
        if shapes[name] != tensor.shape:
            reason = f"{name} has shape {tuple(shapes[name])}, the model has {tuple(tensor.shape)}"
            raise CheckpointError.for_key("resume", path, reason, fix)
    try:
        reader = HuggingFaceStorageReader(str(path / part))
        buffers = allocate_contiguous_rows(destination)
        with _local_planner():
            state_dict_loader.load({**destination, **buffers}, storage_reader=reader, no_dist=True)
    except (CheckpointException, SafetensorError, OSError) as error:
        raise _read_error(path, part, error) from error
    for name, rows in buffers.items():
        copy_strided_rows(destination[name], rows)


def full_tensors(
    path: Path, part: str = "model", names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Load the unsharded tensors of a folder.

    Args:
        path: Checkpoint folder.
        part: Folder of tensors.
        names: Tensors to load, of those in the folder; None: all.
    """
    metadata = _read_metadata(path, part)
    tensors = {
        name: torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        for name in (metadata if names is None else metadata.keys() & set(names))
    }
    read_into(path, part, tensors)
    return tensors


def has_tensors(path: Path, part: str) -> bool:
    """Whether a checkpoint has a folder of tensors."""
    return (path / part).is_dir()


def released_weights(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Load the unsharded weights for evaluation and export: the moving average, if there is one.

    Args:
        path: Checkpoint folder.
        names: Weights to load, of those in the checkpoint; None: all.
    """
    weights = full_tensors(path, "model", names)
    if has_tensors(path, AVERAGE):
        averages = full_tensors(path, AVERAGE, weights)
        weights |= {name: tensor.to(weights[name].dtype) for name, tensor in averages.items()}
    return weights


class BackgroundWriter:
    """Queue of write actions, run in order, in the calling or in a background thread.

    In the background, a checkpoint interrupts training for one copy of the tensors to the host.
    One checkpoint is written at a time; the next ``stage`` or ``finish`` raises its errors.

    Args:
        background: Whether actions run in a background thread.
        device: Device of the tensors.
        collective: Whether all ranks save together, over a separate process group.
    """

    def __init__(self, *, background: bool, device: torch.device, collective: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoints") if background else None
        self._pending: list[Future[None]] = []
        cuda = device.type == "cuda"
        options = StagingOptions(cuda, False, False, cuda)
        self._stager = DefaultStager(options) if background else None
        self.group = dist.group.WORLD if collective else None
        if collective and (background or cuda):  # threads must not share a process group
            self.group = dist.new_group(backend="gloo")

    def stage(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> StagedTensors:
        """Return the tensors; in the background, copies of them in host memory."""
        state = {part: dict(named) for part, named in tensors.items()}
        if self._stager is None:
            return state
        self.finish()
        return cast(StagedTensors, self._stager.stage(cast(dict[str, Any], state)))

    def submit(self, action: Callable[[], None]) -> None:
        """Run ``action``, or queue it for the background thread."""
        if self._thread is None:
            action()
        else:
            self._pending.append(self._thread.submit(action))

    def finish(self) -> None:
        """Wait for the queued actions and raise their errors."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
