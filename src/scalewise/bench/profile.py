"""A hardware profile with the link that was measured, for ``-cd FOLDER hardware=measured``."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import yaml

from scalewise.hardware import Hardware
from scalewise.parallelism.ring import Link
from scalewise.tracking.files import write_text

HEAD = """\
# Measured by `scalewise bench collectives` with {ranks} ranks on {date}, ring model over all kinds.
defaults:
  - /schema/hardware/device@_here_
  - _self_

"""


def write(hardware: Hardware, link: Link, ranks: int, folder: Path) -> Path:
    """Writes ``hardware/measured.yaml``: the known figures of ``hardware``, and the link's."""
    held = {entry.name: getattr(hardware, entry.name) for entry in fields(hardware)}
    known = {
        key: value.value if isinstance(value, Enum) else value
        for key, value in held.items()
        if value not in (None, "")
    }
    known |= {
        "link_gb_per_s": float(f"{link.bytes_per_s / 1e9:.4g}"),
        "link_latency_us": max(float(f"{link.latency_s * 1e6:.4g}"), 1e-3),
    }
    file = folder / "hardware" / "measured.yaml"
    file.parent.mkdir()
    head = HEAD.format(ranks=ranks, date=datetime.now(UTC).date())
    write_text(file, head + yaml.safe_dump(known, sort_keys=False))
    return file
