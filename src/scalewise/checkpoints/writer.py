"""Writing of checkpoints in the training thread or in a background thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

Tensors = dict[str, dict[str, Tensor]]


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

    def stage(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
        """Return the tensors; in the background, copies of them in host memory."""
        state = {part: dict(named) for part, named in tensors.items()}
        if self._stager is None:
            return state
        self.finish()
        return cast(Tensors, self._stager.stage(cast(dict[str, Any], state)))

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
