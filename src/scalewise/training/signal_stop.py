"""Signals, agreed on by all ranks: each of ``SIGNALS`` ends a run after a whole step."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

from scalewise.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""The last is how Slurm says that a job's time is nearly up."""


class StopSignal:
    """Notes the first signal; ranks agree on the step at which they act on it.

    A second SIGINT to a process that is ``has_no_launcher``, with no launcher that passes signals
    on, is from a person who will not wait: it ends the process where it stands.
    """

    def __init__(self) -> None:
        self.received_signal = 0
        self.has_no_launcher = False
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None

    def start(self, *, has_no_launcher: bool) -> None:
        """Forgets what an earlier run in this process was told, and listens."""
        self.received_signal, self.has_no_launcher, self._pending = 0, has_no_launcher, None
        self.install()

    def install(self) -> None:
        """Handles the signals in this process from now on."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN):
                    signal.signal(number, self._handle_signal)  # nohup is obeyed

    def block_signals(self) -> None:
        """Holds signals back: Lightning has the handlers until ``install`` takes them again."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def unblock_signals(self) -> None:
        """Lets through the signals that were held back."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def poll(self, device: torch.device) -> int:
        """Returns the signal that some rank had received a step ago, on every rank alike, or 0.

        The exchange of a step is read at the next one, so that no step waits for it.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.received_signal
        earlier = self._pending
        number = torch.tensor(self.received_signal, device=device)
        self._pending = (number, dist.all_reduce(number, dist.ReduceOp.MAX, async_op=True))
        return self._wait_for_exchange(earlier)

    def close(self) -> None:
        """Waits for the exchange under way, which every rank began."""
        self._wait_for_exchange(self._pending)
        self._pending = None

    @staticmethod
    def _wait_for_exchange(exchange: tuple[torch.Tensor, dist.Work | None] | None) -> int:
        if exchange is None:
            return 0
        number, work = exchange
        if work is not None:
            work.wait()
        return int(number.item())

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.has_no_launcher and number == self.received_signal == signal.SIGINT:
            raise Interrupted(number, "SIGINT twice: ended at once, in the middle of a step")
        self.received_signal = self.received_signal or number


STOP = StopSignal()
"""The process's own: signal handlers are per process."""
