"""``scalewise calibrate``: measures this machine into a hardware profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from scalewise.bench import calibrate, learn
from scalewise.bench.options import split
from scalewise.config import tree
from scalewise.config.compose import compose
from scalewise.errors import ConfigError
from scalewise.launch import signals
from scalewise.output import print_lines
from scalewise.typed_override import typed


def main(arguments: Sequence[str]) -> int:
    """Writes ``conf/hardware/NAME.yaml`` here and prints how to use it; exit code 0.

    ``learn=FOLDER`` adds to a profile what the runs of a folder tell of it.
    """
    if flags := [word for word in arguments if word.startswith("-")]:
        raise ConfigError.one("", "", f"calibrate takes overrides, not {flags[0]}")
    with signals.raised("while measuring"):
        given, overrides = split(arguments, calibrate.Options)
        options = cast(calibrate.Options, given)
        if options.learn is None:
            run = compose(("tracking=none", *overrides))
            calibrate.calibrated(run, options)
        else:
            _learn(options.learn, options.file, overrides)
    own = Path("conf").resolve() == (tree.root() / "conf").resolve()
    where = "" if own else " -cd conf"
    print_lines(f"profile {options.file}")
    print_lines(f"use it: scalewise plan{where} {typed('hardware', options.file.stem)} ...")
    return 0


def _learn(folder: str, file: Path, overrides: Sequence[str]) -> None:
    if overrides:
        raise ConfigError.one("", "", f"learn={folder} composes no run: {overrides[0]} is idle")
    scale = learn.learnt(Path(folder), file)
    print_lines(
        f"steps take {scale.median:.3g} times what the profile foresees "
        f"({scale.low * scale.median:.3g} to {scale.high * scale.median:.3g}, {scale.runs} runs)"
    )
