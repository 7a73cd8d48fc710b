"""Soft-capped attention in tiles compared with a dense mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scalewise.measure.allocated_bytes import LiveBytes
from scalewise.models import attention_kernels
from scalewise.models.attention_backends import attend
from scalewise.models.attention_segments import AttentionSegments, packed_segments

CPU = torch.device("cpu")
HEADS, HEAD_SIZE, SOFTCAP = 4, 8, 0.7
PACKED = (5, 1, 10, 16, 2, 14)
"""Lengths of the texts of three sequences of 16 tokens."""


@pytest.fixture(params=[4, 5, 256])
def tile_queries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Queries of a tile: several tiles per text, with and without a part of one, or one."""
    monkeypatch.setattr(attention_kernels, "SOFTCAP_QUERIES", request.param)
    return int(request.param)


def draw(tokens: int, heads: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, tokens, heads, HEAD_SIZE)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def dense_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("bthd,bshd->bhts", query, key) / HEAD_SIZE**0.5
    scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, value)


def visible_keys(segments: AttentionSegments, window: int | None) -> Tensor:
    """Visible keys of each query: all queries x all keys."""
    blocks = []
    for queries, keys in zip(segments.query_lengths, segments.key_lengths, strict=True):
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        visible = distance >= 0
        blocks.append(visible & (distance < window) if window else visible)
    return torch.block_diag(*blocks).bool()


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Output, and the gradients of the tensors for a fixed output gradient."""
    output = function(*tensors)
    cotangent = torch.sin(torch.arange(output.numel(), dtype=torch.double)).view_as(output)
    return [output.detach(), *torch.autograd.grad(output, tensors, cotangent.to(output.dtype))]


@pytest.mark.usefixtures("tile_queries")
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 40])
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("lengths", [PACKED, (16, 16)], ids=["packed", "whole"])
def test_softcapped_segments_equal_dense_mask(
    lengths: tuple[int, ...], prefix: int, window: int | None, key_heads: int
) -> None:
    keys = [prefix + length for length in lengths]
    segments = AttentionSegments.from_lengths(lengths, keys, CPU)
    tensors = [
        draw(sum(lengths), HEADS, 0),
        *(draw(sum(keys), key_heads, seed) for seed in (1, 2)),
    ]
    visible = visible_keys(segments, window)
    found = with_gradients(
        lambda *qkv: attend(*qkv, segments, window=window, softcap=SOFTCAP), tensors
    )
    expected = with_gradients(lambda *qkv: dense_attention(*qkv, visible), tensors)
    for name, actual, wanted in zip(
        ("output", "query", "key", "value"), found, expected, strict=True
    ):
        torch.testing.assert_close(
            actual, wanted, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.usefixtures("tile_queries")
@pytest.mark.parametrize("window", [None, 6])
def test_softcapped_sequences_equal_segments_with_a_window(window: int | None) -> None:
    tensors = [
        draw(32, heads, seed).detach().view(2, 16, heads, -1)
        for heads, seed in ((HEADS, 0), (2, 1), (2, 2))
    ]
    segments = AttentionSegments.from_lengths((16, 16), (16, 16), CPU, window)
    expected = attend(*tensors, segments, softcap=SOFTCAP)
    torch.testing.assert_close(attend(*tensors, window=window, softcap=SOFTCAP), expected)


@pytest.mark.usefixtures("tile_queries")
def test_softcapped_texts_see_the_shared_prefix() -> None:
    positions = torch.arange(6).repeat(2)[None]
    segments = packed_segments(positions, CPU, prefix_tokens=3)
    query, key, value = draw(12, HEADS, 0), draw(15, 2, 1), draw(15, 2, 2)
    actual = attend(query, key, value, segments, softcap=SOFTCAP)
    visible = torch.ones(12, 15, dtype=torch.bool).tril(3)
    visible[6:, 3:9] = False  # the other text
    torch.testing.assert_close(actual, dense_attention(query, key, value, visible))


@pytest.mark.usefixtures("tile_queries")
def test_softcapped_attention_passes_gradient_check() -> None:
    tensors = [draw(6, 2, 0, torch.double), *(draw(11, 1, seed, torch.double) for seed in (1, 2))]
    segments = AttentionSegments.from_lengths((2, 4), (5, 6), CPU, 3)
    torch.autograd.gradcheck(lambda *qkv: attend(*qkv, segments, softcap=SOFTCAP), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softcapped_attention_in_half_precision_is_near_fp32(dtype: torch.dtype) -> None:
    tensors = [draw(48, HEADS, 0), draw(48, 2, 1), draw(48, 2, 2)]
    low = [x.detach().to(dtype).requires_grad_() for x in tensors]
    found = with_gradients(lambda *qkv: attend(*qkv, softcap=SOFTCAP), low)
    expected = with_gradients(lambda *qkv: attend(*qkv, softcap=SOFTCAP), tensors)
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype is dtype
        torch.testing.assert_close(actual.float(), wanted, rtol=0.05, atol=0.05)


def test_scores_of_one_tile_exist_at_a_time() -> None:
    """Twice the tokens need twice the memory, and not four times."""
    peaks = []
    for tokens in (1024, 2048):
        tensors = [draw(tokens, HEADS, 0), draw(tokens, 1, 1), draw(tokens, 1, 2)]
        with LiveBytes() as live_bytes:
            with_gradients(lambda *qkv: attend(*qkv, softcap=SOFTCAP), tensors)
            peaks.append(live_bytes.take_peak())
    assert peaks[1] < 2.05 * peaks[0]
