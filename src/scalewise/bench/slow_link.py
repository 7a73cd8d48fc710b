"""What a slow link does to a step: two ranks in two namespaces, the cable open and then shaped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalewise.bench import options, throttled_link
from scalewise.bench.throttled_link import ADDRESSES, ThrottledLink
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ScalewiseError
from scalewise.parallelism.ring_cost import bytes_per_link_fraction
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import read_json
from scalewise.units import format_bytes, format_seconds

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
PATIENCE = 300.0
"""Seconds that one run may take."""


@dataclass(frozen=True)
class SlowLinkOptions(options.BenchOptions):
    """How slow the link is."""

    mbit: float = 100.0
    """Bandwidth of the shaped cable, each direction, Mbit/s."""


OPTIONS = SlowLinkOptions


def measure(
    runs: Mapping[str, RunConfig], options: SlowLinkOptions, folder: Path
) -> dict[str, object]:
    """Returns, for each layout, step times over both cables and the bytes a rank sends.

    The prediction adds the declared bytes over the bandwidth to the step of the open cable: it
    supposes that nothing is sent while gradients are computed, and a ring. Over gloo a
    reduce-scatter sends as much as an all-reduce, so that fsdp sends more than it declares.
    """
    if reason := throttled_link.missing_requirement():
        raise ConfigError.for_key("", "", f"skipped: {reason}")
    for run in runs.values():
        if run.world_size != 2:
            raise ConfigError.for_key("parallelism", run.world_size, "a cable has two ends")
    print_lines(f"{'':<10}{'open':>10}{f'{options.mbit:g} Mbit/s':>14}{'predicted':>12}"
          f"{'sent a step':>14}{'declared':>12}")  # fmt: skip
    found: dict[str, dict[str, object]] = {}
    for name, run in runs.items():
        opened, _ = _train_over_link(run, folder / f"{name}-open", None)
        slow, sent = _train_over_link(run, folder / f"{name}-slow", options.mbit)
        declared = _declared_bytes(run)
        seconds = None if declared is None else opened + declared / (options.mbit * 1e6 / 8)
        found[name] = {
            "open_s": opened,
            "slow_s": slow,
            "predicted_s": seconds,
            "sent_bytes": sent,
            "declared_bytes": declared,
        }
        print_lines(
            f"{name:<10}{format_seconds(opened):>10}{format_seconds(slow):>14}"
            f"{format_seconds(seconds) if seconds else 'unknown':>12}{format_bytes(sent):>14}"
            f"{format_bytes(declared) if declared else 'unknown':>12}"
        )  # fmt: skip
    return {"mbit": options.mbit, "layouts": found}


def _declared_bytes(run: RunConfig) -> float | None:
    """Returns the bytes that a rank says it sends a step; None: it depends on the gradients."""
    told = run.parallelism.collectives(run)
    ranks = run.world_size
    return (
        sum(bytes_per_link_fraction(each.kind, ranks) * each.bytes * each.count for each in told)
        or None
    )


def _train_over_link(run: RunConfig, folder: Path, mbit: float | None) -> tuple[float, float]:
    """Returns the median seconds of a step and the bytes that rank 1 sent in one.

    Rank 0 also sends the weights to begin with, so it is not the one to ask.
    """
    with ThrottledLink() as cable:
        if mbit is not None:
            cable.limit_rate(mbit)
        before = cable.read_sent_bytes(1)
        log = folder.with_suffix(".log")
        with log.open("w", encoding="utf-8") as file:
            ranks = [_start_rank(run, folder, cable, number, file) for number in (0, 1)]
            try:
                codes = _wait_for_ranks(ranks)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        sent = cable.read_sent_bytes(1) - before
    summary: Any = read_json(folder / "summary.json")
    if any(codes) or not summary:
        tail = "\n".join(log.read_text("utf-8").splitlines()[-12:])
        raise ScalewiseError(f"failed: ranks ended with exit codes {codes}\n{tail}")
    return float(summary["metrics"]["time/step_s"]), sent / summary["steps"]


def _start_rank(
    run: RunConfig, folder: Path, link: ThrottledLink, rank: int, log: Any
) -> subprocess.Popen[str]:
    """Returns ``scalewise train`` at one end of the cable, as torchrun would have started it."""
    name = link.names[rank]
    surroundings = {
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
    own = folder if rank == 0 else folder.with_name(f".{folder.name}-1")
    line = [sys.executable, "-m", "scalewise", "train", *run.overrides, f"hydra.run.dir={own}"]
    return subprocess.Popen(  # noqa: S603 (a list of our own words)
        ["ip", "netns", "exec", name, *line],  # noqa: S607 (the ip on the PATH is meant)
        env={**os.environ, **surroundings},
        stdout=log,
        stderr=log,
        text=True,
    )


def _wait_for_ranks(ranks: list[subprocess.Popen[str]]) -> list[int | None]:
    """Returns the exit codes, when all have ended or one has failed."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes) or any(codes):
            return codes
        time.sleep(0.1)
    raise ScalewiseError(f"timeout: still running after {PATIENCE:g} s")
