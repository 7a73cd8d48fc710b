"""What the model says of every pair before it is trained, kept beside the rows."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.console import print_lines
from scalewise.data.dataloader import UNREAL, MicroBatches
from scalewise.errors import Interrupted
from scalewise.run_config import RunConfig
from scalewise.training.lightning_module import TrainingModule
from scalewise.training.signal_stop import STOP


class ReferenceLogProbs(Callback):
    """Asks the model about the rows that will be read, each once, ranks sharing them out.

    A run that is resumed asks anew: Lightning calls this before it reads a checkpoint, when the
    module has the weights that training began with, drawn from the run's seed.
    """

    def __init__(self, run: RunConfig, loaders: Sequence[MicroBatches]) -> None:
        self._run, self._loaders = run, loaders

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives each loader what was said of its rows."""
        assert isinstance(pl_module, TrainingModule)
        question = self._run.objective.reference_objective
        assert question is not None
        if trainer.is_global_zero:
            print_lines("asking the untrained model about each pair ...")
        for loader in self._loaders:
            said_N2 = torch.zeros(loader.num_samples, 2, device=pl_module.device)
            for index_B, batch in loader.iter_indexed_batches(pl_module.num_steps):
                if number := STOP.poll(pl_module.device):
                    name = signal.Signals(number).name
                    raise Interrupted(number, f"{name} before the first step; nothing is trained")
                there = trainer.strategy.batch_to_device(batch)
                said_B2 = pl_module.parallel_strategy.call_no_grad(
                    pl_module.forward_no_grad, question, there
                ).view(-1, 2)
                real_B = torch.from_numpy(index_B != UNREAL)
                said_N2[torch.from_numpy(index_B)[real_B]] = said_B2[real_B].float()
            if dist.is_initialized():  # what another rank was told is below zero, and here zero
                dist.all_reduce(said_N2, dist.ReduceOp.MIN)
            loader.reference_logprobs = said_N2.cpu().numpy()
