"""Attention in the operator graph of the decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.op_graph import ForwardSpec, ModelOpGraphs, OpWork, build_op_graphs

MODEL = DecoderConfig(vocabulary=96, context=64, width=32, layers=3, heads=4, feedforward=48)
GQA = replace(MODEL, kv_heads=1)
TOKENS, HEAD_BYTES = 2 * 48, 8 * 4


def forward_spec(**options: Any) -> ForwardSpec:
    default: dict[str, Any] = {
        "sequences": 2,
        "tokens_per_sequence": 48,
        "residual_element_bytes": 4,
        "compute_element_bytes": 4,
        "gradient_element_bytes": 4,
        "autocast": False,
        "on_cpu": False,
    }
    return ForwardSpec(**default | options)


def attention_reads(graphs: ModelOpGraphs) -> list[int]:
    """Bytes of queries, keys and values that the attention operator reads and saves."""
    (op,) = (op for op in graphs.block.operators if op.work is OpWork.attention)
    assert set(op.reads) <= set(op.saved)
    return [graphs.block.sizes[tensor] for tensor in op.reads]


@pytest.mark.parametrize(
    ("options", "key_heads"),
    [
        ({}, 4),
        ({"sequence_packing": True}, 4),
        ({"compute_element_bytes": 2}, 1),
        ({"compute_element_bytes": 2, "sequence_packing": True}, 1),
        ({"on_cpu": True}, 1),
        ({"on_cpu": True, "sequence_packing": True}, 1),
    ],
)
def test_keys_are_expanded_where_flash_attention_does_not_run(
    options: dict[str, Any], key_heads: int
) -> None:
    spec = forward_spec(**options)
    head_bytes = TOKENS * 8 * spec.compute_element_bytes
    expected = [4 * head_bytes, key_heads * head_bytes, key_heads * head_bytes]
    assert attention_reads(build_op_graphs(GQA, spec)) == expected


@pytest.mark.parametrize("on_cpu", [False, True])
def test_packed_sequences_need_no_mask(on_cpu: bool) -> None:
    plain, packed = (
        build_op_graphs(MODEL, forward_spec(on_cpu=on_cpu, sequence_packing=packing))
        for packing in (False, True)
    )
    rope_bytes = 2 * 48 * HEAD_BYTES
    assert (plain.shared_bytes, packed.shared_bytes) == (rope_bytes, 2 * rope_bytes)
    assert attention_reads(packed) == attention_reads(plain)
    for one, other in zip(plain.block.operators, packed.block.operators, strict=False):
        if one.work is OpWork.attention:
            assert (one.flops, one.backward_flops) == (other.flops, other.backward_flops)


def test_prefix_needs_no_mask_and_its_scores_are_not_halved() -> None:
    plain, prefix = (
        build_op_graphs(MODEL, forward_spec(on_cpu=True, prefix_tokens=tokens)) for tokens in (0, 6)
    )
    assert prefix.shared_bytes == plain.shared_bytes
    flops = {
        tokens: next(op.flops for op in graphs.block.operators if op.work is OpWork.attention)
        for tokens, graphs in ((0, plain), (6, prefix))
    }
    assert flops[6] - flops[0] == 4 * TOKENS * 6 * MODEL.query_width
