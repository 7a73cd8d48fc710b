"""A result with what it stands on: the command, versions, the device and the date."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, Hardware
from scalewise.launch.status import git_state, machine_facts, versions
from scalewise.tracking.run_files import write_json

RECORDS = Path("experiments", "records")


def build_record(result: Mapping[str, object], command: str) -> dict[str, object]:
    """Returns ``result`` under its command, date, machine, versions and commit."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": versions(),
        **git_state(),
        **result,
    }


def record_path(name: str, hardware: Hardware) -> Path:
    """Returns where the checkout keeps the record of a benchmark; refuses elsewhere."""
    if not RECORDS.is_dir():
        reason = f"there is no {RECORDS} here"
        raise ConfigError.for_key("record", True, reason, "run it in a checkout of scalewise")
    device = hardware.match or str(machine_facts()["device"])
    kind = "cpu" if hardware.device is DeviceKind.cpu else device
    return RECORDS / re.sub(r"[^a-z0-9]+", "_", kind.lower()) / f"{name}.json"


def write_record(path: Path, content: Mapping[str, object]) -> None:
    """Writes a record, in a folder that is made where it is the first of a device."""
    path.parent.mkdir(exist_ok=True)
    write_json(path, content)
