"""Figures of a processor that was not measured: rates from its clock and flags, and others."""

from __future__ import annotations

from collections.abc import Mapping

from scalewise.units import TERA

EMULATED_BF16_RATE = 1 / 50
"""Rate of bf16 matmuls in torch without bf16 instructions, relative to fp32; measured on AVX2."""
BUILT_IN_CPU_FIGURES: Mapping[str, float] = {
    "launch_us": 4.0,
    "link_gb_per_s": 1.4,
    "link_latency_us": 190.0,
    "step_shortest": 0.4,
    "step_longest": 3.0,
}
"""Figures of a CPU that was not measured: time to dispatch an operator (``scalewise calibrate`` on
a Xeon at 2.3 GHz), gloo over loopback (experiments/records/cpu/collectives.json), and a wide
interval of step times."""
CORE_GB_PER_S = 64 * 10 / 80
"""Memory bandwidth of one core, in GB/s, by Little's law: 10 line fill buffers of 64 bytes at a
latency of 80 ns."""


def processor_tflops(info: Mapping[str, str], cores: int) -> dict[str, float]:
    """Theoretical peak rate of a processor by precision, in TFLOP/s; empty if unknown.

    The rate is cores x clock x FLOPs per cycle. The CPU flags give the FLOPs per cycle: FMA on two
    ports of 16 (AVX-512) or 8 (AVX2) fp32 lanes, bf16 dot products on twice as many lanes, 1024
    bf16 FLOPs with AMX tiles (Intel 64 and IA-32 Optimization Reference Manual, 2.5 and 20.3). The
    clock is the one that the kernel reports, so MFU on a CPU is accurate to an order of magnitude
    only. Without a bf16 kernel of oneDNN, bf16 runs at ``EMULATED_BF16_RATE`` of the fp32 rate.

    Args:
        info: Entries of one processor in /proc/cpuinfo.
        cores: Number of cores to use.
    """
    flags = set(info.get("flags", "").split())
    clock = float(info.get("cpu MHz", 0.0)) * 1e6
    fp32 = 64 if "avx512f" in flags else 32 if {"avx2", "fma"} <= flags else 0
    bf16 = 1024 if "amx_bf16" in flags else 2 * fp32 if "avx512_bf16" in flags else float(fp32)
    if not flags & {"avx512f", "avx_ne_convert"}:
        bf16 *= EMULATED_BF16_RATE
    if not fp32 or not clock:
        return {}
    per_flop = cores * clock / TERA
    return {"fp32_tflops": round(fp32 * per_flop, 3), "bf16_tflops": round(bf16 * per_flop, 6)}
