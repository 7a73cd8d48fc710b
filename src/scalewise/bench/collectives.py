"""Benchmark of collectives over message sizes, with a fit and a plot of the ring model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from scalewise.bench import link_fit, options, profile, ranks
from scalewise.bench.link_fit import CollectiveSample
from scalewise.console import print_lines
from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind, remove_built_in_figures, this_machine
from scalewise.parallelism.collective import CollectiveKind, RingLink
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json, write_json, write_text
from scalewise.typed_override import shell_word
from scalewise.units import KIB, MIB, format_bytes

KIND_NAMES = {"send": "point to point"}
_BYTES = "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : datum.value / 1024 + ' KiB'"
_TIME = (
    "datum.value >= 1 ? datum.value + ' s' : datum.value >= 1e-3 ? "
    "format(datum.value * 1e3, '~r') + ' ms' : format(datum.value * 1e6, '~r') + ' us'"
)
KINDS = (
    CollectiveKind.all_reduce,
    CollectiveKind.all_gather,
    CollectiveKind.reduce_scatter,
    CollectiveKind.all_to_all,
    CollectiveKind.send,
)
MIN_MESSAGE_BYTES = KIB
SIZE_RATIO = 4
"""Ratio of consecutive message sizes."""
MIN_REPEAT_SECONDS = 2e-3
"""Minimum duration of a repeat; small messages are sent several times."""
RUNS: Mapping[str, tuple[str, ...]] = {"": ("tracking=none",)}
_TIMES = ".times.json"

BLUE, ORANGE = "#1f4e8c", "#c9802b"


def draw_collectives(
    samples: Sequence[CollectiveSample], link: RingLink | None, file: Path
) -> None:
    """Write an SVG with measured times as points and the ring model of ``link`` as lines."""
    spec: dict[str, Any] = collectives_chart(samples, link).to_dict()
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    write_text(file, vl_convert.vegalite_to_svg(spec, vl_version=version))


def collectives_chart(samples: Sequence[CollectiveSample], link: RingLink | None) -> alt.FacetChart:
    """Chart of time over size, with one panel per kind of collective."""
    rows: list[dict[str, Any]] = [
        {"kind": KIND_NAMES.get(s.kind, s.kind.replace("_", "-")), "bytes": s.bytes,
         "source": source, "s": seconds}
        for s in samples
        for source, seconds in (
            ("measured", s.seconds),
            *([("ring model", link.seconds(s.kind, s.ranks, s.bytes))] if link else []),
        )
    ]  # fmt: skip
    sizes = sorted({s.bytes for s in samples})
    x = alt.X(
        "bytes:Q",
        scale=alt.Scale(type="log", base=2, domain=[sizes[0] / 2, sizes[-1] * 2], nice=False),
        axis=alt.Axis(values=[sizes[0], sizes[len(sizes) // 2], sizes[-1]], labelExpr=_BYTES),
        title=None,
    )
    times = [row["s"] for row in rows]
    powers = [10.0**power for power in range(-7, 3)]
    ticks = [p for p in powers if min(times) / 10 <= p <= max(times) * 10]
    y = alt.Y(
        "s:Q",
        scale=alt.Scale(type="log", domain=[min(times) / 1.5, max(times) * 1.5], nice=False),
        axis=alt.Axis(values=ticks, labelExpr=_TIME),
        title="time per operation",
    )
    color = alt.Color(
        "source:N",
        scale=alt.Scale(domain=["measured", "ring model"], range=[BLUE, ORANGE]),
        legend=alt.Legend(orient="top", title=None),
    )
    base = alt.Chart().encode(x=x, y=y, color=color)
    layers = alt.layer(
        base.mark_line(strokeWidth=1.5).transform_filter("datum.source == 'ring model'"),
        base.mark_point(filled=True, size=36, opacity=1).transform_filter(
            "datum.source == 'measured'"
        ),
    ).properties(width=210, height=170)
    ranks = samples[0].ranks
    title = f"{ranks} ranks; noise hides the link"
    if link is not None:
        latency, rate = f"{link.latency_s * 1e6:.3g} us", f"{link.bytes_per_s / 1e9:.3g} GB/s"
        title = f"{ranks} ranks on a ring of links with {latency} and {rate}"
    panels = list(dict.fromkeys(str(row["kind"]) for row in rows))
    chart: alt.FacetChart = (
        layers.facet(
            facet=alt.Facet("kind:N", sort=panels, title=None),
            data=alt.InlineData(values=rows),
            columns=3,
        )
        .properties(title=alt.TitleParams(title, anchor="start", fontSize=14), background="#fdfdfc")
        .configure_axis(
            domain=False,
            ticks=False,
            gridColor="#e9e9e5",
            labelColor="#5c5f66",
            titleFontWeight="normal",
        )
        .configure_view(stroke=None)
    )
    return chart


@dataclass(frozen=True)
class CollectivesOptions(options.BenchOptions):
    """Options of the collectives benchmark."""

    ranks: int | None = None
    """Number of ranks; None: one per CUDA device, or two on the CPU."""
    largest_kib: int = 64 * MIB // KIB
    """Largest message size, in KiB."""
    seconds: float = 0.3
    """Measuring time of each size of each collective, in seconds."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        yield from super().validate()
        if 0 < self.largest_kib < 16:
            reason = "leaves too few sizes to separate latency and bandwidth"
            yield ConfigIssue("largest_kib", self.largest_kib, reason, "set largest_kib=16")


