"""Hardware profiles of the devices of published measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scalewise.bench.published_frameworks import FrameworkFacts
from scalewise.errors import ConfigError
from scalewise.hardware import Hardware


@dataclass(frozen=True)
class PublishedDevice:
    """Device of published measurements, as a profile in ``conf/hardware``."""

    profile: str
    """Name of the profile."""
    node_link_gb_per_s: float
    """Bandwidth from one device to another node in the usual nodes with it, in GB/s."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Figures in which the device differs from the profile."""
    flash_attention_share: float | None = None
    """Fraction of the peak rate that FlashAttention-2 reaches; None: that of the profile."""


NIC_400, NIC_200, NIC_100 = 48.0, 24.0, 12.0
"""Sustained bandwidth of network ports with 400, 200 and 100 Gb/s, in GB/s: 12 GB/s per 100 Gb/s
(NCCL, src/graph/topo.h)."""
FLASH_2 = 0.32
"""FlashAttention-2 on Hopper, the default of torch: 319 of 989.5 TFLOP/s at 4096 tokens with a
causal mask (Shah et al., 2024, FlashAttention-3, figure 5). The profiles have cuDNN's rate."""
DEVICES = {
    "A100": PublishedDevice("a100_80g", NIC_200),
    "A100 40": PublishedDevice("a100_40g", NIC_200),
    "A800": PublishedDevice("a100_80g", NIC_200, {"link_gb_per_s": 8 * 20.0}),
    "B200": PublishedDevice("b200", NIC_400),
    "GB200": PublishedDevice("gb200", NIC_400),
    "GH200": PublishedDevice("gh200", NIC_400, {}, FLASH_2),
    "H100": PublishedDevice("h100", NIC_400, {}, FLASH_2),
    "H100 96": PublishedDevice(
        "h100", NIC_400, {"memory_gib": 95, "memory_gb_per_s": 2400}, FLASH_2
    ),
    "H200": PublishedDevice("h200", NIC_400, {}, FLASH_2),
    "H800": PublishedDevice("h100", NIC_400, {"link_gb_per_s": 8 * 20.6}, FLASH_2),
    "MI300X": PublishedDevice("mi300x", NIC_400),
    "A10": PublishedDevice("a10", NIC_100 / 8),
    "A10G": PublishedDevice("a10g", NIC_100 / 8),
    "A6000": PublishedDevice("a6000", NIC_100 / 8),
    "L4": PublishedDevice("l4", NIC_100 / 8),
    "L40S": PublishedDevice("l40s", NIC_100 / 8),
    "T4": PublishedDevice("t4", NIC_100 / 8),
    "3090": PublishedDevice("rtx3090", NIC_100 / 8),
    "4090": PublishedDevice("rtx4090", NIC_100 / 8),
    "5090": PublishedDevice("rtx5090", NIC_100 / 8),
    "V100": PublishedDevice("v100", NIC_100 / 2),
    "V100 16": PublishedDevice("v100", NIC_100 / 2, {"memory_gib": 16}),
}
"""Devices by name. Nodes: NVIDIA's DGX user guides (one port per device since the A100, four ports
for the eight devices of a DGX-1), else one port with 100 Gb/s for eight devices.

The H100 with 96 GB is that of torchtitan's report, with HBM2e. The A800 and the H800 have eight
NVLinks.
"""
PROFILES = tuple(dict.fromkeys(device.profile for device in DEVICES.values()))
"""Names of the profiles."""
BOARD_WATTS = 700
"""Power limit of an H100 SXM, in watts."""
POWER_EXPONENT = 0.45
"""Exponent of the power limit in the matmul rate.

The best matmul of an H100 SXM (700 W, 132 multiprocessors) reaches 792 TFLOP/s, that of an H100
PCIe (350 W, 114) 499.5 TFLOP/s (github.com/mag-/gpu_benchmark): for each multiprocessor, 0.73 at
half the power.
"""


def device_profile(name: str, facts: FrameworkFacts, profiles: Mapping[str, Hardware]) -> Hardware:
    """Hardware profile of a device in the cluster of a framework, without a step scale.

    Args:
        name: Name of the device, such as ``NVIDIA H100 80GB HBM3`` or ``H100-96GB-500W``.
        facts: Properties of the framework: its nodes and its attention kernel.
        profiles: Profiles by name.

    Raises:
        ConfigError: the device is unknown.
    """
    device = _find_device(name)
    if device is None:
        raise ConfigError.for_key(
            "gpu", name, "is an unknown device", f"choose one of {', '.join(DEVICES)}"
        )
    profile = replace(profiles[device.profile], **device.changes)
    if limit := re.search(r"\b(\d+)W\b", name):
        share = (int(limit[1]) / BOARD_WATTS) ** POWER_EXPONENT
        profile = replace(profile, product_share=profile.product_share * share)
    attention_share = profile.attention_share
    if not facts.uses_cudnn_attention:
        attention_share = facts.attention_speed * (device.flash_attention_share or attention_share)
    return replace(
        profile,
        attention_share=attention_share,
        devices_per_node=facts.devices_per_node,
        node_link_gb_per_s=facts.node_link_gb_per_s or device.node_link_gb_per_s,
        node_link_latency_us=8.0,
        step_scale=1.0,
    )


def _find_device(name: str) -> PublishedDevice | None:
    """Find the device of a name."""
    parts = re.findall(r"[a-z]*\d+[a-z]*", name.lower())
    sizes = [part.removesuffix("gb").removesuffix("g") for part in parts[1:]]
    for model in sorted(DEVICES, key=len, reverse=True):
        kind, _, size = model.lower().partition(" ")
        matches = any(kind in (part, part.removeprefix("rtx")) for part in parts)
        if matches and (not size or size in sizes):
            return DEVICES[model]
    return None
