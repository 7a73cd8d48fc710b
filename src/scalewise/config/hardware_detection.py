"""What ``hardware=auto`` knows of the devices that are here: the figures of a profile."""

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

SIZE = re.compile(r"(\d+) ?GB\b")
"""How a driver tells two sizes of one device apart: ``A100-SXM4-40GB``."""


def detect_hardware(profile: Hardware) -> Hardware:
    """Returns ``auto`` with what a profile says of this machine's first CUDA device.

    It is the profile with the longest ``match`` that is a word of the device's name, and its memory
    is at most what that name says. What was set otherwise stays, and any other profile as it is.
    """
    machine = hardware.this_machine()
    if profile.device is not DeviceKind.auto or not machine.gpus:
        return profile
    device = machine.gpus[0]
    fitting = [
        (len(known["match"]), name, known)
        for name, known in _single_device_profiles().items()
        if re.search(rf"\b{re.escape(known['match'])}\b", device)
    ]
    _, name, known = max(fitting, default=(0, "", {}))
    if known and (said := SIZE.search(device)):
        known = known | {"memory_gib": min(known["memory_gib"], float(said[1]))}
    figures = known | {"host_memory_gib": round(machine.memory_bytes / GIB, 2)}
    usual = {entry.name: entry.default for entry in fields(Hardware)}
    taken = {key: figures[key] for key in figures if getattr(profile, key) == usual[key]}
    told = f"hardware={name} for {device}" if known else f"no profile for {device}"
    return replace(profile, **taken, read_off=f"{told}; host_memory_gib of this machine")


@cache
def _single_device_profiles() -> dict[str, dict[str, Any]]:
    """Returns the figures of the profiles that name a device and stand on no other, by name."""
    found = {}
    for name in paths.option_names("hardware", "device"):
        file = paths.project_root() / "conf" / "hardware" / f"{name}.yaml"
        told = yaml.safe_load(file.read_text("utf-8"))
        del told["defaults"]
        if "match" in told:
            typed: Any = OmegaConf.merge(OmegaConf.structured(schema_mirror(Hardware)), told)
            found[name] = {key: typed[key] for key in told}
    return found
