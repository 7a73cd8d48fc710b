"""``scalewise doctor``: devices, installed extras and tracking of this machine."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from scalewise.console import print_lines
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, Hardware, Machine, resolve_for_machine, this_machine
from scalewise.launch.status_file import versions
from scalewise.units import GIB, format_bytes, format_count

EXTRAS = {
    "deepspeed": ("deepspeed", "parallelism=deepspeed_*"),
    "quant": ("bitsandbytes", "quantization=nf4, fp4 and int8; of torchao precision=fp8, qat_*"),
    "optimizers": ("schedulefree", "optimizer=schedule_free, adamw_8bit, _4bit and _paged"),
    "slurm": ("submitit", "hydra/launcher=slurm"),
    "optuna": ("optuna", "hydra/sweeper=optuna"),
    "hf": ("datasets", "data=hf, .parquet files and SentencePiece tokenizers"),
    "images": ("PIL", "images of data=captions other than .npy"),
}
"""Package and purpose of each optional dependency group (extra)."""

BYTES_PER_PARAMETER = 16
"""Memory of one parameter in fp32 training with AdamW: parameter, gradient and two moments."""

Line = tuple[str, str, str]
"""Line of the output: subject, state and consequence."""


def main(arguments: Sequence[str]) -> int:
    """Print the findings as a table; exit code 0."""
    if arguments:
        raise ConfigError.for_key("", "", f"doctor accepts no arguments: {' '.join(arguments)}")
    lines = list(finding_lines(this_machine()))
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for subject, state, meaning in lines:
        print_lines(f"{subject:<{widths[0]}}  {state:<{widths[1]}}  {meaning}".rstrip())
    return 0


def finding_lines(machine: Machine) -> Iterator[Line]:
    """Yield the lines of the output."""
    yield from _device_lines(machine)
    yield from _disk_line()
    yield "", "", ""
    for package, number in versions().items():
        yield package, number, ""
    yield "", "", ""
    yield from _tracking_lines()
    for extra, (package, purpose) in EXTRAS.items():
        installed = importlib.util.find_spec(package) is not None
        fix = "" if installed else f"; pip install 'scalewise[{extra}]'"
        yield f"extra {extra}", "installed" if installed else "not installed", f"for {purpose}{fix}"


def _device_lines(machine: Machine) -> Iterator[Line]:
    for number, name in enumerate(machine.gpus):
        yield f"device {number}", name, "parallelism=ddp uses every device"
    processor = resolve_for_machine(Hardware(device=DeviceKind.cpu))
    peak = processor.peak_flops("fp32")
    rate = f", fp32 peak {peak / 1e12:.2g} TFLOP/s" if peak and not machine.gpus else ""
    bf16 = "; bf16 is emulated, many times slower than fp32" if processor.emulates_bf16 else ""
    yield "processor", machine.processor, f"{machine.cores} cores{rate}{bf16}"
    largest = machine.memory_bytes * 0.8 / BYTES_PER_PARAMETER
    meaning_of_memory = (
        "" if machine.gpus else f"fp32 AdamW trains up to about {format_count(largest)} parameters"
    )
    yield "memory", format_bytes(machine.memory_bytes), meaning_of_memory
    if not machine.gpus:
        meaning = f"runs use the CPU with at most {machine.max_cpu_ranks} ranks, without fp16"
        yield "CUDA", "no device", meaning


def _disk_line() -> Iterator[Line]:
    free = shutil.disk_usage(Path.cwd()).free
    num_parameters = format_count(free / (3 * 4))
    meaning = (
        f"holds an AdamW checkpoint of {num_parameters} parameters" if free > GIB else "nearly full"
    )
    yield "free disk", format_bytes(free), meaning


def _tracking_lines() -> Iterator[Line]:
    from scalewise.tracking.connection import base_url, has_key
    from scalewise.tracking.wandb_session import choose_mode
    from scalewise.tracking_config import WandbConfig, WandbMode

    if issues := [str(issue) for issue in WandbConfig().validate_machine()]:
        yield "W&B", "invalid settings", "; ".join(issues)
        return
    server = base_url()
    key = "logged in" if has_key(server) else "no key"
    mode = choose_mode(WandbConfig())
    fix = "" if has_key(server) else "; for online runs: wandb login, or set WANDB_API_KEY"
    meaning = (
        "runs are not tracked" if mode is WandbMode.disabled else f"runs are tracked {mode}{fix}"
    )
    yield "W&B", f"{key} at {server}", meaning
