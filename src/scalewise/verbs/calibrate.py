"""``scalewise calibrate``: measures this machine into a hardware profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from scalewise.bench import calibrate
from scalewise.bench.options import split
from scalewise.config import tree
from scalewise.config.compose import compose
from scalewise.errors import ConfigError
from scalewise.launch import signals


def main(arguments: Sequence[str]) -> int:
    """Writes ``conf/hardware/NAME.yaml`` here and prints how to use it; exit code 0."""
    if flags := [word for word in arguments if word.startswith("-")]:
        raise ConfigError.one("", "", f"calibrate takes overrides, not {flags[0]}")
    with signals.raised("while measuring"):
        options, overrides = split(arguments, calibrate.Options)
        run = compose(("tracking=none", *overrides))
        file = calibrate.calibrated(run, cast(calibrate.Options, options))
    own = Path("conf").resolve() == (tree.root() / "conf").resolve()
    where = "" if own else " -cd conf"
    print(f"profile {file}")
    print(f"use it: scalewise plan{where} hardware={file.stem} ...")
    return 0
