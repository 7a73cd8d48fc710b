"""Who writes checkpoints: the training itself, or a thread of its own beside it."""

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
    """Does work in the order in which it is given, in the ``background`` if asked to.

    There a save costs the training one copy of the tensors to the host. One save is under way at
    a time; what went wrong with it is raised by the next ``submit`` or ``finish``.
    """

    def __init__(self, *, background: bool, device: torch.device, collective: bool) -> None:
        """``collective``: all ranks save together, over a group of their own."""
        self._thread = ThreadPoolExecutor(1, "checkpoints") if background else None
        self._pending: list[Future[None]] = []
        cuda = device.type == "cuda"
        options = StagingOptions(cuda, False, False, cuda)
        self._stager = DefaultStager(options) if background else None
        self.group = dist.group.WORLD if collective else None
        if collective and (background or cuda):  # no order is kept between threads of one group
            self.group = dist.new_group(backend="gloo")

    def stage(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
        """Returns the tensors, copied if training goes on while they are written."""
        plain = {part: dict(held) for part, held in tensors.items()}
        if self._stager is None:
            return plain
        self.finish()
        return cast(Tensors, self._stager.stage(cast(dict[str, Any], plain)))

    def submit(self, action: Callable[[], None]) -> None:
        """Does ``action``, or leaves it to the thread."""
        if self._thread is None:
            action()
        else:
            self._pending.append(self._thread.submit(action))

    def finish(self) -> None:
        """Waits for what is under way; raises what it raised."""
        under_way, self._pending = self._pending, []
        for future in under_way:
            future.result()
