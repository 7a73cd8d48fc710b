"""Calibration: measurement of this machine as a hardware profile for ``plan`` and ``train``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import TYPE_CHECKING

from scalewise.bench import collectives, link_fit, options, profile
from scalewise.console import print_lines
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.prepare import prepare_splits
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import DeviceKind, Hardware, remove_built_in_figures, this_machine
from scalewise.models.attention_kernels import MEASURED_HEAD_SIZE, MEASURED_TOKENS
from scalewise.parallelism.collective import RingLink
from scalewise.run_config import RunConfig
from scalewise.units import GIB, GIGA, MIB, MICRO, TERA
from scalewise.validation.run_issues import NAME_PATTERN

if TYPE_CHECKING:
    import torch

MIN_REPEATS = 5
CHAIN_LENGTH = 200
"""Number of operators that are launched in sequence."""
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
class MeasuredFigure:
    """Median of repeated measurements, and their spread."""

    value: float
    """Median."""
    spread: float
    """Difference of the 90th and the 10th percentile, relative to the median."""


def matmul_rate(kind: str, device: torch.device, seconds: float) -> MeasuredFigure:
    """Rate of a large square matmul in format ``kind``, in TFLOP/s."""
    import torch

    size = 8192 if device.type == "cuda" else 1024
    dtype = _dtype(kind)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        output = torch.empty_like(a)
        times = _repeat_times(lambda: torch.mm(a, b, out=output), device, seconds)
    finally:
        torch.set_float32_matmul_precision(precision)
    return _rate(times, 2.0 * size**3 / TERA)


def attention_rate(kind: str, device: torch.device, seconds: float) -> MeasuredFigure:
    """Rate of causal attention in format ``kind``, in TFLOP/s without masked positions.

    Backward, which recomputes the scores, has 2.5 times the FLOPs of forward.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    heads, tokens, head_size = (
        (32, MEASURED_TOKENS, MEASURED_HEAD_SIZE) if device.type == "cuda" else (8, 1024, 64)
    )
    shape, dtype = (1, heads, tokens, head_size), _dtype(kind)
    query, key, value, gradient = (
        torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(4)
    )

    def run() -> None:
        scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)
        query.grad = key.grad = value.grad = None

    times = _repeat_times(run, device, seconds)
    return _rate(times, 3.5 * 2.0 * heads * tokens * tokens * head_size / TERA)


def memory_bandwidth(device: torch.device, seconds: float) -> MeasuredFigure:
    """Memory bandwidth of an addition, which reads two tensors and writes one, in GB/s."""
    import torch

    numel = 1 << (28 if device.type == "cuda" else 24)
    a, b = (torch.zeros(numel, device=device) for _ in range(2))
    output = torch.empty_like(a)
    times = _repeat_times(lambda: torch.add(a, b, out=output), device, seconds)
    return _rate(times, 3.0 * 4 * numel / GIGA)


def host_link_bandwidth(device: torch.device, seconds: float) -> MeasuredFigure:
    """Bandwidth of copies from pinned host memory to the device, in GB/s."""
    import torch

    source = torch.zeros(1 << 26, pin_memory=True)
    target = torch.empty_like(source, device=device)
    times = _repeat_times(lambda: target.copy_(source, non_blocking=True), device, seconds)
    return _rate(times, source.nbytes / GIGA)


def launch_latency(device: torch.device, seconds: float) -> MeasuredFigure:
    """Launch time of one small operator, averaged over forward and backward, in microseconds."""
    import torch

    start = torch.ones(1, device=device, requires_grad=True)

    def run_chain() -> None:
        x = start
        for _ in range(CHAIN_LENGTH):
            x = x * 1.0
        x.backward()

    times = _repeat_times(run_chain, device, seconds)
    return summarize([time_s / (2 * CHAIN_LENGTH) / MICRO for time_s in times])


def _dtype(kind: str) -> torch.dtype:
    """Data type of the operands of a format; TF32 matmuls have fp32 operands."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)


def _repeat_times(
    operation: Callable[[], object], device: torch.device, seconds: float
) -> list[float]:
    """Repeat an operation for ``seconds``; return the time of each repeat."""
    import torch

    times: list[float] = []
    deadline = float("inf")
    for index in range(-2, 10_000):
        start = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        if index < 0:  # warm-up
            deadline = now + seconds
            continue
        times.append(now - start)
        if now > deadline and len(times) >= MIN_REPEATS:
            break
    return times


def _rate(times: list[float], amount: float) -> MeasuredFigure:
    return summarize([amount / time_s for time_s in times])


def summarize(values: list[float]) -> MeasuredFigure:
    """Median and spread of repeated measurements, at least two."""
    deciles = quantiles(values, n=10)
    center = median(values)
    return MeasuredFigure(center, (deciles[-1] - deciles[0]) / center)


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
            yield from profile.input_issues(self.learn, self.file)

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
    hardware = _with_device_name(remove_built_in_figures(run.hardware))
    run = replace(run, hardware=hardware)
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
        matmul = matmul_rate(dtype, device, seconds)
        yield f"{dtype}_reached_tflops", matmul
        peak = hardware.peak_flops(dtype)
        if peak is None:  # the peak rate is unknown
            yield f"{dtype}_tflops", matmul
        if dtype == MAIN_FORMAT[kind]:
            peak = peak or matmul.value * TERA
            attention = attention_rate(dtype, device, seconds)
            fraction = attention.value * TERA / peak
            yield "attention_share", MeasuredFigure(fraction, attention.spread)
    rate = memory_bandwidth(device, seconds)
    if hardware.memory_gb_per_s is None:
        yield "memory_gb_per_s", rate
        yield "bandwidth_share", MeasuredFigure(1.0, 0.0)
    else:
        yield "bandwidth_share", MeasuredFigure(rate.value / hardware.memory_gb_per_s, rate.spread)
    if kind is DeviceKind.cuda:
        yield "host_link_gb_per_s", host_link_bandwidth(device, seconds)
        yield "host_memory_gb_per_s", memory_bandwidth(torch.device("cpu"), seconds)
    yield "launch_us", launch_latency(device, seconds)
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
    return summarize(rates)


def _disk_rate(folder: Path, seconds: float) -> MeasuredFigure:
    """Rate of writing and flushing a file to disk, in GB/s."""
    content, file = os.urandom(MIB) * (DISK_TEST_BYTES // MIB), folder / "disk_test"
    rates: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(rates) < MIN_REPEATS - 2 or time.perf_counter() < deadline:
        start = time.perf_counter()
        with file.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        rates.append(DISK_TEST_BYTES / (time.perf_counter() - start) / GIGA)
    return summarize(rates)


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
