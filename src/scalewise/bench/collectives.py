"""What the links of this machine carry: five collectives over sizes, fitted by the ring model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scalewise.bench import collectives_plot, link_fit, options, profile, ranks
from scalewise.bench.link_fit import CollectiveSample
from scalewise.console import print_lines
from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind, this_machine
from scalewise.parallelism.communication import CollectiveKind
from scalewise.parallelism.ring_cost import RingLink
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import read_json, write_json
from scalewise.typed_override import shell_word
from scalewise.units import KIB, MIB, format_bytes

KINDS = (
    CollectiveKind.all_reduce,
    CollectiveKind.all_gather,
    CollectiveKind.reduce_scatter,
    CollectiveKind.all_to_all,
    CollectiveKind.send,
)
SMALLEST = KIB
STEP = 4
"""Ratio of one size to the next."""
BURST = 2e-3
"""Seconds that one repeat takes at the least: small messages are sent several times."""

RUNS: Mapping[str, tuple[str, ...]] = {"": ("tracking=none",)}
_TIMES = ".times.json"


@dataclass(frozen=True)
class CollectivesOptions(options.BenchOptions):
    """How much is measured."""

    ranks: int | None = None
    """Processes; None: every CUDA device, or two on the CPU."""
    largest_kib: int = 64 * MIB // KIB
    """The largest message, KiB."""
    seconds: float = 0.3
    """Time for each size of each collective, s."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields too few sizes."""
        yield from super().validate()
        if 0 < self.largest_kib < 16:
            reason = "leaves too few sizes to tell latency from bandwidth"
            yield ConfigIssue("largest_kib", self.largest_kib, reason, "set largest_kib=16")


OPTIONS = CollectivesOptions


def measure(
    runs: Mapping[str, RunConfig], options: CollectivesOptions, folder: Path
) -> dict[str, object]:
    """Returns each sample and the fitted links; leaves a picture and a hardware profile."""
    run = runs[""]
    on_cuda = run.hardware.device is DeviceKind.cuda
    machine = this_machine()
    gpus = len(machine.gpus) if on_cuda else None
    count = options.ranks or gpus or 2
    ranks.check_ranks(count, "ranks", gpus, machine.max_cpu_ranks)
    largest = options.largest_kib * KIB
    print_lines(f"{count} {run.hardware.device.upper()} ranks, {format_bytes(SMALLEST)} to "
          f"{format_bytes(largest)}")  # fmt: skip
    found = measure_samples(count, largest, options.seconds, folder, on_cuda=on_cuda)
    link = link_fit.fit_link(found)
    of_kinds = {kind: [s for s in found if s.kind is kind] for kind in KINDS}
    links = {
        kind.value: _link_figures(link_fit.fit_link(held), held) for kind, held in of_kinds.items()
    }
    links["all"] = _link_figures(link, found)
    _print_samples(links)
    collectives_plot.draw_collectives(found, link, folder / "collectives.svg")
    print_lines(f"picture {folder / 'collectives.svg'}")
    if link is None:
        print_lines(
            f"no profile: try largest_kib={8 * options.largest_kib}, which noise hides less"
        )
    else:
        how = f"bench collectives` with {count} ranks on {profile.utc_date()}; "
        how += "ring model of all kinds."
        file = folder / "hardware" / "measured.yaml"
        profile.write_profile(run.hardware, profile.link_entries(link), [how], file)
        print_lines(f"use it: scalewise train -cd {shell_word(folder)} hardware=measured ...")
    return {
        "ranks": count,
        "backend": "nccl" if on_cuda else "gloo",
        "links": links,
        "samples": [asdict(sample) for sample in found],
    }


def measure_samples(
    count: int, largest: int, seconds: float, folder: Path, *, on_cuda: bool
) -> list[CollectiveSample]:
    """Returns the times of every collective and size up to ``largest`` bytes, on ``count`` ranks.

    ``folder`` is where the ranks leave their words meanwhile.
    """
    task = partial(_measure_rank, list(message_sizes(largest)), seconds, folder, on_cuda=on_cuda)
    ranks.run_ranks(task, count, folder)
    times: Any = read_json(folder / _TIMES)["samples"]
    (folder / _TIMES).unlink()
    return [CollectiveSample(**{**entry, "kind": CollectiveKind(entry["kind"])}) for entry in times]


