"""What this machine reaches, as a hardware profile that ``plan`` and ``train`` take."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap

from scalewise.bench import collectives, device_bench, link_fit, options, profile, step_scale
from scalewise.bench.device_bench import MeasuredFigure
from scalewise.console import print_lines
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import DeviceKind, Hardware, this_machine
from scalewise.parallelism.ring_cost import RingLink
from scalewise.run_config import NAME_PATTERN, RunConfig
from scalewise.units import GIB, GIGA, MIB, TERA

FOLDER = Path("conf", "hardware")
DISK_BYTES = 256 * MIB
WIDE = 0.5
"""A spread beyond which a figure says little."""
LONGEST = 60.0
"""Seconds for a figure, at the most."""
LARGEST_MESSAGE = 16 * MIB
KINDS = {DeviceKind.cpu: ("fp32", "bf16"), DeviceKind.cuda: ("fp32", "tf32", "bf16", "fp16")}
MAIN_KIND = {DeviceKind.cpu: "fp32", DeviceKind.cuda: "bf16"}


@dataclass(frozen=True)
class CalibrateOptions(options.BenchOptions):
    """What is measured, for how long, and where it is kept."""

    name: str = "measured"
    """Name of the profile: ``hardware=NAME``."""
    ranks: int | None = None
    """Processes for the link; None: every CUDA device, or two on the CPU."""
    seconds: float = 2.0
    """Time for each figure, s."""
    learn: str | None = None
    """A folder of runs that used the profile: nothing is measured but by them."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields names of no file, and of a profile that was not measured."""
        yield from super().validate()
        if self.seconds > LONGEST:
            reason = f"each of some {len(KINDS) * 8} figures would take so long"
            yield ConfigIssue("seconds", self.seconds, reason, f"set seconds={LONGEST:g} or less")
        if not NAME_PATTERN.fullmatch(self.name) or self.name.startswith(".") or " " in self.name:
            yield ConfigIssue("name", self.name, "names no file", "set name=my_machine")
        elif not profile.is_writable_profile(self.file):
            reason = f"{self.file} is there, and was not measured"
            yield ConfigIssue("name", self.name, reason, "set name=my_machine")
        elif self.learn is not None:
            yield from step_scale.input_issues(self.learn, self.file)

    @property
    def file(self) -> Path:
        """Returns where the profile is kept."""
        return FOLDER / f"{self.name}.yaml"


OPTIONS = CalibrateOptions


def calibrate(run: RunConfig, options: CalibrateOptions) -> Path:
    """Measures this machine, prints each figure, and returns the profile that it wrote."""
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{FOLDER} cannot be written: {error.strerror}"
        raise ConfigError.for_key("", "", reason, "calibrate in another folder") from error
    try:
        return _calibrate(run, options)
    finally:  # of folders that were made for nothing
        for folder in (FOLDER, FOLDER.parent):
            with suppress(OSError):
                folder.rmdir()


def _calibrate(run: RunConfig, options: CalibrateOptions) -> Path:
    hardware = _with_device_name(run.hardware)
    figures: dict[str, MeasuredFigure] = {}
    with TemporaryDirectory(dir=".") as folder:
        for name, figure in _measure_figures(run, options.seconds, Path(folder)):
            print_lines(f"{name:<24}{figure.value:>12.4g}   within {figure.spread:.0%}")
            figures[name] = figure
        link = _device_link(hardware, options, Path(folder))
    if wide := [name for name, figure in figures.items() if figure.spread > WIDE]:
        print_lines(
            f"other work here? measure again: {', '.join(wide)} vary by more than {WIDE:.0%}"
        )
    known = {name: figure.value for name, figure in figures.items()}
    spreads = (f"{name} {figure.spread:.0%}" for name, figure in figures.items() if figure.spread)
    lines = (
        f"calibrate` on {profile.utc_date()} with {profile.software_versions()}.",
        "From 10 % to 90 % of the repeats lie, over their median:",
        *wrap(", ".join(spreads), 96),
    )
    known |= profile.link_entries(link) if link else {}
    return profile.write_profile(hardware, known, lines, options.file)


