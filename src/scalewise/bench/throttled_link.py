"""A cable between two network namespaces of this machine, as slow as asked (Linux, root)."""

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
"""What the shaper lets through at once, and how long a packet may wait in it."""


def missing_requirement() -> str:
    """Returns in one line why no cable can be laid here; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"there is no {missing[0]}: apt-get install iproute2" if missing else ""


class ThrottledLink:
    """Two namespaces joined by a veth pair; both are gone at the end."""

    def __init__(self) -> None:
        self.names = tuple(f"sw{os.getpid()}{end}" for end in "ab")
        """Of the namespaces, and of the device in each."""

    def __enter__(self) -> ThrottledLink:
        one, other = self.names
        try:
            for name in self.names:
                _run_command("ip", "netns", "add", name)
            _run_command("ip", "link", "add", one, "type", "veth", "peer", "name", other)
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
        """Slows the cable down to ``mbit`` Mbit/s, each direction by itself."""
        rate = f"{mbit}mbit"
        for name in self.names:
            shaper = ("tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
            _run_command("tc", "-n", name, "qdisc", "replace", "dev", name, "root", *shaper)

    def read_sent_bytes(self, end: int) -> int:
        """Returns the bytes that one end has put on the cable so far, headers included."""
        name = self.names[end]
        (told,) = json.loads(
            _run_command("ip", "-n", name, "-s", "-j", "link", "show", "dev", name)
        )
        return int(told["stats64"]["tx"]["bytes"])

    def _remove(self) -> None:
        with signals.ignore_signals():
            for name in self.names:  # the devices go with them
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # noqa: S603, S607 (our own words, the ip on the PATH)


def _run_command(*command: str) -> str:
    """Returns what a command printed; refuses with its reason where it may not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (a list of our own words)
    if done.returncode:
        reason = f"{' '.join(command[:4])} failed: {' '.join(done.stderr.split())}"
        raise ConfigError.for_key("", "", f"skipped: {reason}")
    return done.stdout
