"""Hardware detection: fills ``hardware=auto`` from the profile of the present device."""

import re
from dataclasses import fields, replace
from functools import cache
from typing import Any

import yaml
from omegaconf import OmegaConf

from scalewise import hardware
from scalewise.config import paths
from scalewise.config.schemas import schema_mirror
from scalewise.hardware import DeviceKind, Hardware
from scalewise.units import GIB

MEMORY_SIZE_PATTERN = re.compile(r"(\d+) ?GB\b")
"""Memory size within a device name: ``A100-SXM4-40GB``."""


def detect_hardware(profile: Hardware) -> Hardware:
    """Fill ``hardware=auto`` with the figures of this machine's first CUDA device.

    The figures come from the profile with the longest ``match`` that is a word of the device name.
    A memory size in the device name limits the memory. Values that were set by overrides stay.
    Other profiles are returned unchanged.
    """
    machine = hardware.this_machine()
    if profile.device is not DeviceKind.auto or not machine.gpus:
        return profile
    device = machine.gpus[0]
    matching = [
        (len(profile_figures["match"]), name, profile_figures)
        for name, profile_figures in _single_device_profiles().items()
        if re.search(rf"\b{re.escape(profile_figures['match'])}\b", device)
    ]
    _, name, profile_figures = max(matching, default=(0, "", {}))
    if profile_figures and (size := MEMORY_SIZE_PATTERN.search(device)):
        profile_figures = profile_figures | {
            "memory_gib": min(profile_figures["memory_gib"], float(size[1]))
        }
    figures = profile_figures | {"host_memory_gib": round(machine.memory_bytes / GIB, 2)}
    defaults = {entry.name: entry.default for entry in fields(Hardware)}
    unset = {key: figures[key] for key in figures if getattr(profile, key) == defaults[key]}
    source = f"hardware={name} for {device}" if profile_figures else f"no profile for {device}"
    return replace(profile, **unset, read_off=f"{source}; host_memory_gib of this machine")


@cache
def _single_device_profiles() -> dict[str, dict[str, Any]]:
    """Figures of the profiles with a ``match`` that extend no other profile, by name."""
    profiles = {}
    for name in paths.option_names("hardware", "device"):
        file = paths.project_root() / "conf" / "hardware" / f"{name}.yaml"
        content = yaml.safe_load(file.read_text("utf-8"))
        del content["defaults"]
        if "match" in content:
            typed: Any = OmegaConf.merge(OmegaConf.structured(schema_mirror(Hardware)), content)
            profiles[name] = {key: typed[key] for key in content}
    return profiles