def message_sizes(largest: int) -> Iterator[int]:
    """Yields bytes from ``SMALLEST`` up to ``largest``."""
    size = SMALLEST
    while size <= largest:
        yield size
        size *= STEP


def _link_figures(
    link: RingLink | None, samples: list[CollectiveSample]
) -> dict[str, float] | None:
    return (
        None
        if link is None
        else asdict(link) | {"median_error": link_fit.link_error(link, samples)}
    )


def _print_samples(links: Mapping[str, Mapping[str, float] | None]) -> None:
    print_lines("", f"{'ring model of':<16}{'latency':>12}{'bandwidth':>16}{'median error':>16}")
    for name, found in links.items():
        if found is None:
            print_lines(f"{name:<16}  lost in noise: larger messages took no longer")
            continue
        latency, rate = f"{found['latency_s'] * 1e6:.1f} us", f"{found['bytes_per_s'] / 1e9:.3g}"
        print_lines(f"{name:<16}{latency:>12}{rate:>11} GB/s{found['median_error']:>16.0%}")


def _measure_rank(sizes: list[int], seconds: float, folder: Path, *, on_cuda: bool) -> None:
    """Measures in one of the ranks; rank 0 prints and writes."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if on_cuda else "gloo")
    device = torch.device("cpu")
    if on_cuda:
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    samples: list[dict[str, object]] = []
    for kind in KINDS:
        for size in sizes:
            operation, exact = _collective_call(kind, size, device)
            spent = _slowest_rank_seconds(operation, seconds, device)
            if kind is CollectiveKind.send:  # it went there and back
                spent /= 2
            samples.append(asdict(CollectiveSample(kind, dist.get_world_size(), exact, spent)))
            if dist.get_rank() == 0:
                rate = f"{exact / spent / 1e9:.3g} GB/s"
                took = f"{spent * 1e3:>12.3f} ms"
                print_lines(f"{kind:<16}{format_bytes(size):>12}{took}{rate:>16}")
    if dist.get_rank() == 0:
        write_json(folder / _TIMES, {"samples": samples})
    dist.barrier()
    dist.destroy_process_group()


def _collective_call(
    kind: CollectiveKind, size: int, device: Any
) -> tuple[Callable[[], object], int]:
    """Returns one collective as a function, and its bytes: fp32 numbers, alike on each rank."""
    import torch
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    own = max(1, size // 4 // world)
    whole = torch.zeros(own * world, device=device)
    part, other = torch.zeros(own, device=device), torch.zeros_like(whole)

    def there_and_back() -> None:
        for sender, receiver in ((0, 1), (1, 0)):
            if rank == sender:
                dist.send(whole, receiver)
            elif rank == receiver:
                dist.recv(whole, sender)

    operations: dict[CollectiveKind, Callable[[], object]] = {
        CollectiveKind.all_reduce: partial(dist.all_reduce, whole),
        CollectiveKind.all_gather: partial(
            _collective_by_name("all_gather_single", "all_gather_into_tensor"), whole, part
        ),
        CollectiveKind.reduce_scatter: partial(
            _collective_by_name("reduce_scatter_single", "reduce_scatter_tensor"), part, whole
        ),
        CollectiveKind.all_to_all: partial(dist.all_to_all_single, other, whole),
        CollectiveKind.send: there_and_back,
    }
    return operations[kind], own * world * 4


def _collective_by_name(name: str, legacy_name: str) -> Callable[..., object]:
    """Returns a collective by its name since torch 2.13, or the one before."""
    import torch.distributed as dist

    found: Callable[..., object] = getattr(dist, name, None) or getattr(dist, legacy_name)
    return found


def _slowest_rank_seconds(operation: Callable[[], object], budget: float, device: Any) -> float:
    """Returns the median over repeats of the slowest rank's time of one operation, s."""
    import torch
    import torch.distributed as dist

    def timed(times: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            operation()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    timed(2)  # connections are made, buffers touched
    one = torch.tensor(timed(1), dtype=torch.float64, device=device)
    dist.all_reduce(one, dist.ReduceOp.MAX)  # all ranks must repeat alike
    burst = max(1, min(200, round(BURST / one.item())))
    repeats = max(5, min(100, round(budget / (burst * one.item()))))
    spent = torch.tensor([timed(burst) for _ in range(repeats)], dtype=torch.float64)
    spent = spent.to(device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent.median())
