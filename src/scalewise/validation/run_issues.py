"""Validation of a run: each config by itself, rules between configs, and this machine."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from math import isfinite

from scalewise import regular_files
from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind, local_world_size, this_machine
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileBackend
from scalewise.units import GIB, MAX_NUMBER
from scalewise.validation import trusted_imports
from scalewise.validation.adapter_rules import TrainedAdapter, adapter_issues, resume_issues
from scalewise.validation.lr_transfer_rules import lr_transfer_issues
from scalewise.validation.model_rules import model_issues, token_issues
from scalewise.validation.objective_rules import misplaced_issues, objective_issues
from scalewise.validation.parallelism_rules import (
    parallelism_issues,
    parallelism_machine_issues,
)
from scalewise.validation.precision_rules import (
    bf16_issues,
    fp16_issues,
    precision_issues,
    quantization_issues,
    stochastic_rounding_issues,
)
from scalewise.validation.trainer_rules import (
    memory_issues,
    optimizer_issues,
    schedule_issues,
    trainer_issues,
)

NUMBERS = (int, float)
"""Types of values whose range is checked."""
NAME_PATTERN = re.compile(r"[^/\\\x00-\x1f\x7f]{1,128}")
"""Pattern of valid run names: limits of W&B and of folder names."""
SECONDS_FIELDS = ("launch.timeout", "launch.grace", "launch.collective_timeout")
"""Fields in seconds."""
MAX_WAIT_SECONDS = 10**9
"""Maximum of ``SECONDS_FIELDS``: 30 years, below the 290 years of kernel timers."""
MAX_LAYERS = 10_000
"""Maximum number of layers, because plans enumerate layers."""
MAX_RANKS = 2**20
"""Maximum number of ranks along one mesh dimension, because plans enumerate ranks."""


def iter_issues(run: RunConfig, validated: RunConfig | None = None) -> Iterator[ConfigIssue]:
    """Yield every config issue of a run: of each group by itself, then between groups.

    ``validated``: run without issues; its configs are not validated by themselves again.
    """
    group_issues = list(_group_issues(run, validated))
    yield from group_issues
    misplaced = list(misplaced_issues(run))
    yield from misplaced
    if run.objective.is_user_defined:
        yield from objective_issues(run.objective, run)
    elif not (misplaced or group_issues):
        yield from model_issues(run.model, run)
        yield from adapter_issues(run.adapter, run)
        yield from quantization_issues(run.quantization, run)
        yield from precision_issues(run.precision, run)
        yield from objective_issues(run.objective, run)
        yield from optimizer_issues(run.optimizer, run)
        yield from lr_transfer_issues(run)
        yield from memory_issues(run.memory, run)
        yield from parallelism_issues(run.parallelism, run)
        yield from trainer_issues(run)
    if not (misplaced or run.objective.is_user_defined):
        yield from schedule_issues(run)
        if not any(issue.key in ("model.path", "model.depth") for issue in group_issues):
            yield from token_issues(run)
    yield from trusted_imports.module_issues(run)
    yield from bf16_issues(run)
    if not misplaced:
        yield from stochastic_rounding_issues(run)
    yield from trusted_imports.callback_issues(run)
    if not NAME_PATTERN.fullmatch(run.name) or run.name.startswith("."):
        reason = "must be 1 to 128 printable characters without / and \\ and without a leading dot"
        yield ConfigIssue("name", run.name, reason, "set name=my-run")
    if run.resume == "":
        yield ConfigIssue("resume", "", "is not a checkpoint", "set a path, or resume=null")
    if not 0 <= run.seed < 2**32:
        yield ConfigIssue("seed", run.seed, "must be in [0, 2**32)")


def iter_machine_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield config issues of this machine; skipped for plans of other machines."""
    yield from device_issues(run)
    yield from compiler_issues(run)
    yield from fp16_issues(run)
    if (
        run.resume not in (None, "last", "auto")
        and not regular_files.expand_home(run.resume).exists()
    ):
        reason = "no such checkpoint folder"
        yield ConfigIssue("resume", run.resume, reason, "set a path, or resume=null")
    if run.adapter.resume is not None and not any(_group_issues(run)):
        yield from resume_issues(TrainedAdapter(run.adapter.resume), run)
    yield from run.optimizer.validate_machine()
    yield from run.quantization.validate_machine()
    yield from run.precision.validate_machine()
    yield from run.tracking.validate_machine()
    yield from parallelism_machine_issues(run.parallelism, run)