def _with_device_name(hardware: Hardware) -> Hardware:
    """Returns the profile with the name and the memory of the CUDA device that is here."""
    if hardware.device is not DeviceKind.cuda:
        return hardware
    import torch

    memory = hardware.memory_gib or torch.cuda.mem_get_info()[1] / GIB
    return replace(
        hardware, match=hardware.match or torch.cuda.get_device_name(), memory_gib=memory
    )


def _measure_figures(
    run: RunConfig, seconds: float, folder: Path
) -> Iterator[tuple[str, MeasuredFigure]]:
    import torch

    hardware, kind = run.hardware, run.hardware.device
    place = torch.device(kind.value)
    for number in KINDS[kind]:
        if getattr(hardware, f"{number}_tflops") == 0:  # the device has no such units
            continue
        reached = device_bench.matmul_rate(number, place, seconds)
        yield f"{number}_reached_tflops", reached
        peak = hardware.peak_flops(number)
        if peak is None:  # what is reached is all that is known
            yield f"{number}_tflops", reached
        if number == MAIN_KIND[kind]:
            peak = peak or reached.value * TERA
            fused = device_bench.attention_rate(number, place, seconds)
            yield "attention_share", MeasuredFigure(fused.value * TERA / peak, fused.spread)
    rate = device_bench.memory_bandwidth(place, seconds)
    if hardware.memory_gb_per_s is None:
        yield "memory_gb_per_s", rate
        yield "bandwidth_share", MeasuredFigure(1.0, 0.0)
    else:
        yield "bandwidth_share", MeasuredFigure(rate.value / hardware.memory_gb_per_s, rate.spread)
    if kind is DeviceKind.cuda:
        yield "host_link_gb_per_s", device_bench.host_link_bandwidth(place, seconds)
        yield "host_memory_gb_per_s", device_bench.memory_bandwidth(torch.device("cpu"), seconds)
    yield "launch_us", device_bench.launch_latency(place, seconds)
    yield "loader_tokens_per_s", _loader_rate(run, seconds)
    yield "disk_gb_per_s", _disk_rate(folder, seconds)


def _loader_rate(run: RunConfig, seconds: float) -> MeasuredFigure:
    """Returns the tokens/s of the run's loader, no training beside it."""
    rows = run.data.prepare(run.model.vocabulary, run.seed).train
    share = BatchShare(run.micro_batch, run.micro_batch, 0, 1)
    rates: list[float] = []
    began = before = time.perf_counter()
    counted = 0
    for batch in TrainLoader(rows, share, seed=run.seed, steps=1_000_000):
        counted += batch["inputs"].numel()
        now = time.perf_counter()
        if now - before > seconds / 10:
            rates.append(counted / (now - before))
            before, counted = now, 0
        if now - began > seconds and len(rates) > 1:
            break
    return device_bench.summarize(rates)


def _disk_rate(folder: Path, seconds: float) -> MeasuredFigure:
    """Returns the rate at which a file is written and has reached the disk, GB/s."""
    content, file = os.urandom(MIB) * (DISK_BYTES // MIB), folder / "written"
    rates: list[float] = []
    ends = time.perf_counter() + seconds
    while len(rates) < device_bench.LEAST_REPEATS - 2 or time.perf_counter() < ends:
        before = time.perf_counter()
        with file.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        rates.append(DISK_BYTES / (time.perf_counter() - before) / GIGA)
    return device_bench.summarize(rates)


def _device_link(hardware: Hardware, options: CalibrateOptions, folder: Path) -> RingLink | None:
    """Returns what joins the devices; None where there is one, or noise hides it."""
    gpus = len(this_machine().gpus) if hardware.device is DeviceKind.cuda else None
    ranks = options.ranks or gpus or 2
    if gpus == 1:
        print_lines("one device: no link to measure")
        return None
    seconds, on_cuda = options.seconds / 20, gpus is not None
    return link_fit.fit_link(
        collectives.measure_samples(ranks, LARGEST_MESSAGE, seconds, folder, on_cuda=on_cuda)
    )
