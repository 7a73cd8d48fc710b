"""Signals, agreed on by all ranks: SIGTERM and SIGINT end a run after a whole step."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Notes the first signal; ranks agree on the step at which they act on it."""

    def __init__(self) -> None:
        self.received = 0
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None

    def install(self) -> None:
        """Handles the signals in this process from now on."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def agreed(self, device: torch.device) -> int:
        """Returns the signal that some rank had received a step ago, on every rank alike, or 0.

        The exchange of a step is read at the next one, so that no step waits for it.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.received
        earlier = self._pending
        number = torch.tensor(self.received, device=device)
        self._pending = (number, dist.all_reduce(number, dist.ReduceOp.MAX, async_op=True))
        return self._read(earlier)

    def close(self) -> None:
        """Waits for the exchange under way, which every rank began."""
        self._read(self._pending)
        self._pending = None

    @staticmethod
    def _read(exchange: tuple[torch.Tensor, dist.Work | None] | None) -> int:
        if exchange is None:
            return 0
        number, work = exchange
        if work is not None:
            work.wait()
        return int(number.item())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number


STOP = StopSignal()
"""The process's own: signal handlers are per process."""
