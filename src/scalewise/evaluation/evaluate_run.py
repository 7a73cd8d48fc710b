"""Evaluation of the model of a run on its validation data, and the cost of its quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch
from tokenizers import Tokenizer

from scalewise.checkpoints.trained_run import TrainedRun, load_model
from scalewise.data.prepare import DataSplits
from scalewise.errors import ConfigError
from scalewise.evaluation import ALL, AS_TRAINED, validation_metrics
from scalewise.evaluation.validation_metrics import (
    PreferenceMetrics,
    RewardMetrics,
    ValidationMetrics,
)
from scalewise.models.base_module import ModelModule
from scalewise.objectives import DPO, GRPO, Captioning, Classification
from scalewise.units import format_bytes

Metrics = ValidationMetrics | PreferenceMetrics | RewardMetrics
MeasureFn = Callable[[ModelModule], Metrics]


def measure_run(
    trained_run: TrainedRun,
    module: ModelModule,
    splits: DataSplits,
    rows: str,
    on_progress: Callable[[int], None],
) -> Metrics:
    """Evaluate a model on the validation split, with the metrics of the objective of its run.

    Args:
        trained_run: Run that has trained the model.
        module: Unsharded model.
        splits: Data of the run.
        rows: Number of validation samples, or ``ALL`` or ``AS_TRAINED``.
        on_progress: Function that is called with the number of evaluated samples.

    Raises:
        ConfigError: the data of the run have no validation split.
    """
    if splits.validation is None:
        reason, fix = "the data of the run have no validation split", "choose another run folder"
        raise ConfigError.for_key("", str(trained_run.folder), reason, fix)
    count = {ALL: len(splits.validation), AS_TRAINED: trained_run.trainer.validation_rows}.get(rows)
    count = int(rows) if count is None else count
    # A trained run has resolved micro_batch=auto.
    dataset_args = (splits.validation, count, int(trained_run.trainer.micro_batch))
    if isinstance(trained_run.objective, GRPO):
        return validation_metrics.measure_rewards(
            module, trained_run.objective, trained_run.data, *dataset_args, on_progress
        )
    if isinstance(trained_run.objective, Captioning):
        return validation_metrics.measure_captions(
            module, *dataset_args, end_tokens(run_tokenizer(splits)), on_progress
        )
    if splits.validation_sources:
        return validation_metrics.MixtureMetrics.combine(
            {
                name: validation_metrics.measure_loss(
                    module, dataset, *dataset_args[1:], on_progress
                )
                for name, dataset in splits.validation_sources.items()
            }
        )
    if not isinstance(trained_run.objective, DPO):
        metrics = validation_metrics.measure_loss(module, *dataset_args, on_progress)
        if isinstance(trained_run.objective, Classification):
            return validation_metrics.ClassificationMetrics(**asdict(metrics))
        return metrics
    reference = load_model(replace(trained_run, checkpoint=None), next(module.parameters()).device)
    return validation_metrics.measure_preferences(
        module, reference, trained_run.objective, *dataset_args, on_progress
    )


def quantization_costs(
    trained_run: TrainedRun, device: torch.device, metrics: Metrics, measure: MeasureFn
) -> Iterator[tuple[str, dict[str, float]]]:
    """Memory saved and loss added by each quantized format.

    Yields a sentence, and the values for the evaluation record.
    """
    fp8 = trained_run.precision.fp8_layers(trained_run.model)
    if not (trained_run.packed_weights or trained_run.fake_quantized_weights or fp8):
        return
    with torch.autocast(device.type, enabled=False):
        fp32_module = load_model(trained_run, device, unquantized=True).float()
        fp32_loss = measure(fp32_module).loss
    metric = "1 - reward" if isinstance(metrics, RewardMetrics) else "the loss"
    change = f"{metric} is {fp32_loss:.4f} in fp32, {metrics.loss - fp32_loss:+.4f} by"
    if trained_run.packed_weights:
        element_bytes = trained_run.precision.parameters.bytes
        unpacked_bytes = sum(w.shard_bytes(element_bytes) for w in trained_run.packed_weights)
        packed_bytes = sum(
            part.shard_bytes(element_bytes)
            for weight in trained_run.packed_weights
            for part in trained_run.quantization.packed_parts(weight)
        )
        yield (
            f"quantized weights: {format_bytes(packed_bytes)} instead of "
            f"{format_bytes(unpacked_bytes)}; {change} quantization",
            {
                "packed_bytes": packed_bytes,
                "whole_bytes": unpacked_bytes,
                "loss_in_fp32": fp32_loss,
            },
        )
    if trained_run.fake_quantized_weights:
        int4_bytes, unpacked_bytes = trained_run.quantized_bytes
        yield (
            f"4-bit weights after export: {format_bytes(int4_bytes)} instead of "
            f"{format_bytes(unpacked_bytes)}; {change} quantization",
            {
                "packed_bytes": int4_bytes,
                "whole_bytes": unpacked_bytes,
                "loss_in_fp32": fp32_loss,
            },
        )
    if fp8:
        yield f"fp8 matmuls: {change} fp8", {"loss_in_fp32": fp32_loss}


def run_tokenizer(splits: DataSplits) -> Tokenizer:
    """Tokenizer of the data of a run."""
    return Tokenizer.from_file(str(splits.tokenizer))


def end_tokens(tokenizer: Tokenizer) -> set[int]:
    """Ids of the special tokens, which end a text."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {number for number, token in added if token.special}
