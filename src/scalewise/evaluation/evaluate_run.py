"""How good the model of a run is on its held-out rows, and what its formats cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch
from tokenizers import Tokenizer

from scalewise.checkpoints.trained import TrainedRun
from scalewise.data.base import DataSplits
from scalewise.errors import ConfigError
from scalewise.evaluation import (
    ALL,
    AS_TRAINED,
    captions,
    load_model,
    preferences,
    rewards,
    validation_metrics,
)
from scalewise.evaluation.preferences import PreferenceMetrics
from scalewise.evaluation.rewards import RewardMetrics
from scalewise.evaluation.validation_metrics import ValidationMetrics
from scalewise.models.base_module import ModelModule
from scalewise.objectives import DPO, GRPO, Captioning, Classification
from scalewise.units import format_bytes

Found = ValidationMetrics | PreferenceMetrics | RewardMetrics
Measure = Callable[[ModelModule], Found]


def measure_run(
    trained_run: TrainedRun,
    module: ModelModule,
    splits: DataSplits,
    rows: str,
    on_progress: Callable[[int], None],
) -> Found:
    """Returns what ``rows`` held-out rows say of ``module``; ``on_progress`` hears how many are
    done.

    Raises ``ConfigError`` where there are none.
    """
    if splits.validation is None:
        reason, fix = "the run's data have no held-out rows", "give the folder of another run"
        raise ConfigError.for_key("", str(trained_run.folder), reason, fix)
    count = {ALL: len(splits.validation), AS_TRAINED: trained_run.trainer.validation_rows}.get(rows)
    count = int(rows) if count is None else count
    given = (splits.validation, count, int(trained_run.trainer.micro_batch))  # auto is settled
    if isinstance(trained_run.objective, GRPO):
        return rewards.measure_rewards(
            module, trained_run.objective, trained_run.data, *given, on_progress
        )
    if isinstance(trained_run.objective, Captioning):
        return captions.measure_captions(
            module, *given, end_tokens(run_tokenizer(splits)), on_progress
        )
    if not isinstance(trained_run.objective, DPO):
        found = validation_metrics.measure_loss(module, *given, on_progress)
        classes = isinstance(trained_run.objective, Classification)
        return validation_metrics.ClassificationMetrics(**asdict(found)) if classes else found
    reference = load_model.load_model(
        replace(trained_run, checkpoint=None), next(module.parameters()).device
    )
    return preferences.measure_preferences(
        module, reference, trained_run.objective, *given, on_progress
    )


def quantization_costs(
    trained_run: TrainedRun, device: torch.device, metrics: Found, measure: Measure
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields what each format saves and costs: in words, and as figures for the record."""
    fp8 = trained_run.precision.fp8_layers(trained_run.model)
    if not (trained_run.packed_weights or trained_run.fake_quantized_weights or fp8):
        return
    with torch.autocast(device.type, enabled=False):
        exact = measure(load_model.load_model(trained_run, device, unquantized=True).float()).loss
    what = "one less the reward" if isinstance(metrics, RewardMetrics) else "the loss"
    by = f"{what} is {exact:.4f} in fp32, {metrics.loss - exact:+.4f} by"
    if trained_run.packed_weights:
        held = trained_run.precision.parameters.bytes
        whole = sum(weight.shard_bytes(held) for weight in trained_run.packed_weights)
        packed = sum(
            p.shard_bytes(held)
            for weight in trained_run.packed_weights
            for p in trained_run.quantization.packed_parts(weight)
        )
        yield (
            f"packed matrices: {format_bytes(packed)} instead of {format_bytes(whole)}; "
            f"{by} packing",
            {"packed_bytes": packed, "whole_bytes": whole, "loss_in_fp32": exact},
        )
    if trained_run.fake_quantized_weights:
        integers, whole = trained_run.quantized_bytes
        yield (
            f"matrices in 4 bits, once exported: {format_bytes(integers)} instead of "
            f"{format_bytes(whole)}; {by} rounding",
            {"packed_bytes": integers, "whole_bytes": whole, "loss_in_fp32": exact},
        )
    if fp8:
        yield f"products in fp8: {by} fp8", {"loss_in_fp32": exact}


def run_tokenizer(splits: DataSplits) -> Tokenizer:
    """Returns the tokenizer of a run's texts."""
    return Tokenizer.from_file(str(splits.tokenizer))


def end_tokens(tokenizer: Tokenizer) -> set[int]:
    """Returns the tokens that end a text."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {number for number, token in added if token.special}
