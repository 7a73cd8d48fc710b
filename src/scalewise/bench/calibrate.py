"""Calibration: measurement of this machine as a hardware profile for ``plan`` and ``train``."""

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
from scalewise.data.prepare import prepare_splits
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import DeviceKind, Hardware, this_machine
from scalewise.parallelism.collective import RingLink
from scalewise.run_config import RunConfig
from scalewise.units import GIB, GIGA, MIB, TERA
from scalewise.validation.run_issues import NAME_PATTERN

PROFILE_FOLDER = Path("conf", "hardware")
DISK_TEST_BYTES = 256 * MIB
MAX_SPREAD = 0.5
"""Relative spread above which a measurement is reported as unreliable."""
MAX_SECONDS = 60.0
"""Maximum measuring time of one value, in seconds."""
MAX_MESSAGE_BYTES = 16 * MIB
FLOAT_FORMATS = {
    DeviceKind.cpu: ("fp32", "bf16"),
    DeviceKind.cuda: ("fp32", "tf32", "bf16", "fp16"),
}
MAIN_FORMAT = {DeviceKind.cpu: "fp32", DeviceKind.cuda: "bf16"}


@dataclass(frozen=True)
class CalibrateOptions(options.BenchOptions):
    """Options of a calibration."""

    name: str = "measured"
    """Name of the profile: ``hardware=NAME``."""
    ranks: int | None = None
    """Number of ranks for the link; None: one per CUDA device, or two on the CPU."""
    seconds: float = 2.0
    """Measuring time of each value, in seconds."""
    learn: str | None = None
    """Folder of runs that used the profile: fit its step scale to them instead of measuring."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of invalid names, and of a profile that must not be overwritten."""
        yield from super().validate()
        if self.seconds > MAX_SECONDS:
            reason = f"applies to each of about {len(FLOAT_FORMATS) * 8} measured values"
            yield ConfigIssue(
                "seconds", self.seconds, reason, f"set seconds={MAX_SECONDS:g} or less"
            )
        if not NAME_PATTERN.fullmatch(self.name) or self.name.startswith(".") or " " in self.name:
            yield ConfigIssue("name", self.name, "is not a file name", "set name=my_machine")
        elif not profile.is_writable_profile(self.file):
            reason = f"{self.file} exists and was not written by a calibration"
            yield ConfigIssue("name", self.name, reason, "set name=my_machine")
        elif self.learn is not None:
            yield from step_scale.input_issues(self.learn, self.file)

    @property
    def file(self) -> Path:
        """Path of the profile."""
        return PROFILE_FOLDER / f"{self.name}.yaml"


OPTIONS = CalibrateOptions


def calibrate(run: RunConfig, options: CalibrateOptions) -> Path:
    """Measure this machine, print each value, write the profile and return its path."""
    try:
        PROFILE_FOLDER.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{PROFILE_FOLDER} cannot be written: {error.strerror}"
        raise ConfigError.for_key("", "", reason, "calibrate in another folder") from error
    try:
        return _calibrate(run, options)
    finally:  # removes the folders if they are still empty
        for folder in (PROFILE_FOLDER, PROFILE_FOLDER.parent):
            with suppress(OSError):
                folder.rmdir()


def _calibrate(run: RunConfig, options: CalibrateOptions) -> Path:
    hardware = _with_device_name(run.hardware)
    figures: dict[str, MeasuredFigure] = {}
    with TemporaryDirectory(dir=".") as folder:
        for name, figure in _measure_figures(run, options.seconds, Path(folder)):
            print_lines(f"{name:<24}{figure.value:>12.4g}   spread {figure.spread:.0%}")
            figures[name] = figure
        link = _device_link(hardware, options, Path(folder))
    if unreliable := [name for name, figure in figures.items() if figure.spread > MAX_SPREAD]:
        print_lines(
            f"{', '.join(unreliable)} vary by more than {MAX_SPREAD:.0%}: "
            "measure again without other work on this machine"
        )
    values = {name: figure.value for name, figure in figures.items()}
    spreads = (f"{name} {figure.spread:.0%}" for name, figure in figures.items() if figure.spread)
    comments = (
        f"calibrate` on {profile.utc_date()} with {profile.software_versions()}.",
        "Spread from the 10th to the 90th percentile of the repeats, relative to the median:",
        *wrap(", ".join(spreads), 96),
    )
    values |= profile.link_entries(link) if link else {}
    return profile.write_profile(hardware, values, comments, options.file)


