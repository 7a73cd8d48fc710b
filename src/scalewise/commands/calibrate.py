"""``scalewise calibrate``: measures this machine into a hardware profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from scalewise.bench import calibrate, step_scale
from scalewise.bench.options import split_options
from scalewise.config import paths
from scalewise.config.compose import compose
from scalewise.console import print_lines
from scalewise.errors import ConfigError
from scalewise.launch import signals
from scalewise.typed_override import format_override


def main(arguments: Sequence[str]) -> int:
    """Writes ``conf/hardware/NAME.yaml`` here and prints how to use it; exit code 0.

    ``learn=FOLDER`` adds to a profile what the runs of a folder tell of it.
    """
    if flags := [word for word in arguments if word.startswith("-")]:
        raise ConfigError.for_key("", "", f"calibrate takes overrides, not {flags[0]}")
    with signals.raise_on_signals("while measuring"):
        given, overrides = split_options(arguments, calibrate.CalibrateOptions)
        options = cast(calibrate.CalibrateOptions, given)
        if options.learn is None:
            run = compose(("tracking=none", *overrides))
            calibrate.calibrate(run, options)
        else:
            _learn_step_scale(options.learn, options.file, overrides)
    own = Path("conf").resolve() == (paths.project_root() / "conf").resolve()
    where = "" if own else " -cd conf"
    print_lines(f"profile {options.file}")
    print_lines(
        f"use it: scalewise plan{where} {format_override('hardware', options.file.stem)} ..."
    )
    return 0


def _learn_step_scale(folder: str, file: Path, overrides: Sequence[str]) -> None:
    if overrides:
        raise ConfigError.for_key("", "", f"learn={folder} composes no run: {overrides[0]} is idle")
    scale = step_scale.learn_step_scale(Path(folder), file)
    print_lines(
        f"steps take {scale.median:.3g} times what the profile foresees "
        f"({scale.low * scale.median:.3g} to {scale.high * scale.median:.3g}, {scale.runs} runs)"
    )
