"""Rates of one device: matmuls, attention, memory bandwidth and launch latency."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

from scalewise.units import GIGA, MICRO, TERA

if TYPE_CHECKING:
    import torch

MIN_REPEATS = 5
CHAIN_LENGTH = 200
"""Number of operators that are launched in sequence."""


@dataclass(frozen=True)
class MeasuredFigure:
    """Median of repeated measurements, and their spread."""

    value: float
    """Median."""
    spread: float
    """Difference of the 90th and the 10th percentile, relative to the median."""


def matmul_rate(kind: str, device: torch.device, seconds: float) -> MeasuredFigure:
    """Rate of a large square matmul in format ``kind``, in TFLOP/s."""
    import torch

    size = 8192 if device.type == "cuda" else 1024
    dtype = _dtype(kind)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        output = torch.empty_like(a)
        times = _repeat_times(lambda: torch.mm(a, b, out=output), device, seconds)
    finally:
        torch.set_float32_matmul_precision(precision)
    return _rate(times, 2.0 * size**3 / TERA)


def attention_rate(kind: str, device: torch.device, seconds: float) -> MeasuredFigure:
    """Rate of causal attention in format ``kind``, in TFLOP/s without masked positions."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    dtype = _dtype(kind)
    heads, tokens, width = (32, 4096, 128) if device.type == "cuda" else (8, 1024, 64)
    query, key, value = (
        torch.randn(1, heads, tokens, width, device=device).to(dtype) for _ in range(3)
    )
    times = _repeat_times(
        lambda: scaled_dot_product_attention(query, key, value, is_causal=True), device, seconds
    )
    return _rate(times, 2.0 * heads * tokens * tokens * width / TERA)


def memory_bandwidth(device: torch.device, seconds: float) -> MeasuredFigure:
    """Memory bandwidth of an addition, which reads two tensors and writes one, in GB/s."""
    import torch

    numel = 1 << (28 if device.type == "cuda" else 24)
    a, b = (torch.zeros(numel, device=device) for _ in range(2))
    output = torch.empty_like(a)
    times = _repeat_times(lambda: torch.add(a, b, out=output), device, seconds)
    return _rate(times, 3.0 * 4 * numel / GIGA)


def host_link_bandwidth(device: torch.device, seconds: float) -> MeasuredFigure:
    """Bandwidth of copies from pinned host memory to the device, in GB/s."""
    import torch

    source = torch.zeros(1 << 26, pin_memory=True)
    target = torch.empty_like(source, device=device)
    times = _repeat_times(lambda: target.copy_(source, non_blocking=True), device, seconds)
    return _rate(times, source.nbytes / GIGA)


def launch_latency(device: torch.device, seconds: float) -> MeasuredFigure:
    """Launch time of one small operator, averaged over forward and backward, in microseconds."""
    import torch

    start = torch.ones(1, device=device, requires_grad=True)

    def run_chain() -> None:
        x = start
        for _ in range(CHAIN_LENGTH):
            x = x * 1.0
        x.backward()

    times = _repeat_times(run_chain, device, seconds)
    return summarize([time_s / (2 * CHAIN_LENGTH) / MICRO for time_s in times])


def _dtype(kind: str) -> torch.dtype:
    """Data type of the operands of a format; TF32 matmuls have fp32 operands."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)


def _repeat_times(
    operation: Callable[[], object], device: torch.device, seconds: float
) -> list[float]:
    """Repeat an operation for ``seconds``; return the time of each repeat."""
    import torch

    times: list[float] = []
    deadline = float("inf")
    for index in range(-2, 10_000):
        start = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        if index < 0:  # warm-up
            deadline = now + seconds
            continue
        times.append(now - start)
        if now > deadline and len(times) >= MIN_REPEATS:
            break
    return times


def _rate(times: list[float], amount: float) -> MeasuredFigure:
    return summarize([amount / time_s for time_s in times])


def summarize(values: list[float]) -> MeasuredFigure:
    """Median and spread of repeated measurements, at least two."""
    deciles = quantiles(values, n=10)
    center = median(values)
    return MeasuredFigure(center, (deciles[-1] - deciles[0]) / center)
