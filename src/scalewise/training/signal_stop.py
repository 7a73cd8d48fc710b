"""Graceful stop on a signal: all ranks stop after the same optimizer step."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

from scalewise.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""Signals that stop a run. Slurm sends SIGUSR2 shortly before the time limit."""


class StopSignal:
    """Signal handler of a rank; the ranks agree on the step after which they stop.

    Without a launcher that forwards signals (``has_no_launcher``), a second SIGINT stops the
    process immediately.
    """

    def __init__(self) -> None:
        self.received_signal = 0
        self.has_no_launcher = False
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None
        self._group: dist.ProcessGroup | None = None

    def start(self, *, has_no_launcher: bool) -> None:
        """Discard the signals of an earlier run in this process and install the handlers."""
        self.received_signal, self.has_no_launcher, self._pending = 0, has_no_launcher, None
        self._group = None
        self.install()

    def install(self) -> None:
        """Install the signal handlers in this process."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN):
                    signal.signal(number, self._handle_signal)  # nohup ignores SIGHUP

    def block_signals(self) -> None:
        """Block the signals while Lightning's handlers are installed."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def unblock_signals(self) -> None:
        """Deliver the blocked signals."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def poll(self) -> int:
        """Signal that any rank had received one step ago, the same on every rank; 0: none.

        Each call starts an asynchronous all-reduce and reads the result of the previous one, so
        that no step waits for it.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.received_signal
        if self._group is None:  # of the hosts: the result of a device would make the host wait
            is_gloo = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
        previous = self._pending
        number = torch.tensor(self.received_signal, device="cpu")
        work = dist.all_reduce(number, dist.ReduceOp.MAX, self._group, async_op=True)
        self._pending = (number, work)
        return self._wait_for_exchange(previous)

    def close(self) -> None:
        """Wait for the pending all-reduce, which every rank has started."""
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
            raise Interrupted(number, "SIGINT twice: stopped immediately, in the middle of a step")
        self.received_signal = self.received_signal or number


STOP = StopSignal()
"""Handler of this process; signal handlers are per process."""
