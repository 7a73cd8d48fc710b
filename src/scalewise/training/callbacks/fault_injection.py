"""Accidents on purpose: how the suite's own tests see what a failure leaves behind."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.training.callbacks.callback_args import FaultArgs


class InjectedFault(FaultArgs, Callback, ABC):
    """Happens on one rank when ``step`` steps are done and the next begins: 3 means in the 4th.

    ``once``: not again when the job starts again in the same folder.
    """

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Lets the accident happen."""
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            if self.once:
                marker = Path(trainer.default_root_dir, ".accident")
                if marker.exists():
                    return
                marker.touch()
            self.inject()

    @abstractmethod
    def inject(self) -> None:
        """Does the damage."""


class InjectException(InjectedFault):
    """An exception in user code."""

    def inject(self) -> None:
        """Raises ``RuntimeError``."""
        raise RuntimeError("injected: this job raises on purpose")


class InjectOutOfMemory(InjectedFault):
    """A demand that no machine can meet."""

    def inject(self) -> None:
        """Allocates more than an address space, on the device of the run."""
        torch.empty(1 << 62, dtype=torch.uint8)


class InjectHang(InjectedFault):
    """A rank that answers nothing and nobody."""

    def inject(self) -> None:
        """Sleeps for good, deaf to SIGTERM and SIGINT."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        while True:
            time.sleep(3600)


class InjectKill(InjectedFault):
    """A process that vanishes."""

    def inject(self) -> None:
        """Sends SIGKILL to itself."""
        os.kill(os.getpid(), signal.SIGKILL)