OPTIONS = CollectivesOptions


def measure(
    runs: Mapping[str, RunConfig], options: CollectivesOptions, folder: Path
) -> dict[str, object]:
    """Measure all collectives and fit links; write a plot and a hardware profile."""
    run = runs[""]
    on_cuda = run.hardware.device is DeviceKind.cuda
    machine = this_machine()
    gpus = len(machine.gpus) if on_cuda else None
    count = options.ranks or gpus or 2
    ranks.check_ranks(count, "ranks", gpus, machine.max_cpu_ranks)
    largest = options.largest_kib * KIB
    print_lines(
        f"{count} {run.hardware.device.upper()} ranks, "
        f"{format_bytes(MIN_MESSAGE_BYTES)} to {format_bytes(largest)}"
    )
    samples = measure_samples(count, largest, options.seconds, folder, on_cuda=on_cuda)
    link = link_fit.fit_link(samples)
    samples_by_kind = {kind: [s for s in samples if s.kind is kind] for kind in KINDS}
    links = {
        kind.value: _link_figures(link_fit.fit_link(kind_samples), kind_samples)
        for kind, kind_samples in samples_by_kind.items()
    }
    links["all"] = _link_figures(link, samples)
    _print_links(links)
    draw_collectives(samples, link, folder / "collectives.svg")
    print_lines(f"plot {folder / 'collectives.svg'}")
    if link is None:
        print_lines(f"no profile: noise hides the link; set largest_kib={8 * options.largest_kib}")
    else:
        comment = f"bench collectives` with {count} ranks on {profile.utc_date()}; "
        comment += "ring model of all kinds."
        file = folder / "hardware" / "measured.yaml"
        hardware = remove_built_in_figures(run.hardware)
        profile.write_profile(hardware, profile.link_entries(link), [comment], file)
        print_lines(f"use it: scalewise train -cd {shell_word(folder)} hardware=measured ...")
    return {
        "ranks": count,
        "backend": "nccl" if on_cuda else "gloo",
        "links": links,
        "samples": [asdict(sample) for sample in samples],
    }


def measure_samples(
    count: int, largest: int, seconds: float, folder: Path, *, on_cuda: bool
) -> list[CollectiveSample]:
    """Measure every collective and size.

    Args:
        count: Number of ranks.
        largest: Largest message size, in bytes.
        seconds: Measuring time of each size of each collective.
        folder: Folder for temporary files of the ranks.
        on_cuda: Whether to use CUDA devices and NCCL, instead of the CPU and gloo.
    """
    task = partial(_measure_rank, list(message_sizes(largest)), seconds, folder, on_cuda=on_cuda)
    ranks.run_ranks(task, count, folder)
    times: Any = read_json(folder / _TIMES)["samples"]
    (folder / _TIMES).unlink()
    return [CollectiveSample(**{**entry, "kind": CollectiveKind(entry["kind"])}) for entry in times]


def message_sizes(largest: int) -> Iterator[int]:
    """Message sizes from ``MIN_MESSAGE_BYTES`` to ``largest``, in bytes."""
    size = MIN_MESSAGE_BYTES
    while size <= largest:
        yield size
        size *= SIZE_RATIO


