"""Fault injection: callbacks that fail on purpose, to test the handling of failures."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.callback_config import FaultArgs


class InjectedFault(FaultArgs, Callback, ABC):
    """Fault on one rank after ``step`` optimizer steps, at the start of the next one.

    With ``once``, the fault is skipped when the job restarts in the same folder.
    """

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Inject the fault at its step and rank."""
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            if self.once:
                marker = Path(trainer.default_root_dir, ".accident")
                if marker.exists():
                    return
                marker.touch()
            self.inject()

    @abstractmethod
    def inject(self) -> None:
        """Cause the fault."""


class InjectException(InjectedFault):
    """Exception in user code."""

    def inject(self) -> None:
        """Raise ``RuntimeError``."""
        raise RuntimeError("injected: this job raises on purpose")


class InjectOutOfMemory(InjectedFault):
    """Out-of-memory error."""

    def inject(self) -> None:
        """Allocate a tensor that exceeds the address space."""
        torch.empty(1 << 62, dtype=torch.uint8)


class InjectHang(InjectedFault):
    """Rank that hangs and ignores SIGTERM and SIGINT."""

    def inject(self) -> None:
        """Block SIGTERM and SIGINT and sleep forever."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        while True:
            time.sleep(3600)


class InjectKill(InjectedFault):
    """Process that is killed."""

    def inject(self) -> None:
        """Send SIGKILL to this process."""
        os.kill(os.getpid(), signal.SIGKILL)
