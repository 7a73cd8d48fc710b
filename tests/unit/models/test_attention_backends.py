"""Attention by segments compared with a dense mask, and the choice of the backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from scalewise.compat import torch as compat_torch
from scalewise.models import attention_backends, varlen_cpu
from scalewise.models.attention_backends import attend
from scalewise.models.attention_kernels import (
    AttentionBackend,
    AttentionKernel,
    causal_rate_share,
    choose_backend,
)
from scalewise.models.attention_segments import AttentionSegments, equal_segments, packed_segments

EXACT = {"rtol": 1e-5, "atol": 1e-5}
CPU = torch.device("cpu")
HEADS, HEAD_SIZE = 4, 8
PACKED = (5, 1, 10, 16, 2, 14)
"""Lengths of the texts of three sequences of 16 tokens."""
KERNELS = (AttentionKernel.varlen_cpu, AttentionKernel.segments)


def dense_mask(segments: AttentionSegments) -> Tensor:
    """Visible keys of each query: all queries x all keys."""
    blocks, shared = [], []
    for queries, keys in zip(segments.query_lengths, segments.key_lengths, strict=True):
        shared.append((sum(map(len, blocks)), sum(x.shape[1] for x in blocks), keys))
        if queries:
            shared.pop()
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        visible = distance >= 0
        blocks.append(visible & (distance < segments.window) if segments.window else visible)
    visible = torch.block_diag(*blocks).bool()
    ends = [*(first_query for first_query, *_ in shared[1:]), len(visible)]
    for (first_query, first_key, keys), end in zip(shared, ends, strict=False):
        visible[first_query:end, first_key : first_key + keys] = True
    return visible


def draw(tokens: int, heads: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, tokens, heads, HEAD_SIZE)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def inputs(segments: AttentionSegments, key_heads: int) -> list[Tensor]:
    keys = sum(segments.key_lengths)
    return [
        draw(sum(segments.query_lengths), HEADS, 0),
        draw(keys, key_heads, 1),
        draw(keys, key_heads, 2),
    ]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attention with a mask, written without ``scaled_dot_product_attention``."""
    key, value = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("bthd,bshd->bhts", query, key) / HEAD_SIZE**0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, value)


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Output, and the gradients of the tensors for a fixed output gradient."""
    output = function(*tensors)
    cotangent = torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view_as(output)
    return [output.detach(), *torch.autograd.grad(output, tensors, cotangent)]


def use(monkeypatch: pytest.MonkeyPatch, kernel: AttentionKernel) -> None:
    """Compute with a kernel, whatever the device."""

    def choose(*args: Any, **kwargs: Any) -> AttentionBackend:
        return replace(choose_backend(*args, **kwargs), kernel=kernel)

    monkeypatch.setattr(attention_backends, "choose_backend", choose)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 40])
@pytest.mark.parametrize("prefix", [0, 3, 9])
@pytest.mark.parametrize("lengths", [PACKED, (16, 16)], ids=["packed", "whole"])
def test_segments_equal_dense_mask(
    kernel: AttentionKernel,
    key_heads: int,
    window: int | None,
    prefix: int,
    lengths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, kernel)
    segments = AttentionSegments.from_lengths(lengths, (prefix + n for n in lengths), CPU, window)
    tensors, visible = inputs(segments, key_heads), dense_mask(segments)
    found = with_gradients(lambda *qkv: attend(*qkv, segments), tensors)
    expected = with_gradients(lambda *qkv: dense_attention(*qkv, visible), tensors)
    for name, actual, wanted in zip(
        ("output", "query", "key", "value"), found, expected, strict=True
    ):
        torch.testing.assert_close(actual, wanted, **EXACT, msg=lambda text, n=name: f"{n}: {text}")


SHARED_PREFIX = ((0, 5, 1, 10, 0, 16, 0, 2, 14), (3, 5, 1, 10, 3, 16, 3, 2, 14))


@pytest.mark.parametrize(
    ("kernel", "window"), [*((kernel, None) for kernel in KERNELS), (KERNELS[0], 3)]
)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_shared_prefix_equals_dense_mask(
    kernel: AttentionKernel, window: int | None, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, kernel)
    segments = AttentionSegments.from_lengths(*SHARED_PREFIX, CPU, window)
    tensors, visible = inputs(segments, key_heads), dense_mask(segments)
    assert visible.sum(1)[:4].tolist() == [4, 5, 6, 6 if window else 7]
    found = with_gradients(lambda *qkv: attend(*qkv, segments), tensors)
    expected = with_gradients(lambda *qkv: dense_attention(*qkv, visible), tensors)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **EXACT)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_query_shards_equal_dense_mask(
    kernel: AttentionKernel, window: int | None, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, kernel)
    segments = AttentionSegments.from_lengths(PACKED, PACKED, CPU, window)
    tensors, visible = inputs(segments, 2), dense_mask(segments)

    def attend_shards(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        for row, shard in product(range(3), range(shards)):
            first = row * 16 + shard * 16 // shards
            chunk, keys = segments.slice_queries(first, last := first + 16 // shards)
            assert row * 16 <= keys.start
            assert keys.stop == last
            outputs.append(attend(query[:, first:last], key[:, keys], value[:, keys], chunk))
        return torch.cat(outputs, 1)

    found = with_gradients(attend_shards, tensors)
    expected = with_gradients(lambda *qkv: dense_attention(*qkv, visible), tensors)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **EXACT)


def test_windows_of_query_shards_pass_gradient_check() -> None:
    tensors = [draw(6, 2, 0, torch.double), *(draw(11, 1, seed, torch.double) for seed in (1, 2))]
    segments = AttentionSegments.from_lengths((2, 4), (5, 6), CPU, 3)
    torch.autograd.gradcheck(lambda *qkv: attend(*qkv, segments), tensors)


def test_attention_without_segments_is_causal_within_each_sequence() -> None:
    tensors = [x.view(2, 16, -1, HEAD_SIZE) for x in inputs(equal_segments(2, 16, 16, CPU), 2)]
    visible = torch.ones(16, 16, dtype=torch.bool).tril()
    torch.testing.assert_close(attend(*tensors), dense_attention(*tensors, visible), **EXACT)


def test_cpu_operator_has_a_consistent_schema_and_fake() -> None:
    segments = AttentionSegments.from_lengths(PACKED, PACKED, CPU)
    flat = [x.detach()[0].requires_grad_() for x in inputs(segments, 2)]
    arguments = (*flat, segments.cu_seq_q, segments.cu_seq_k, None)
    assert segments.cu_seq_q.tolist() == [0, 5, 6, 16, 32, 34, 48, 48, 48]
    torch.library.opcheck(varlen_cpu.varlen_attention_cpu, arguments)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    "segments",
    [
        AttentionSegments.from_lengths((900, 1100, 48), (900, 1100, 48), CPU),
        equal_segments(1, 2048, 2058, CPU),
        equal_segments(1, 1024, 2048, CPU),
    ],
    ids=["packed", "prefix", "context shard"],
)
def test_memory_is_linear_in_tokens(segments: AttentionSegments, window: int | None) -> None:
    segments = replace(segments, window=window)
    tensors = inputs(segments, 2)
    compat_torch.start_allocation_profiler()
    with_gradients(lambda *qkv: attend(*qkv, segments), tensors)
    events = [*compat_torch.iter_allocations(compat_torch.stop_allocation_profiler())]
    largest = max(size for *_, size in events)
    assert largest < 12 * max(tensor.nbytes for tensor in tensors) < 2048**2


HALF = (torch.bfloat16, torch.float16)
CASES = [
    *(("cuda", dtype, {}, AttentionKernel.causal, False) for dtype in (*HALF, torch.float32)),
    *(("cuda", dtype, {"key_heads": 2}, AttentionKernel.causal, False) for dtype in HALF),
    ("cuda", torch.float32, {"key_heads": 2}, AttentionKernel.causal, True),
    ("cuda", torch.bfloat16, {"key_heads": 2, "head_size": 320}, AttentionKernel.causal, True),
    ("cuda", torch.float16, {"key_heads": 2, "has_flash": False}, AttentionKernel.causal, True),
    ("cpu", torch.float32, {"key_heads": 2}, AttentionKernel.causal, False),
    ("cuda", torch.bfloat16, {"key_heads": 2, "has_segments": True}, AttentionKernel.varlen, False),
    (
        "cuda",
        torch.bfloat16,
        {"key_heads": 2, "has_segments": True, "dropout": 0.1},
        AttentionKernel.segments,
        True,
    ),
    (
        "cuda",
        torch.bfloat16,
        {"has_segments": True, "head_size": 12},
        AttentionKernel.segments,
        False,
    ),
    (
        "cuda",
        torch.float16,
        {"has_segments": True, "has_flash": False},
        AttentionKernel.segments,
        False,
    ),
    (
        "cuda",
        torch.float32,
        {"key_heads": 2, "has_segments": True},
        AttentionKernel.segments,
        True,
    ),
    ("cpu", torch.bfloat16, {"has_segments": True}, AttentionKernel.varlen_cpu, False),
    ("meta", torch.bfloat16, {"has_segments": True}, AttentionKernel.varlen_cpu, False),
    ("cpu", torch.float32, {"has_segments": True, "dropout": 0.1}, AttentionKernel.segments, False),
]


@pytest.mark.parametrize(("device", "dtype", "options", "kernel", "expands_keys"), CASES)
def test_backend_of_each_device_and_dtype(
    device: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    kernel: AttentionKernel,
    expands_keys: bool,
) -> None:
    found = choose_backend(
        device, dtype.itemsize, **{"heads": HEADS, "key_heads": HEADS, "head_size": 64} | options
    )
    assert found == AttentionBackend(kernel, expands_keys)


class RecordKeyHeads(compat_torch.TorchDispatchMode):
    """Record the number of key heads of each attention operator."""

    def __init__(self) -> None:
        super().__init__()
        self.key_heads: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in compat_torch.ATTENTION_OPS:
            self.key_heads.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
def test_expanded_keys_reach_the_kernel(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = AttentionSegments.from_lengths((9, 7), (9, 7), CPU) if packed else None
    kernel = AttentionKernel.segments if packed else AttentionKernel.causal
    backend = AttentionBackend(kernel, expands_keys=True)
    monkeypatch.setattr(attention_backends, "choose_backend", lambda *_, **__: backend)
    tensors = inputs(equal_segments(1, 16, 16, CPU), 2)
    with RecordKeyHeads() as recorded:
        found = with_gradients(lambda *qkv: attend(*qkv, segments), tensors)
    assert recorded.key_heads == [HEADS] * (2 if packed else 1)
    monkeypatch.undo()
    expected = with_gradients(lambda *qkv: attend(*qkv, segments), tensors)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **EXACT)


@pytest.mark.parametrize("window", [None, 4])
def test_varlen_kernel_gets_cumulative_lengths_and_window(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import varlen

    calls: list[tuple[Any, ...]] = []

    def record(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((*[x.dtype for x in args[:3]], *[x.tolist() for x in args[3:5]], *args[5:]))
        assert kwargs == {"window_size": (-1 if window is None else 3, 0), "enable_gqa": True}
        return torch.zeros_like(args[0])

    monkeypatch.setattr(varlen, "varlen_attn", record)
    use(monkeypatch, AttentionKernel.varlen)
    segments = AttentionSegments.from_lengths((3, 6), (5, 8), CPU, window)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*inputs(segments, 2), segments).shape == (1, 9, HEADS, HEAD_SIZE)
    assert calls == [(*[torch.bfloat16] * 3, [0, 3, 9], [0, 5, 13], 8, 8)]


def test_packed_segments_are_the_texts_of_each_sequence() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    segments = packed_segments(positions, CPU)
    assert segments.query_lengths == segments.key_lengths == (3, 2, 1, 4)
    assert segments.cu_seq_q.tolist() == segments.cu_seq_k.tolist() == [0, 3, 5, 6, 10]
    assert segments.cu_seq_q.dtype is segments.cu_seq_k.dtype is torch.int32
    assert (segments.max_q, segments.max_k, segments.window) == (4, 4, None)
    assert not segments.shares_prefix


def test_number_of_segments_and_maxima_are_powers_of_two() -> None:
    segments = AttentionSegments.from_lengths((3, 2, 5), (3, 2, 9), CPU)
    assert segments.cu_seq_q.tolist() == [0, 3, 5, 10, 10]
    assert segments.cu_seq_k.tolist() == [0, 3, 5, 14, 14]
    assert (segments.max_q, segments.max_k) == (8, 16)


def test_packed_segments_share_the_prefix_of_each_sequence() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    segments = packed_segments(positions, CPU, prefix_tokens=2)
    assert segments.query_lengths == (0, 3, 2, 0, 1, 4)
    assert segments.key_lengths == (2, 3, 2, 2, 1, 4)
    assert segments.shares_prefix
    repeated, (keys,) = segments.repeat_prefix(torch.arange(14)[:, None, None])
    assert repeated.query_lengths == (3, 2, 1, 4)
    assert repeated.key_lengths == (5, 4, 3, 6)
    assert keys.flatten().tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 7, 8, 10, 11, 12, 13]


def test_tensors_without_values_have_one_text_per_sequence() -> None:
    with compat_torch.FakeTensorMode():
        fake = packed_segments(torch.zeros(3, 5, dtype=torch.long), CPU)
    meta = packed_segments(torch.zeros(3, 5, dtype=torch.long, device="meta"), CPU)
    assert fake.query_lengths == meta.query_lengths == (5, 5, 5)


def test_equal_segments_equal_those_of_their_lengths() -> None:
    found = equal_segments(4, 4, 7, CPU)
    expected = AttentionSegments.from_lengths([4] * 4, [7] * 4, CPU)
    assert torch.equal(found.cu_seq_q, expected.cu_seq_q)
    assert torch.equal(found.cu_seq_k, expected.cu_seq_k)
    assert (found.query_lengths, found.key_lengths) == ((4,) * 4, (7,) * 4)


def test_new_texts_do_not_recompile() -> None:
    compilations: list[int] = []

    def count(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compilations.append(1)
        return module.forward

    compiled = torch.compile(attend, backend=count, fullgraph=True, dynamic=False)
    for texts in range(17, 33):
        lengths = [*[1] * (texts - 1), 49 - texts]
        segments = AttentionSegments.from_lengths(lengths, lengths, CPU)
        tensors = inputs(segments, 2)
        torch.testing.assert_close(compiled(*tensors, segments), attend(*tensors, segments))
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("keys", "tflops"),
    [(512, 191), (1024, 260), (2048, 298), (4096, 319), (8192, 333), (16384, 335)],
)
def test_causal_rate_share_follows_published_rates(keys: int, tflops: float) -> None:
    """FlashAttention-2 on an H100, head size 128 (FlashAttention-3, 2024, figure 5)."""
    assert causal_rate_share(keys, 128) == pytest.approx(tflops / 319, rel=0.05)
    assert causal_rate_share(keys, 64) == pytest.approx(0.88 * causal_rate_share(keys, 128))