def _with_device_name(hardware: Hardware) -> Hardware:
    """Add name and memory of this machine's CUDA device to a profile."""
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
    device = torch.device(kind.value)
    for dtype in FLOAT_FORMATS[kind]:
        if getattr(hardware, f"{dtype}_tflops") == 0:  # the device does not support the format
            continue
        matmul = device_bench.matmul_rate(dtype, device, seconds)
        yield f"{dtype}_reached_tflops", matmul
        peak = hardware.peak_flops(dtype)
        if peak is None:  # the peak rate is unknown
            yield f"{dtype}_tflops", matmul
        if dtype == MAIN_FORMAT[kind]:
            peak = peak or matmul.value * TERA
            attention = device_bench.attention_rate(dtype, device, seconds)
            fraction = attention.value * TERA / peak
            yield "attention_share", MeasuredFigure(fraction, attention.spread)
    rate = device_bench.memory_bandwidth(device, seconds)
    if hardware.memory_gb_per_s is None:
        yield "memory_gb_per_s", rate
        yield "bandwidth_share", MeasuredFigure(1.0, 0.0)
    else:
        yield "bandwidth_share", MeasuredFigure(rate.value / hardware.memory_gb_per_s, rate.spread)
    if kind is DeviceKind.cuda:
        yield "host_link_gb_per_s", device_bench.host_link_bandwidth(device, seconds)
        yield "host_memory_gb_per_s", device_bench.memory_bandwidth(torch.device("cpu"), seconds)
    yield "launch_us", device_bench.launch_latency(device, seconds)
    yield "loader_tokens_per_s", _loader_rate(run, seconds)
    yield "disk_gb_per_s", _disk_rate(folder, seconds)


def _loader_rate(run: RunConfig, seconds: float) -> MeasuredFigure:
    """Throughput of the data loader without training, in tokens/s."""
    dataset = prepare_splits(run.data, run.model.vocabulary, run.seed).train
    batch_share = BatchShare(run.micro_batch, run.micro_batch, 0, 1)
    rates: list[float] = []
    start = window_start = time.perf_counter()
    tokens = 0
    for batch in TrainLoader(dataset, batch_share, seed=run.seed, steps=1_000_000):
        tokens += batch["inputs"].numel()
        now = time.perf_counter()
        if now - window_start > seconds / 10:
            rates.append(tokens / (now - window_start))
            window_start, tokens = now, 0
        if now - start > seconds and len(rates) > 1:
            break
    return device_bench.summarize(rates)


def _disk_rate(folder: Path, seconds: float) -> MeasuredFigure:
    """Rate of writing and flushing a file to disk, in GB/s."""
    content, file = os.urandom(MIB) * (DISK_TEST_BYTES // MIB), folder / "disk_test"
    rates: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(rates) < device_bench.MIN_REPEATS - 2 or time.perf_counter() < deadline:
        start = time.perf_counter()
        with file.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        rates.append(DISK_TEST_BYTES / (time.perf_counter() - start) / GIGA)
    return device_bench.summarize(rates)


def _device_link(hardware: Hardware, options: CalibrateOptions, folder: Path) -> RingLink | None:
    """Link between the devices; None: there is one device, or noise hides the link."""
    gpus = len(this_machine().gpus) if hardware.device is DeviceKind.cuda else None
    ranks = options.ranks or gpus or 2
    if gpus == 1:
        print_lines("one device: no link to measure")
        return None
    seconds, on_cuda = options.seconds / 20, gpus is not None
    return link_fit.fit_link(
        collectives.measure_samples(ranks, MAX_MESSAGE_BYTES, seconds, folder, on_cuda=on_cuda)
    )