def compiler_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue if ``torch.compile`` requires a compiler that this machine does not have."""
    if not run.is_compiled or run.applied_compile.backend is not CompileBackend.inductor:
        return
    # Triton builds its launchers in C, TorchInductor the kernels of a CPU in C++.
    on_cuda = run.hardware.device is DeviceKind.cuda
    variable, names = ("CC", ("gcc", "clang")) if on_cuda else ("CXX", ("g++", "clang++"))
    if variable in os.environ or any(map(shutil.which, names)):
        return
    reason = f"requires {names[0]} or {names[1]}, which this machine does not have"
    fix = f"install {names[0]}, set {variable} to the path of a compiler, or set compile=none"
    yield ConfigIssue("compile", run.option("compile"), reason, fix)


def _group_issues(run: RunConfig, validated: RunConfig | None = None) -> Iterator[ConfigIssue]:
    """Yield the issues of each config by itself, except of those of another run."""
    for part in fields(run):
        config = getattr(run, part.name)
        if validated is None or config is not getattr(validated, part.name):
            yield from config_issues(part.name, config)


def config_issues(group: str, config: object) -> Iterator[ConfigIssue]:
    """Yield the issues of one config by itself."""
    if not hasattr(config, "validate"):
        return
    if out_of_range := list(_out_of_range_issues(group, config)):
        yield from out_of_range
        return
    issues = list(config.validate())
    yield from issues
    reported_keys = {issue.key for issue in issues}
    for entry in fields(config):  # type: ignore[arg-type]  # a config is a dataclass
        key, value = f"{group}.{entry.name}", getattr(config, entry.name)
        if isinstance(value, float) and not isfinite(value) and key not in reported_keys:
            yield ConfigIssue(key, value, "must be a finite number")


def _out_of_range_issues(group: str, config: object) -> Iterator[ConfigIssue]:
    """Yield issues for numbers beyond int64 and beyond the limits of this module."""
    for entry in fields(config):  # type: ignore[arg-type]  # a config is a dataclass
        key, value = f"{group}.{entry.name}", getattr(config, entry.name)
        if not isinstance(value, NUMBERS) or not isfinite(value):
            continue
        if abs(value) > MAX_NUMBER:
            yield ConfigIssue(key, value, "exceeds the 64-bit maximum, 2**63 - 1")
        elif abs(value) > (maximum := _field_maximum(key)):
            yield ConfigIssue(key, value, f"must be at most {maximum:,}", f"set {key}={maximum}")


def _field_maximum(key: str) -> int:
    """Maximum value of a numeric field."""
    if key.endswith("_gib"):
        return MAX_NUMBER // GIB
    if key in SECONDS_FIELDS:
        return MAX_WAIT_SECONDS
    if key == "model.layers":
        return MAX_LAYERS
    return MAX_RANKS if key.startswith("parallelism.") else MAX_NUMBER


def device_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for devices and ranks that this machine does not have."""
    machine = this_machine()
    key, ranks = "parallelism", run.option("parallelism")
    local_ranks = local_world_size() or run.world_size
    if run.hardware.device is DeviceKind.cuda:
        if not machine.gpus:
            yield ConfigIssue(
                "hardware",
                run.option("hardware"),
                "requires a CUDA device, which this machine does not have",
                "set hardware=auto or hardware=cpu",
            )
        elif local_ranks > len(machine.gpus):
            yield ConfigIssue(
                key,
                ranks,
                f"requires {local_ranks} devices; this machine has {len(machine.gpus)}",
                "reduce the number of ranks, or set hardware=cpu",
            )
        elif run.hardware.match and run.hardware.match not in machine.gpus[0]:
            yield ConfigIssue(
                "hardware",
                run.option("hardware"),
                f"does not match this machine, which has {machine.gpus[0]}",
                "set hardware=auto",
            )
    elif local_ranks > machine.max_cpu_ranks:
        yield ConfigIssue(
            key,
            ranks,
            f"requires {local_ranks} CPU ranks; this machine has {machine.cores} cores and "
            f"supports at most {machine.max_cpu_ranks}",
            "reduce the number of ranks",
        )
