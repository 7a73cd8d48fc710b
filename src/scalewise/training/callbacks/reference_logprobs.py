"""Reference log-probabilities of all pairs, computed before the first step."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.data.dataloader import PADDING_INDEX, MicroBatches
from scalewise.errors import Interrupted
from scalewise.run_config import RunConfig
from scalewise.training.lightning_module import TrainingModule
from scalewise.training.signal_stop import STOP

logger = logging.getLogger(__name__)


class ReferenceLogProbs(Callback):
    """Compute the reference log-probabilities of each sample once, distributed over the ranks.

    A resumed run computes them again: Lightning calls this hook before it loads the checkpoint,
    when the module has its initial weights.
    """

    def __init__(self, run: RunConfig, loaders: Sequence[MicroBatches]) -> None:
        self._run, self._loaders = run, loaders

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute the log-probabilities of the samples of each loader."""
        assert isinstance(pl_module, TrainingModule)
        objective = self._run.objective.reference_objective
        assert objective is not None
        if trainer.is_global_zero:
            logger.info("computing reference log-probabilities of each pair ...")
        for loader in self._loaders:
            logprobs_N2 = torch.zeros(loader.num_samples, 2, device=pl_module.device)
            for index_B, batch in loader.iter_indexed_batches(pl_module.num_steps):
                if number := STOP.poll():
                    name = signal.Signals(number).name
                    raise Interrupted(number, f"{name} before the first step; nothing is trained")
                device_batch = trainer.strategy.batch_to_device(batch)
                logprobs_B2 = pl_module.parallel_strategy.call_no_grad(
                    pl_module.forward_no_grad, objective, device_batch
                ).view(-1, 2)
                real_B = torch.from_numpy(index_B != PADDING_INDEX)
                logprobs_N2[torch.from_numpy(index_B)[real_B]] = logprobs_B2[real_B].float()
            if dist.is_initialized():  # values of other ranks are negative there and zero here
                dist.all_reduce(logprobs_N2, dist.ReduceOp.MIN)
            loader.reference_logprobs = logprobs_N2.cpu().numpy()
