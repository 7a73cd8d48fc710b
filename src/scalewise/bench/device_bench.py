"""What one device reaches: products, attention, its memory, the start of an operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

from scalewise.units import GIGA, MICRO, TERA

if TYPE_CHECKING:
    import torch

LEAST_REPEATS = 5
CHAIN = 200
"""Operators that are started one after the other."""


@dataclass(frozen=True)
class MeasuredFigure:
    """A measured figure and how far its repeats lie apart: from 10 % to 90 %, over the median."""

    value: float
    spread: float


def matmul_rate(kind: str, device: torch.device, seconds: float) -> MeasuredFigure:
    """Returns the rate of a large square product in ``kind``, TFLOP/s."""
    import torch

    size = 8192 if device.type == "cuda" else 1024
    dtype = _dtype(kind)
    held = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        into = torch.empty_like(a)
        spent = _repeat_times(lambda: torch.mm(a, b, out=into), device, seconds)
    finally:
        torch.set_float32_matmul_precision(held)
    return _rate(spent, 2.0 * size**3 / TERA)


def attention_rate(kind: str, device: torch.device, seconds: float) -> MeasuredFigure:
    """Returns the rate of causal attention in ``kind``, TFLOP/s; what is masked is not counted."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    dtype = _dtype(kind)
    heads, tokens, width = (32, 4096, 128) if device.type == "cuda" else (8, 1024, 64)
    query, key, value = (
        torch.randn(1, heads, tokens, width, device=device).to(dtype) for _ in range(3)
    )
    spent = _repeat_times(
        lambda: scaled_dot_product_attention(query, key, value, is_causal=True), device, seconds
    )
    return _rate(spent, 2.0 * heads * tokens * tokens * width / TERA)


def memory_bandwidth(device: torch.device, seconds: float) -> MeasuredFigure:
    """Returns the rate at which a sum reads two arrays and writes one, GB/s."""
    import torch

    numbers = 1 << (28 if device.type == "cuda" else 24)
    a, b = (torch.zeros(numbers, device=device) for _ in range(2))
    into = torch.empty_like(a)
    spent = _repeat_times(lambda: torch.add(a, b, out=into), device, seconds)
    return _rate(spent, 3.0 * 4 * numbers / GIGA)


def host_link_bandwidth(device: torch.device, seconds: float) -> MeasuredFigure:
    """Returns the rate of copies from pinned memory of the host to the device, GB/s."""
    import torch

    there = torch.zeros(1 << 26, pin_memory=True)
    into = torch.empty_like(there, device=device)
    spent = _repeat_times(lambda: into.copy_(there, non_blocking=True), device, seconds)
    return _rate(spent, there.nbytes / GIGA)


def launch_latency(device: torch.device, seconds: float) -> MeasuredFigure:
    """Returns the time to start one small operator, forward or backward, microseconds."""
    import torch

    start = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        x = start
        for _ in range(CHAIN):
            x = x * 1.0
        x.backward()

    spent = _repeat_times(chain, device, seconds)
    return summarize([taken / (2 * CHAIN) / MICRO for taken in spent])


def _dtype(kind: str) -> torch.dtype:
    """Returns the format in which a kind of product is held; TF32 is a way to multiply fp32."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)


def _repeat_times(
    operation: Callable[[], object], device: torch.device, seconds: float
) -> list[float]:
    """Returns the seconds of each repeat, as many as fit into ``seconds``."""
    import torch

    spent: list[float] = []
    ends = float("inf")
    for number in range(-2, 10_000):
        before = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        if number < 0:  # warm
            ends = now + seconds
            continue
        spent.append(now - before)
        if now > ends and len(spent) >= LEAST_REPEATS:
            break
    return spent


def _rate(times: list[float], amount: float) -> MeasuredFigure:
    return summarize([amount / taken for taken in times])


def summarize(values: list[float]) -> MeasuredFigure:
    """Returns the figure of repeated values, two at the least."""
    tenths = quantiles(values, n=10)
    middle = median(values)
    return MeasuredFigure(middle, (tenths[-1] - tenths[0]) / middle)
