"""LightningModule of one model, objective and optimizer, for every parallelism strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from scalewise.adapters.build import disable_adapter
from scalewise.data.dataloader import Batch
from scalewise.lr_schedules import ScheduleConfig
from scalewise.metric_names import SOURCE_LOSS
from scalewise.models.base_module import ModelModule
from scalewise.models.decoder.moe import MixtureOfExperts, find_mixtures
from scalewise.objectives import GRPO, ObjectiveConfig
from scalewise.objectives.losses import count_targets
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ParallelStrategy, ScaledLoss
from scalewise.training.rollout import Rollout
from scalewise.training.step_statistics import PercentileClipping, SpikeDetector

BATCH_PROGRESS_KEY = "epoch_loop.batch_progress"
"""Key of Lightning's micro-batch counters in a checkpoint."""


def build_lr_scheduler(
    schedule: ScheduleConfig,
    optimizer: Optimizer,
    steps: int,
    resume_step: Callable[[], int | None] = lambda: None,
) -> LambdaLR:
    """Learning-rate scheduler of a training of ``steps`` steps, stepped once per optimizer step.

    ``resume_step``: function that returns the step of the last warm-up after a resume; None: none.
    """

    def factor(step: int) -> float:
        return schedule.lr_factor(step, steps) * schedule.rewarmup_factor(step, resume_step())

    return LambdaLR(optimizer, factor)


