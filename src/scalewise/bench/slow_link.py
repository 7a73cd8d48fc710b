"""Effect of a slow link on the step time: two ranks in two network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from scalewise.bench import options
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ScalewiseError
from scalewise.launch import signals
from scalewise.parallelism.collective import bytes_per_link_fraction
from scalewise.planner.communication import list_collectives
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json
from scalewise.units import format_bytes, format_seconds

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_BASE = "experiment=communication/slow_link"
RUNS: Mapping[str, tuple[str, ...]] = {
    "ddp": (_BASE, "parallelism=ddp"),
    "powersgd": (
        _BASE,
        "parallelism=ddp",
        "parallelism.comm_hook=powersgd",
        "parallelism.lossless_steps=2",
    ),
    "fsdp": (_BASE, "parallelism=fsdp"),
}
PORT = 29477
TIMEOUT_SECONDS = 300.0
"""Timeout of one run."""
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


@dataclass(frozen=True)
class SlowLinkOptions(options.BenchOptions):
    """Options of the slow link benchmark."""

    mbit: float = 100.0
    """Bandwidth of the slow link in each direction, in Mbit/s."""


OPTIONS = SlowLinkOptions


def measure(
    runs: Mapping[str, RunConfig], options: SlowLinkOptions, folder: Path
) -> dict[str, object]:
    """Measure step times over an unlimited and a slow link, and the bytes that a rank sends.

    The prediction is the step time over the unlimited link plus the predicted bytes divided by the
    bandwidth. It assumes ring algorithms, and no overlap of communication with the backward pass.
    The gloo backend implements reduce-scatter by all-reduce, so fsdp sends more than predicted.
    """
    if reason := missing_requirement():
        raise ConfigError.for_key("", "", f"skipped: {reason}")
    for run in runs.values():
        if run.world_size != 2:
            raise ConfigError.for_key("parallelism", run.world_size, "requires exactly 2 ranks")
    print_lines(f"{'':<10}{'unlimited':>10}{f'{options.mbit:g} Mbit/s':>14}{'predicted':>12}"
          f"{'sent per step':>15}{'predicted':>12}")  # fmt: skip
    results: dict[str, dict[str, object]] = {}
    for name, run in runs.items():
        fast_s, _ = _train_over_link(run, folder / f"{name}-open", None)
        slow_s, sent = _train_over_link(run, folder / f"{name}-slow", options.mbit)
        predicted_bytes = _predicted_bytes(run)
        predicted_s = None
        if predicted_bytes is not None:
            predicted_s = fast_s + predicted_bytes / (options.mbit * 1e6 / 8)
        results[name] = {
            "open_s": fast_s,
            "slow_s": slow_s,
            "predicted_s": predicted_s,
            "sent_bytes": sent,
            "declared_bytes": predicted_bytes,
        }
        print_lines(
            f"{name:<10}{format_seconds(fast_s):>10}{format_seconds(slow_s):>14}"
            f"{format_seconds(predicted_s) if predicted_s else 'unknown':>12}"
            f"{format_bytes(sent):>15}"
            f"{format_bytes(predicted_bytes) if predicted_bytes else 'unknown':>12}"
        )  # fmt: skip
    return {"mbit": options.mbit, "layouts": results}


def _predicted_bytes(run: RunConfig) -> float | None:
    """Predicted bytes that a rank sends per step; None: they depend on the gradients."""
    ranks = run.world_size
    total = sum(
        bytes_per_link_fraction(collective.kind, ranks) * collective.bytes * collective.count
        for collective in list_collectives(run.parallelism, run)
    )
    return total or None


def _train_over_link(run: RunConfig, folder: Path, mbit: float | None) -> tuple[float, float]:
    """Median step time in seconds, and bytes per step sent by rank 1.

    Rank 0 is not counted: it also broadcasts the initial weights.
    """
    with ThrottledLink() as link:
        if mbit is not None:
            link.limit_rate(mbit)
        initial_bytes = link.read_sent_bytes(1)
        log = folder.with_suffix(".log")
        with log.open("w", encoding="utf-8") as file:
            ranks = [_start_rank(run, folder, link, number, file) for number in (0, 1)]
            try:
                codes = _wait_for_ranks(ranks)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        sent = link.read_sent_bytes(1) - initial_bytes
    summary: Any = read_json(folder / "summary.json")
    if any(codes) or not summary:
        tail = "\n".join(log.read_text("utf-8").splitlines()[-12:])
        raise ScalewiseError(f"failed: ranks ended with exit codes {codes}\n{tail}")
    return float(summary["metrics"]["time/step_s"]), sent / summary["steps"]


def _start_rank(
    run: RunConfig, folder: Path, link: ThrottledLink, rank: int, log: Any
) -> subprocess.Popen[str]:
    """Start ``scalewise train`` at one end of the link, with the environment of torchrun."""
    name = link.names[rank]
    rank_environment = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "GROUP_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "TORCHELASTIC_RUN_ID": name,
        "GLOO_SOCKET_IFNAME": name,
    }
    rank_folder = folder if rank == 0 else folder.with_name(f".{folder.name}-1")
    overrides = [*run.overrides, f"hydra.run.dir={rank_folder}"]
    command = [sys.executable, "-m", "scalewise", "train", *overrides]
    return subprocess.Popen(  # noqa: S603 (fixed arguments)
        ["ip", "netns", "exec", name, *command],  # noqa: S607 (ip from PATH)
        env={**os.environ, **rank_environment},
        stdout=log,
        stderr=log,
        text=True,
    )


def _wait_for_ranks(ranks: list[subprocess.Popen[str]]) -> list[int | None]:
    """Wait until all ranks have ended or one has failed; return the exit codes."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes) or any(codes):
            return codes
        time.sleep(0.1)
    raise ScalewiseError(f"timeout: still running after {TIMEOUT_SECONDS:g} s")
