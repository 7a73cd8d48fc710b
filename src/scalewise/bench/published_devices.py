"""Hardware profiles of the devices of published measurements."""

from __future__ import annotations

import re
from dataclasses import dataclass

from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, Hardware


@dataclass(frozen=True)
class PublishedDevice:
    """Device of a published measurement."""

    memory: float
    """Memory, in GiB."""
    tflops: float
    """Peak bf16 compute rate, in TFLOP/s."""
    bandwidth: float
    """Memory bandwidth, in GB/s."""
    link: float
    """Bandwidth of the link between devices, in GB/s."""
    product_share: float = 0.8
    """Fraction of the peak compute rate that matmuls reach."""
    attention_share: float = 0.35
    """Fraction of the peak compute rate that attention reaches."""
    bandwidth_share: float = 1.0
    """Fraction of the memory bandwidth that kernels reach."""


HOPPER_SHARES = (0.67, 0.35, 0.8808)
"""Fractions of matmuls and of the bandwidth measured by ``bench gpu`` on an H100 SXM, which other
Hopper devices are taken to reach too; of attention, those of FlashAttention-2, torch's default."""
DEVICES = {
    "A100": PublishedDevice(80, 312, 2039, 300, 0.87, 0.6),
    "A100 40": PublishedDevice(40, 312, 1555, 300, 0.87, 0.6),
    "A800": PublishedDevice(80, 312, 2039, 200, 0.87, 0.6),
    "B200": PublishedDevice(180, 2250, 8000, 900),
    "GH200": PublishedDevice(96, 989.5, 4000, 450, *HOPPER_SHARES),
    "H100": PublishedDevice(80, 989.5, 3350, 450, *HOPPER_SHARES),
    "H100 96": PublishedDevice(95, 989.5, 2400, 450, *HOPPER_SHARES),
    "H200": PublishedDevice(139, 989.5, 4800, 450, *HOPPER_SHARES),
    "H800": PublishedDevice(80, 989.5, 3350, 200, *HOPPER_SHARES),
    "L4": PublishedDevice(24, 121, 300, 32),
    "L40S": PublishedDevice(48, 362, 864, 32),
    "A6000": PublishedDevice(48, 155, 768, 32),
    "A10G": PublishedDevice(24, 70, 600, 32),
    "3090": PublishedDevice(24, 71, 936, 32),
    "4090": PublishedDevice(24, 165.2, 1008, 32),
    "V100": PublishedDevice(32, 125, 900, 150),
    "V100 16": PublishedDevice(16, 125, 900, 150),
}
"""Devices by name, from vendors' datasheets; fractions of published kernels (Bekman,
Machine Learning Engineering, MAMF table; FlashAttention-2).

According to its report, torchtitan uses the H100 with 96 GB of HBM2e.
"""


def device_profile(name: str, devices_per_node: int) -> Hardware:
    """Hardware profile of a device.

    Raises:
        ConfigError: the device is unknown.
    """
    device = _find_device(name)
    if device is None:
        raise ConfigError.for_key(
            "gpu", name, "is an unknown device", f"choose one of {', '.join(DEVICES)}"
        )
    return Hardware(
        device=DeviceKind.cuda,
        memory_gib=device.memory,
        fp32_tflops=device.tflops / 16,  # NVIDIA GPUs since Ampere, without tensor cores
        tf32_tflops=device.tflops / 2,
        bf16_tflops=device.tflops,
        fp16_tflops=device.tflops,
        memory_gb_per_s=device.bandwidth,
        link_gb_per_s=device.link,
        link_latency_us=4.0,
        devices_per_node=devices_per_node,
        node_link_gb_per_s=device.link / 9,
        node_link_latency_us=8.0,
        context_gib=1.0,
        product_share=device.product_share,
        attention_share=device.attention_share,
        bandwidth_share=device.bandwidth_share,
        launch_us=6.0,
    )


def _find_device(name: str) -> PublishedDevice | None:
    """Find the device of a name such as ``NVIDIA H100 80GB HBM3`` or ``h100-sxm``."""
    parts = re.findall(r"[a-z]*\d+[a-z]*", name.lower())
    sizes = [part.removesuffix("gb").removesuffix("g") for part in parts[1:]]
    for model in sorted(DEVICES, key=len, reverse=True):
        kind, _, size = model.lower().partition(" ")
        matches = any(kind in (part, part.removeprefix("rtx")) for part in parts)
        if matches and (not size or size in sizes):
            return DEVICES[model]
    return None