class TrainingModule(LightningModule):
    """LightningModule that trains the model of a run.

    The loss is the sum over labels, divided by the number of labels in the global batch. It does
    not depend on the micro-batch size, the number of ranks, padding or masking. Preference losses
    are divided by the number of pairs, policy-gradient losses by the number of sampled answers.
    The loss of the last micro-batch stays on the device and is not logged here.

    Args:
        run: Config of the run.
        steps: Length of the learning-rate schedule, in optimizer steps.
        sources: Sources of a mixture with validation samples, each in a data loader of its own.
    """

    model: nn.Module
    _model_parameters: list[nn.Parameter]
    _mixtures: list[MixtureOfExperts]

    def __init__(self, run: RunConfig, steps: int, sources: Sequence[str] = ()) -> None:
        super().__init__()
        self.run, self.num_steps, self.sources = run, steps, sources
        objective = run.objective
        self._rollout = Rollout(objective, run.data) if isinstance(objective, GRPO) else None
        self._loss: ScaledLoss | None = None
        self._constant_losses: dict[int, ScaledLoss] = {}
        self._micro_batches_per_step = run.micro_batches_per_step
        self.last_losses = torch.zeros(1)
        self.last_grad_norm = torch.zeros(())
        self.last_expert_counts = torch.zeros(0)
        self._rewarmup_start: int | None = None
        trainer = run.trainer
        self._step_losses: list[Tensor] = []
        self.spikes: SpikeDetector | None = None
        if trainer.skip_sigma is not None:
            self.spikes = SpikeDetector(
                trainer.skip_sigma,
                trainer.rolling_window,
                trainer.max_skipped_steps,
                skips_infinite=run.precision.compute is not FloatFormat.fp16,
            )
        self._clipping: PercentileClipping | None = None
        if trainer.clip_percentile is not None:
            self._clipping = PercentileClipping(
                trainer.clip_percentile, trainer.rolling_window, trainer.clip_norm
            )

    @property
    def parallel_strategy(self) -> ParallelStrategy:
        """Strategy of the trainer."""
        return cast(ParallelStrategy, self.trainer.strategy)

    @property
    def last_loss(self) -> Tensor:
        """Training loss of the last micro-batch."""
        return self.last_losses[0]

    def configure_model(self) -> None:
        """Build this rank's partition of the model, initialized from the seed of the run."""
        if not hasattr(self, "model"):
            self.model = self.parallel_strategy.build(self.run)

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move a batch but its positions, whose values the model reads on the host."""
        on_cuda = device.type == "cuda"
        return {
            name: x if name == "positions" else x.to(device, non_blocking=on_cuda)
            for name, x in batch.items()
        }

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Contribution of a micro-batch to the mean loss of its optimizer step.

        The loss is scaled up by the number of accumulated micro-batches, by which Lightning
        divides, and by the number of ranks over which the strategy averages gradients.
        """
        if self._loss is None or self._micro_batches_per_step.is_step_end(batch_idx):
            step, _ = self._micro_batches_per_step.locate(batch_idx)
            self._loss = self._scale_loss(batch, step)
            if self.run.trainer.batch_warmup:
                self._start_step(step)
        if self._rollout:
            step = self.trainer.global_step
            batch = self._rollout.sample(batch, self.forward_no_grad, self.run.seed, step)
        batch = self._add_reference(batch)
        last = self._micro_batches_per_step.is_step_end(batch_idx + 1)
        losses = self.parallel_strategy.compute_train_loss(self.model, batch, self._loss, last=last)
        self.last_losses = losses.detach().view(-1)
        if self.spikes is not None:
            self._step_losses.append(self.last_losses[0])
        return losses[0] if losses.dim() else losses

    def on_validation_epoch_start(self) -> None:
        """Reset the validation sums; switch an averaging optimizer to its averaged weights."""
        if self.run.optimizer.averages_weights:
            self._optimizer.eval()
        shape = max(1, len(self.sources)), len(self.run.objective.metric_keys) + 1
        self._validation_sums = torch.zeros(shape, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the metric sums and the target count of one micro-batch."""
        objective = self.run.objective.unregularized
        if self._rollout:
            batch = self._rollout.generate_greedy(batch, self.forward_no_grad)
        batch = self._add_reference(batch)
        losses = self.parallel_strategy.compute_validation_loss(
            self.model, batch, ScaledLoss(objective)
        )
        count = count_targets(
            objective, self.parallel_strategy.shard_batch({"labels": batch["labels"]})["labels"]
        )
        sums = torch.cat([losses.view(-1).double(), count.view(1).double()])
        self._validation_sums[dataloader_idx] += sums

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss`` and other validation metrics, averaged over the labels of all ranks.

        The loss of each source of a mixture is ``val/loss/NAME``.
        """
        if dist.is_initialized():
            dist.all_reduce(self._validation_sums)
        for source, sums in zip(self.sources, self._validation_sums, strict=False):
            self.log(SOURCE_LOSS + source, sums[0] / sums[-1])
        *sums, count = self._validation_sums.sum(0).tolist()
        for key, total in zip(self.run.objective.metric_keys, sums, strict=True):
            self.log(f"val/{key}", torch.tensor(total / count if count else float("nan")))
        if self.run.optimizer.averages_weights:
            self._optimizer.train()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimizer of the run, and its schedule, stepped once per optimizer step."""
        optimizer = self.parallel_strategy.build_optimizer(self.run, self.model)
        self._model_parameters = [*self.model.parameters()]
        self._mixtures = find_mixtures(self.model)
        schedule = build_lr_scheduler(
            self.run.schedule, optimizer, self.num_steps, lambda: self._rewarmup_start
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    @property
    def _optimizer(self) -> Any:
        return self.trainer.optimizers[0]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Do nothing: a pipeline schedule has already computed gradients at this point."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Free the gradients after an optimizer step."""
        if self._micro_batches_per_step.is_step_end(batch_idx + 1):
            for parameter in self._model_parameters:
                parameter.grad = None

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Balance the experts by their loads in the global batch, and reset the counts.

        Checkpoints of a step are written before ``on_train_batch_end``, and contain the biases.
        """
        if not self._mixtures:
            return
        self.last_expert_counts = torch.stack([mixture.counts for mixture in self._mixtures])
        if self._mixtures[0].bias is not None:
            loads_LE = torch.stack([mixture.load for mixture in self._mixtures])
            self.parallel_strategy.sum_over_data_ranks(loads_LE)
            for mixture, load_E in zip(self._mixtures, loads_LE, strict=True):
                mixture.balance(load_E)
        for mixture in self._mixtures:
            mixture.reset_counts()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global gradient norm and store its value before clipping.

        The gradients of a skipped step are freed, so that the optimizer changes nothing.
        """
        limit = self._clipping.limit() if self._clipping else self.run.trainer.clip_norm
        norm = self.parallel_strategy.clip_grad_norm(self._model_parameters, limit).detach()
        self.last_grad_norm = norm
        if self.spikes is not None and self._is_spike(self.spikes, norm):
            for parameter in self._model_parameters:
                parameter.grad = None
        elif self._clipping is not None:
            self._clipping.add(norm)

    def _is_spike(self, spikes: SpikeDetector, norm: Tensor) -> bool:
        """Whether the step is skipped, equal on every rank; the host waits for both values."""
        loss = torch.stack(self._step_losses).float().mean()
        self._step_losses = []
        values = torch.stack([loss, norm.float().to(loss.device)])
        if dist.is_initialized():
            dist.all_reduce(values)
            values /= dist.get_world_size()
        mean_loss, mean_norm = values.cpu().tolist()
        return spikes.is_spike(self.trainer.global_step + 1, mean_loss, mean_norm)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed dropout from the seed, the micro-batch index and the rank, so that runs resume."""
        if self.uses_dropout:
            rank = self.run.parallelism.dropout_rank(self.global_rank)
            seed = (self.run.seed * 1_000_003 + batch_idx) * 1_000_003 + rank
            torch.manual_seed(seed % 2**63)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the start of a warm-up after a resume, and the statistics of the last steps."""
        checkpoint["rewarmup_start"] = self._rewarmup_start
        checkpoint["step_statistics"] = {
            name: statistics.state_dict() for name, statistics in self._step_statistics.items()
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Convert the micro-batch counters to the micro-batches per step of this run.

        The learning rates of the checkpoint are dropped in favor of those of this run. A warm-up
        after an earlier resume continues, else a new one starts.
        """
        micro_batches = self._micro_batches_per_step.before(checkpoint["global_step"])
        loop = checkpoint["loops"]["fit_loop"]
        loader_states = loop["state_dict"]["combined_loader"]
        for counts in (*loop[BATCH_PROGRESS_KEY].values(), *loader_states):
            if isinstance(counts, dict):
                # A checkpoint at the end of a batch is saved before Lightning counts the batch.
                uncounted = counts.get("processed", 0) - counts.get("completed", 0)
                counts |= {key: micro_batches for key, count in counts.items() if count}
                if uncounted:
                    counts["completed"] = counts["processed"] - uncounted
        for schedule in checkpoint["lr_schedulers"]:
            for key in ("base_lrs", "_last_lr"):
                del schedule[key]
        step, start = checkpoint["global_step"], checkpoint.get("rewarmup_start")
        ends_later = start is not None and step < start + self.run.schedule.rewarmup_steps
        self._rewarmup_start = start if ends_later else step
        saved_statistics = checkpoint.get("step_statistics", {})
        for name, statistics in self._step_statistics.items():
            if name in saved_statistics:
                statistics.load_state_dict(saved_statistics[name])

    @property
    def _step_statistics(self) -> dict[str, SpikeDetector | PercentileClipping]:
        """Statistics of the last steps by their name in checkpoints."""
        statistics = {"spikes": self.spikes, "clipping": self._clipping}
        return {name: it for name, it in statistics.items() if it is not None}

    def on_train_start(self) -> None:
        """Set the learning rate of the first step, also when a run resumes mid-schedule."""
        schedule = cast(LambdaLR, self.lr_schedulers())
        groups = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        for group, (base, factor) in zip(schedule.optimizer.param_groups, groups, strict=True):
            rate = base * factor(schedule.last_epoch)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # torchao compiles its step with this tensor
            else:
                group["lr"] = rate

    @property
    def uses_dropout(self) -> bool:
        """Whether the forward pass draws random numbers."""
        return bool(getattr(self.run.model, "dropout", 0.0) or self.run.adapter.dropout)

    @torch.no_grad()
    def forward_no_grad(self, objective: ObjectiveConfig, batch: Batch) -> Tensor:
        """Sums of an objective over a batch, without dropout and gradients."""
        was_training = self.model.training
        self.model.eval()
        sums = self.parallel_strategy.compute_validation_loss(
            self.model, batch, ScaledLoss(objective)
        )
        self.model.train(was_training)
        return sums

    def _add_reference(self, batch: Batch) -> Batch:
        """Add the reference log-probabilities of the base model without its adapter.

        Without an adapter, the data loader has added them from a pass before the first step.
        """
        reference = self.run.objective.reference_objective
        if reference is None or not self.run.runs_reference_forward:
            return batch
        with disable_adapter(self.run.adapter, cast(ModelModule, self.model)):
            return {**batch, "reference": self.forward_no_grad(reference, batch)}

    def _start_step(self, step: int) -> None:
        """Set what depends on the batch of a step: the divisor of Lightning, weights of experts."""
        self.trainer.accumulate_grad_batches = self._micro_batches_per_step.at(step)
        warmup_factor = self.run.global_batch / self.run.samples_per_step.at(step)
        for mixture in self._mixtures:
            mixture.sequence_weight = self.run.sequence_loss_weight * warmup_factor

    def _scale_loss(self, batch: Batch, step: int) -> ScaledLoss:
        """Loss of a step, divided by the labels, pairs or sampled answers of its global batch.

        A divisor is created once for each of its values: a copy to the device makes the host wait.
        """
        run, local_labels = self.run, batch.get("labels_of_step")
        accumulation = self._micro_batches_per_step.at(step)
        targets_per_sample = 1 if run.objective.pairs else run.objective.rollouts_per_sample
        if local_labels is not None and not targets_per_sample:
            ranks_per_batch = run.world_size // run.parallelism.data_parallel_size
            total = local_labels.clone()
            if dist.is_initialized():
                dist.all_reduce(total)
            targets = (total // ranks_per_batch).clamp(min=1).float()
            return self._divide_loss(targets, accumulation)
        count = run.samples_per_step.at(step) * targets_per_sample or run.tokens_in_step.at(step)
        if count not in self._constant_losses:  # no label is masked
            targets = torch.tensor(float(count), device=self.device)
            self._constant_losses[count] = self._divide_loss(targets, accumulation)
        return self._constant_losses[count]

    def _divide_loss(self, targets: Tensor, accumulation: int) -> ScaledLoss:
        factor = accumulation * self.run.parallelism.gradient_averaging_size / targets
        return ScaledLoss(self.run.objective, factor, self.run.loss_compile, accumulation)
