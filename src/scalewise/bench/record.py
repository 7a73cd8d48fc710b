"""Records of benchmark results with command, date, machine, versions and commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, Hardware
from scalewise.launch.status import git_state, machine_facts, versions
from scalewise.run_files import write_json

RECORDS = Path("experiments", "records")


def build_record(result: Mapping[str, object], command: str) -> dict[str, object]:
    """Add command, date, machine, versions and commit to a result."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": versions(),
        **git_state(),
        **result,
    }


def record_path(name: str, hardware: Hardware) -> Path:
    """Path of a benchmark's record; raises ``ConfigError`` outside a checkout of scalewise."""
    if not RECORDS.is_dir():
        reason = f"requires the folder {RECORDS}"
        raise ConfigError.for_key("record", True, reason, "run it in a checkout of scalewise")
    device = hardware.match or str(machine_facts()["device"])
    kind = "cpu" if hardware.device is DeviceKind.cpu else device
    return RECORDS / re.sub(r"[^a-z0-9]+", "_", kind.lower()) / f"{name}.json"


def write_record(path: Path, content: Mapping[str, object]) -> None:
    """Write a record; create the folder of its device."""
    path.parent.mkdir(exist_ok=True)
    write_json(path, content)
