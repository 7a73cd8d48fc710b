"""Shapes and formats of a forward pass of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from scalewise.adapters.config import AdapterConfig
from scalewise.models.base import ModelConfig
from scalewise.models.op_graph import ForwardSpec
from scalewise.precision import FloatFormat, Precision
from scalewise.quantization.config import QuantizationConfig, has_frozen_weights
from scalewise.run_config import RunConfig


def forward_spec(
    run: RunConfig,
    sequences: int,
    tokens_per_sequence: int,
    *,
    casts_weights: bool = False,
    **axes: Any,
) -> ForwardSpec:
    """Return the sizes and formats of a forward pass; equal ones are one object.

    Args:
        run: Run to train.
        sequences: Sequences per micro-batch.
        tokens_per_sequence: Tokens of one sequence on the rank.
        casts_weights: Whether gathered parameters are in the compute format.
        axes: Fields of ``ForwardSpec`` that mesh axes set.
    """
    fields = (
        ("on_cpu", run.hardware.device == "cpu"),
        ("loss_chunk", run.objective.loss_chunk or 0),
        ("loss_in_forward", run.computes_loss_gradients_in_forward),
        ("sequence_packing", run.data.packing),
        ("is_compiled", run.is_compiled),
        ("is_loss_compiled", run.loss_compile is not None),
        ("has_z_loss", bool(getattr(run.objective, "z_loss", 0.0))),
        ("target_tokens", run.data.target_length),
        *axes.items(),
    )
    config_spec = _config_spec(
        run.model, run.precision, run.adapter, run.quantization, casts_weights
    )
    return _sized_spec(config_spec, sequences, tokens_per_sequence, fields)


@lru_cache(maxsize=4096)
def _sized_spec(
    spec: ForwardSpec, sequences: int, tokens_per_sequence: int, fields: tuple[tuple[str, Any], ...]
) -> ForwardSpec:
    return replace(
        spec, sequences=sequences, tokens_per_sequence=tokens_per_sequence, **dict(fields)
    )


@lru_cache(maxsize=256)
def _config_spec(
    model: ModelConfig,
    precision: Precision,
    adapter: AdapterConfig,
    quantization: QuantizationConfig,
    casts_weights: bool,
) -> ForwardSpec:
    """Return the formats of a forward pass, which do not depend on its size."""
    weight_element_bytes = precision.compute.bytes if casts_weights else precision.parameters.bytes
    casts_residual = model.casts_residual and precision.compute is FloatFormat.bf16
    return ForwardSpec(
        sequences=1,
        tokens_per_sequence=1,
        residual_element_bytes=precision.compute.bytes if casts_residual else weight_element_bytes,
        compute_element_bytes=precision.compute.bytes,
        gradient_element_bytes=weight_element_bytes,
        autocast=precision.compute.bytes < weight_element_bytes,
        on_cpu=False,
        rope_element_bytes=precision.parameters.bytes,
        has_frozen_weights=has_frozen_weights(quantization, adapter, model),
        fully_trained_modules=adapter.fully_trained_modules(model),
        adapted_layers=adapter.adapted_layers(model),
        adapter_rank=adapter.rank,
        adapter_dropout=adapter.dropout,
        has_magnitudes=adapter.magnitudes,
        scaled_layers=adapter.scaled_layers(model),
        packed_layers=quantization.packed_layers(model),
        scale_bytes=quantization.scale_bytes,
        prompt_tokens=adapter.prompt_tokens,
        prefix_tokens=adapter.prefix_tokens,
        fp8_layers=precision.fp8_layers(model),
        fake_quantized_layers=quantization.fake_quantized_layers(model),
        quantization_group=quantization.group,
        rounds_inputs=quantization.rounds_inputs,
    )
