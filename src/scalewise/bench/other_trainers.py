"""Trainers that are compared: Lightning, Hugging Face's Trainer and litgpt, by their defaults."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scalewise.bench.interleaved import InterleavedLoader
from scalewise.data.dataloader import Batch
from scalewise.models.build import build_model
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.training.device_setup import RankInfo


class _CausalLM(nn.Module):
    """Model of a run with a mean loss, as Hugging Face's Trainer calls it."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        self.model = build_model(run.model, run.seed)
        self.loss: Tensor = torch.zeros(())

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch; ``inputs_BT`` and ``labels_BT`` are token ids."""
        logits_BTV = self.model(inputs)
        loss = cross_entropy(logits_BTV.flatten(0, 1).float(), labels.flatten())
        self.loss = loss.detach()
        return {"loss": loss}


class _LightningModule(LightningModule):
    """Module with one logged loss and torch's default AdamW."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        self.network, self._lr = _CausalLM(run), run.optimizer.lr

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of a batch."""
        loss: Tensor = self.network(batch["inputs"], batch["labels"])["loss"]
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with torch's default implementation."""
        return torch.optim.AdamW(self.parameters(), lr=self._lr)


def fit_lightning(
    run: RunConfig, folder: Path, rank_info: RankInfo, steps: int, loader: InterleavedLoader
) -> float:
    """Train with Lightning's Trainer: its logger, progress bar, summary and checkpoint."""
    module = _LightningModule(run)
    with _silenced():
        trainer = Trainer(
            accelerator=run.hardware.device.value,
            devices=1,
            precision=_lightning_precision(run),
            max_steps=steps,
            gradient_clip_val=run.trainer.clip_norm,
            default_root_dir=folder,
        )
        trainer.fit(module, loader)
    return module.network.loss.item()


def fit_hugging_face(
    run: RunConfig, folder: Path, rank_info: RankInfo, steps: int, loader: InterleavedLoader
) -> float:
    """Train with Hugging Face's Trainer: its optimizer, schedule, logging and checkpoint."""
    transformers: Any = import_module("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=run.micro_batch,
        learning_rate=run.optimizer.lr,
        max_grad_norm=run.trainer.clip_norm or 0.0,
        bf16=run.precision.compute is FloatFormat.bf16,
        use_cpu=run.hardware.device.value == "cpu",
        report_to="none",
        seed=run.seed,
    )
    module = _CausalLM(run)

    class InterleavedTrainer(transformers.Trainer):  # type: ignore[misc]  # no type information
        def get_train_dataloader(self) -> InterleavedLoader:
            return loader

    with _silenced():
        InterleavedTrainer(model=module, args=arguments, train_dataset=[0]).train()
    return module.loss.item()


class _WholeSequences:
    """Batches of a loader as one tensor of inputs and the last label, as litgpt reads them."""

    def __init__(self, loader: InterleavedLoader, device: torch.device) -> None:
        self._loader, self._device = loader, device

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._loader:
            yield torch.cat([batch["inputs"], batch["labels"][:, -1:]], 1).to(self._device)


def fit_litgpt(
    run: RunConfig, folder: Path, rank_info: RankInfo, steps: int, loader: InterleavedLoader
) -> float:
    """Train litgpt's model of the same sizes with the loop of ``litgpt pretrain``, uncompiled.

    The loop does not return a loss: NaN.
    """
    litgpt: Any = import_module("litgpt.pretrain")
    sizes: Any = run.model
    config = litgpt.Config(
        block_size=run.data.sequence,
        vocab_size=sizes.vocabulary,
        padded_vocab_size=sizes.vocabulary,
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=sizes.heads,
        n_query_groups=sizes.key_heads,
        intermediate_size=sizes.feedforward,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    arguments = litgpt.TrainArgs(
        save_interval=None,
        global_batch_size=run.micro_batch,
        micro_batch_size=run.micro_batch,
        lr_warmup_steps=1,
        max_tokens=steps * run.tokens_per_step,
        max_norm=run.trainer.clip_norm or 0.0,
    )
    evaluation = litgpt.EvalArgs(interval=2 * steps, initial_validation=False)
    evaluation.final_validation = False
    with _silenced():
        fabric = Fabric(
            accelerator=run.hardware.device.value,
            devices=1,
            precision=_lightning_precision(run),
            loggers=CSVLogger(folder),
        )
        fabric.launch()
        model = fabric.setup(litgpt.GPT(config))
        optimizer = torch.optim.AdamW(model.parameters(), run.optimizer.lr)
        state = {
            "model": model,
            "optimizer": fabric.setup_optimizers(optimizer),
            "iter_num": 0,
            "step_count": 0,
        }
        train = _WholeSequences(loader, fabric.device)
        validation = torch.zeros(2, 1, run.data.sequence + 1, device=fabric.device)
        litgpt.fit(fabric, 1, state, train, validation, folder, None, arguments, evaluation)
    return float("nan")


def _lightning_precision(run: RunConfig) -> Literal["bf16-mixed", "32-true"]:
    return "bf16-mixed" if run.precision.compute is FloatFormat.bf16 else "32-true"


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discard progress bars, log messages and warnings."""
    logging.disable(logging.WARNING)
    try:
        with (
            Path(os.devnull).open("w", encoding="utf-8") as sink,
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