def _link_figures(
    link: RingLink | None, samples: list[CollectiveSample]
) -> dict[str, float] | None:
    return (
        None
        if link is None
        else asdict(link) | {"median_error": link_fit.link_error(link, samples)}
    )


def _print_links(links: Mapping[str, Mapping[str, float] | None]) -> None:
    print_lines("", f"{'ring model of':<16}{'latency':>12}{'bandwidth':>16}{'median error':>16}")
    for name, link in links.items():
        if link is None:
            print_lines(f"{name:<16}  unknown: times do not increase with message size")
            continue
        latency, rate = f"{link['latency_s'] * 1e6:.1f} us", f"{link['bytes_per_s'] / 1e9:.3g}"
        print_lines(f"{name:<16}{latency:>12}{rate:>11} GB/s{link['median_error']:>16.0%}")


def _measure_rank(sizes: list[int], seconds: float, folder: Path, *, on_cuda: bool) -> None:
    """Measure in one rank; rank 0 prints and writes the samples."""
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
            operation, exact_size = _collective_call(kind, size, device)
            time_s = _slowest_rank_seconds(operation, seconds, device)
            if kind is CollectiveKind.send:  # the operation is a round trip
                time_s /= 2
            sample = CollectiveSample(kind, dist.get_world_size(), exact_size, time_s)
            samples.append(asdict(sample))
            if dist.get_rank() == 0:
                rate = f"{exact_size / time_s / 1e9:.3g} GB/s"
                time_text = f"{time_s * 1e3:>12.3f} ms"
                print_lines(f"{kind:<16}{format_bytes(size):>12}{time_text}{rate:>16}")
    if dist.get_rank() == 0:
        write_json(folder / _TIMES, {"samples": samples})
    dist.barrier()
    dist.destroy_process_group()


def _collective_call(
    kind: CollectiveKind, size: int, device: Any
) -> tuple[Callable[[], object], int]:
    """Function that calls one collective on fp32 tensors, and its exact size in bytes."""
    import torch
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    shard_numel = max(1, size // 4 // world)
    full = torch.zeros(shard_numel * world, device=device)
    shard, output = torch.zeros(shard_numel, device=device), torch.zeros_like(full)

    def round_trip() -> None:
        for sender, receiver in ((0, 1), (1, 0)):
            if rank == sender:
                dist.send(full, receiver)
            elif rank == receiver:
                dist.recv(full, sender)

    operations: dict[CollectiveKind, Callable[[], object]] = {
        CollectiveKind.all_reduce: partial(dist.all_reduce, full),
        CollectiveKind.all_gather: partial(
            _collective_by_name("all_gather_single", "all_gather_into_tensor"), full, shard
        ),
        CollectiveKind.reduce_scatter: partial(
            _collective_by_name("reduce_scatter_single", "reduce_scatter_tensor"), shard, full
        ),
        CollectiveKind.all_to_all: partial(dist.all_to_all_single, output, full),
        CollectiveKind.send: round_trip,
    }
    return operations[kind], shard_numel * world * 4


def _collective_by_name(name: str, legacy_name: str) -> Callable[..., object]:
    """Collective of torch.distributed by its name since torch 2.13, or its previous name."""
    import torch.distributed as dist

    function: Callable[..., object] = getattr(dist, name, None) or getattr(dist, legacy_name)
    return function


def _slowest_rank_seconds(operation: Callable[[], object], budget: float, device: Any) -> float:
    """Time of one operation in seconds: median over repeats of the slowest rank's time."""
    import torch
    import torch.distributed as dist

    def mean_seconds(count: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            operation()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    mean_seconds(2)  # warm-up: creates connections and buffers
    estimate = torch.tensor(mean_seconds(1), dtype=torch.float64, device=device)
    dist.all_reduce(estimate, dist.ReduceOp.MAX)  # all ranks must repeat equally often
    burst = max(1, min(200, round(MIN_REPEAT_SECONDS / estimate.item())))
    repeats = max(5, min(100, round(budget / (burst * estimate.item()))))
    times = torch.tensor([mean_seconds(burst) for _ in range(repeats)], dtype=torch.float64)
    times = times.to(device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times.median())
