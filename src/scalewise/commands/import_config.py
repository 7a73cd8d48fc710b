"""``scalewise import accelerate FILE``: a config of another library as a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from scalewise import bounded_yaml, regular_files
from scalewise.console import print_lines
from scalewise.errors import ConfigError, did_you_mean
from scalewise.interop import accelerate_import, deepspeed_import
from scalewise.interop.translation import LIBRARIES


def main(arguments: Sequence[str]) -> int:
    """Print the command line, and on stderr what has no counterpart; exit code 0.

    Raises ``ConfigError`` for a file that cannot be read or translated.
    """
    library, *paths = arguments or ("",)
    if library not in LIBRARIES:
        fix = did_you_mean(library, LIBRARIES) if library else "scalewise import accelerate FILE"
        raise ConfigError.for_key("", "", f"no importer of {library or 'nothing'}", fix)
    if len(paths) != 1:
        fix = f"scalewise import {library} FILE"
        raise ConfigError.for_key("", "", f"requires one file, not {len(paths)}", fix)
    path = regular_files.expand_home(paths[0])
    if library == "accelerate":
        translation = accelerate_import.translate(_read_yaml(path), path.parent)
    else:
        translation = deepspeed_import.translate(deepspeed_import.read_file(path))
    print_lines(translation.command())
    if translation.notes:
        print_lines("without a counterpart:", stderr=True)
        print_lines(*(f"  {note}" for note in translation.notes), stderr=True)
    return 0


def _read_yaml(path: Path) -> Mapping[str, object]:
    try:
        values = bounded_yaml.load_yaml(regular_files.read_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError.for_key("", "", f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError.for_key("", "", f"{path} is no mapping of keys to values")
    return values
