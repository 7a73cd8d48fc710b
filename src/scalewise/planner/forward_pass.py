"""Shapes and formats of a forward pass of a run."""

from __future__ import annotations

from scalewise.models.op_graph import ForwardSpec
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig


def forward_spec(
    run: RunConfig, sequences: int, tokens_per_sequence: int, *, casts_weights: bool = False
) -> ForwardSpec:
    """Return the sizes and formats of a forward pass.

    ``casts_weights``: whether gathered parameters are in the compute format.
    """
    precision = run.precision
    weight_element_bytes = precision.compute.bytes if casts_weights else precision.parameters.bytes
    casts_residual = run.model.casts_residual and precision.compute is FloatFormat.bf16
    return ForwardSpec(
        sequences=sequences,
        tokens_per_sequence=tokens_per_sequence,
        residual_element_bytes=precision.compute.bytes if casts_residual else weight_element_bytes,
        compute_element_bytes=precision.compute.bytes,
        gradient_element_bytes=weight_element_bytes,
        autocast=precision.compute.bytes < weight_element_bytes,
        on_cpu=run.hardware.device == "cpu",
        loss_chunk=run.objective.loss_chunk or 0,
        loss_in_forward=run.computes_loss_gradients_in_forward,
        rope_element_bytes=precision.parameters.bytes,
        has_frozen_weights=run.has_frozen_weights,
        fully_trained_modules=run.adapter.fully_trained_modules(run.model),
        adapted_layers=run.adapter.adapted_layers(run.model),
        adapter_rank=run.adapter.rank,
        adapter_dropout=run.adapter.dropout,
        has_magnitudes=run.adapter.magnitudes,
        scaled_layers=run.adapter.scaled_layers(run.model),
        packed_layers=run.quantization.packed_layers(run.model),
        scale_bytes=run.quantization.scale_bytes,
        sequence_packing=run.data.packing,
        prompt_tokens=run.adapter.prompt_tokens,
        prefix_tokens=run.adapter.prefix_tokens,
        fp8_layers=precision.fp8_layers(run.model),
        fake_quantized_layers=run.quantization.fake_quantized_layers(run.model),
        quantization_group=run.quantization.group,
        rounds_inputs=run.quantization.rounds_inputs,
        is_compiled=run.is_compiled,
        is_loss_compiled=run.loss_compile is not None,
        has_z_loss=bool(getattr(run.objective, "z_loss", 0.0)),
        target_tokens=run.data.target_length,
    )
