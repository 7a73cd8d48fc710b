"""The LightningModule: one model, one objective, one optimizer, whatever the layout."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from scalewise.data.dataloader import Batch
from scalewise.models.base_module import ModelModule
from scalewise.objectives import GRPO, ObjectiveConfig
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ParallelStrategy, ScaledLoss
from scalewise.training.rollout import Rollout

LOOP = "epoch_loop.batch_progress"
"""Where Lightning keeps its count of micro batches in a checkpoint."""


class TrainingModule(LightningModule):
    """What Lightning trains. The last micro batch's loss stays on the device, unlogged.

    Losses are sums over labels, divided by the labels of the whole global batch: how it is cut
    into micro batches and over ranks changes nothing, whatever rows are padded or masked. Those
    over pairs or answers are divided by those.
    """

    model: nn.Module

    def __init__(self, run: RunConfig, steps: int) -> None:
        """``steps`` is the length of the schedule."""
        super().__init__()
        self.run, self.num_steps = run, steps
        objective = run.objective
        self._rollout = Rollout(objective, run.data) if isinstance(objective, GRPO) else None
        self._label_count = torch.zeros(())
        self.last_losses = torch.zeros(1)
        self.last_grad_norm = torch.zeros(())

    @property
    def parallel_strategy(self) -> ParallelStrategy:
        """Returns the strategy that trains this module."""
        return cast(ParallelStrategy, self.trainer.strategy)

    @property
    def last_loss(self) -> Tensor:
        """Returns the first of what was measured."""
        return self.last_losses[0]

    def configure_model(self) -> None:
        """Builds what this rank holds of the model, from the run's seed."""
        if not hasattr(self, "model"):
            self.model = self.parallel_strategy.build(self.run)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns this micro batch's part of the step's mean loss, scaled for the sums to come.

        Lightning divides by the accumulation, and the layout averages over its ranks.
        """
        if batch_idx % self.run.accumulation == 0:
            self._label_count = self._count_labels(batch)
        if self._rollout:
            step = self.trainer.global_step
            batch = self._rollout.sample(batch, self.forward_no_grad, self.run.seed, step)
        batch = self._add_reference(batch)
        parts = self.run.accumulation * self.run.parallelism.gradient_averaging_size
        loss = ScaledLoss(self.run.objective, parts / self._label_count)
        last = (batch_idx + 1) % self.run.accumulation == 0
        measured = self.parallel_strategy.compute_train_loss(self.model, batch, loss, last=last)
        self.last_losses = measured.detach().view(-1)
        return measured[0] if measured.dim() else measured

    def on_validation_epoch_start(self) -> None:
        """Begins the sums of a validation, of the weights that the optimizer would give away."""
        if self.run.optimizer.averages_weights:
            self._optimizer.eval()
        sums = len(self.run.objective.metric_keys) + 1
        self._validation_sums = torch.zeros(sums, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds what is measured of one micro batch, and its labels or pairs."""
        objective = self.run.objective.unregularized
        if self._rollout:
            batch = self._rollout.generate_greedy(batch, self.forward_no_grad)
        batch = self._add_reference(batch)
        measured = self.parallel_strategy.compute_validation_loss(
            self.model, batch, ScaledLoss(objective)
        )
        count = objective.count_targets(
            self.parallel_strategy.shard_batch({"labels": batch["labels"]})["labels"]
        )
        self._validation_sums += torch.cat([measured.view(-1).double(), count.view(1).double()])

    def on_validation_epoch_end(self) -> None:
        """Logs ``val/loss``, the mean over all held-out labels of all ranks, and what is beside."""
        if dist.is_initialized():
            dist.all_reduce(self._validation_sums)
        *measured, count = self._validation_sums.tolist()
        for key, total in zip(self.run.objective.metric_keys, measured, strict=True):
            self.log(f"val/{key}", torch.tensor(total / count if count else float("nan")))
        if self.run.optimizer.averages_weights:
            self._optimizer.train()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns the run's optimizer, and its schedule stepped once per optimizer step."""
        optimizer = self.parallel_strategy.build_optimizer(self.run, self.model)
        schedule = self.run.schedule.build(optimizer, self.num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    @property
    def _optimizer(self) -> Any:
        return self.trainer.optimizers[0]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zeroes nothing here: in a pipeline, the gradients of the step exist by now."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Drops the gradients when a step has used them."""
        if (batch_idx + 1) % self.run.accumulation == 0:
            self.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the whole gradient to the run's norm, and keeps the norm it had before."""
        self.last_grad_norm = self.parallel_strategy.clip_grad_norm(
            self.model, self.run.trainer.clip_norm
        ).detach()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seeds dropout by (seed, micro step, rows, tokens, layers): a resumed run draws alike."""
        if self.uses_dropout:
            place = self.run.parallelism.dropout_rank(self.global_rank)
            mixed = (self.run.seed * 1_000_003 + batch_idx) * 1_000_003 + place
            torch.manual_seed(mixed % 2**63)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Notes how many micro batches a step had: another layout has others."""
        checkpoint["accumulation"] = self.run.accumulation

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Counts micro batches as this layout cuts the same steps; rates are this run's own."""
        then, now = checkpoint["accumulation"], self.run.accumulation
        loop = checkpoint["loops"]["fit_loop"]
        read = loop["state_dict"]["combined_loader"]
        for counts in (*loop[LOOP].values(), *read):
            if isinstance(counts, dict):
                # A save at the end of a batch comes before Lightning calls that batch completed.
                late = counts.get("processed", 0) - counts.get("completed", 0)
                counts |= {key: count // then * now for key, count in counts.items()}
                if late:
                    counts["completed"] = counts["processed"] - late
        for schedule in checkpoint["lr_schedulers"]:
            for key in ("base_lrs", "_last_lr"):
                del schedule[key]

    def on_train_start(self) -> None:
        """Sets the rate of the first step, which may be one in the middle of a schedule."""
        schedule = cast(LambdaLR, self.lr_schedulers())
        groups = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        for group, (base, factor) in zip(schedule.optimizer.param_groups, groups, strict=True):
            rate = base * factor(schedule.last_epoch)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # torchao's is compiled with it
            else:
                group["lr"] = rate

    @property
    def uses_dropout(self) -> bool:
        """Returns whether the forward pass draws random numbers."""
        return bool(getattr(self.run.model, "dropout", 0.0) or self.run.adapter.dropout)

    @torch.no_grad()
    def forward_no_grad(self, objective: ObjectiveConfig, batch: Batch) -> Tensor:
        """Returns what an objective sums up over a batch, dropout and gradients left out."""
        trains = self.model.training
        self.model.eval()
        found = self.parallel_strategy.compute_validation_loss(
            self.model, batch, ScaledLoss(objective)
        )
        self.model.train(trains)
        return found

    def _add_reference(self, batch: Batch) -> Batch:
        """Returns a batch with what the model without its adapter says, where that is to be asked.

        Else the loader has put beside the rows what was said before the first step.
        """
        reference = self.run.objective.reference_objective
        if reference is None or not self.run.runs_reference_forward:
            return batch
        with self.run.adapter.disable(cast(ModelModule, self.model)):
            return {**batch, "reference": self.forward_no_grad(reference, batch)}

    def _count_labels(self, batch: Batch) -> Tensor:
        """Returns the labels, pairs or answers of the global batch that a step begins with."""
        each = 1 if self.run.objective.pairs else self.run.objective.rollouts_per_sample
        if each:
            return torch.tensor(float(self.run.global_batch * each), device=self.device)
        own = batch.get("labels_of_step")
        if own is None:  # none is masked
            labels = float(self.run.tokens_per_step)
            return torch.tensor(labels, dtype=torch.float32, device=self.device)
        repeated = self.run.world_size // self.run.parallelism.data_parallel_size
        total = own.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return (total // repeated).clamp(min=1).float()
