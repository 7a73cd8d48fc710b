"""``scalewise calibrate``: measure this machine and write a hardware profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from scalewise.bench import calibrate, profile
from scalewise.bench.options import split_options
from scalewise.config import paths
from scalewise.config.compose import compose
from scalewise.console import print_lines
from scalewise.errors import ConfigError
from scalewise.launch import signals
from scalewise.typed_override import format_override


def main(arguments: Sequence[str]) -> int:
    """Write ``conf/hardware/NAME.yaml`` in the current folder; exit code 0.

    ``learn=FOLDER`` adds the step scale of measured runs to a profile.
    """
    if flags := [argument for argument in arguments if argument.startswith("-")]:
        raise ConfigError.for_key(
            "", "", f"{flags[0]} is not supported: calibrate accepts overrides only"
        )
    with signals.raise_on_signals("while measuring"):
        parsed, overrides = split_options(arguments, calibrate.CalibrateOptions)
        options = cast(calibrate.CalibrateOptions, parsed)
        if options.learn is None:
            run = compose(("tracking=none", *overrides))
            calibrate.calibrate(run, options)
        else:
            _learn_step_scale(options.learn, options.file, overrides)
    is_project_conf = Path("conf").resolve() == (paths.project_root() / "conf").resolve()
    folder_flag = "" if is_project_conf else " -cd conf"
    print_lines(f"profile {options.file}")
    print_lines(
        f"use it: scalewise plan{folder_flag} {format_override('hardware', options.file.stem)} ..."
    )
    return 0


def _learn_step_scale(folder: str, file: Path, overrides: Sequence[str]) -> None:
    if overrides:
        raise ConfigError.for_key(
            "", "", f"{overrides[0]} is not supported with learn={folder}, which composes no run"
        )
    scale = profile.learn_step_scale(Path(folder), file)
    print_lines(
        f"measured step time: {scale.median:.3g} times the predicted one "
        f"({scale.low * scale.median:.3g} to {scale.high * scale.median:.3g}, {scale.runs} runs)"
    )
