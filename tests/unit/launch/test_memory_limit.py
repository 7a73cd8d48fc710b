"""Memory limit of a process: what counts towards it."""

from __future__ import annotations

import subprocess
import sys

FREED_BLOCKS = """
from scalewise.launch.processes import _data_bytes, limit_memory
limit_memory({limit})
large = bytearray(30 << 20)
del large  # glibc then keeps blocks of up to 30 MiB
blocks, pins = [], []
for _ in range(4):
    blocks.append(bytearray(20 << 20))
    pins.append(bytes(100_000))  # above the block, so that the heap cannot shrink
before = _data_bytes()
blocks.clear()
print((before - _data_bytes()) >> 20)
"""


def _freed_mib(limit: float | None) -> int:
    line = [sys.executable, "-c", FREED_BLOCKS.format(limit=limit)]
    return int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


def test_freed_memory_does_not_count_towards_the_limit() -> None:
    assert _freed_mib(None) < 60
    assert _freed_mib(1.0) >= 79


def test_allocations_above_the_limit_fail() -> None:
    code = "from scalewise.launch.processes import limit_memory; limit_memory(0.05)"
    line = [sys.executable, "-c", f"{code}; bytearray(60 << 20)"]
    assert "MemoryError" in subprocess.run(line, capture_output=True, text=True).stderr
