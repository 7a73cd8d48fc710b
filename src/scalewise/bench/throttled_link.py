"""Network link of limited bandwidth between two network namespaces (Linux, requires root)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import TracebackType

from scalewise.errors import ConfigError
from scalewise.launch import signals

ADDRESSES = ("10.77.0.1", "10.77.0.2")
BURST, QUEUE = "256kb", "50ms"
"""Burst size and maximum queueing delay of the token bucket filter."""


def missing_requirement() -> str:
    """Reason why this machine cannot create a link; empty: it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces require Linux"
    if os.geteuid() != 0:
        return "network namespaces require root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{missing[0]} is missing: apt-get install iproute2" if missing else ""


class ThrottledLink:
    """Context manager that creates two network namespaces and a veth pair between them."""

    def __init__(self) -> None:
        self.names = tuple(f"sw{os.getpid()}{end}" for end in "ab")
        """Names of the namespaces, and of the network device in each."""

    def __enter__(self) -> ThrottledLink:
        device_name, peer_name = self.names
        try:
            for name in self.names:
                _run_command("ip", "netns", "add", name)
            peer = ("type", "veth", "peer", "name", peer_name)
            _run_command("ip", "link", "add", device_name, *peer)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _run_command("ip", "link", "set", name, "netns", name)
                _run_command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
                for device in ("lo", name):
                    _run_command("ip", "-n", name, "link", "set", device, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def limit_rate(self, mbit: float) -> None:
        """Limit the bandwidth of each direction to ``mbit`` Mbit/s."""
        rate = f"{mbit}mbit"
        for name in self.names:
            shaper = ("tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
            _run_command("tc", "-n", name, "qdisc", "replace", "dev", name, "root", *shaper)

    def read_sent_bytes(self, end: int) -> int:
        """Bytes sent by one end so far, including headers."""
        name = self.names[end]
        (device,) = json.loads(
            _run_command("ip", "-n", name, "-s", "-j", "link", "show", "dev", name)
        )
        return int(device["stats64"]["tx"]["bytes"])

    def _remove(self) -> None:
        with signals.ignore_signals():
            for name in self.names:  # also deletes the devices in them
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # noqa: S603, S607 (fixed arguments, ip from PATH)


def _run_command(*command: str) -> str:
    """Output of a command; raises ``ConfigError`` if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (fixed arguments)
    if result.returncode:
        reason = f"{' '.join(command[:4])} failed: {' '.join(result.stderr.split())}"
        raise ConfigError.for_key("", "", f"skipped: {reason}")
    return result.stdout
