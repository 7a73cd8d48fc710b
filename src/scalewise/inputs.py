"""The files that a run reads: recorded by content, found again from any folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalewise.config import registry
from scalewise.data import content, tokenizer_files
from scalewise.data.file_patterns import match_paths
from scalewise.errors import ConfigError, ConfigIssue, DataError
from scalewise.tracking.run_files import read_json, write_json

INPUTS_FILE = "inputs.json"
"""Where a run folder records its launch folder and the digests of its input files."""


OTHER_CONTENT = "holds other content than the run has read"


def _files(patterns: object) -> list[Path]:
    return match_paths([str(it) for it in patterns]) if isinstance(patterns, Sequence) else []


def _record_files(patterns: object) -> list[str]:
    return sorted(content.file_digests(_files(patterns)))


def _shard_files(patterns: object) -> list[str]:
    return content.file_digests(_files(patterns))


def _tokenizer_files(path: object) -> list[str]:
    return sorted(content.file_digests(tokenizer_files.tokenizer_files(str(path))))


def _dataset_files(path: object) -> list[str]:
    return sorted(content.file_digests(match_paths([str(Path(str(path)) / "**" / "*")])))


def _model_files(path: object) -> list[str]:
    folder = Path(str(path)).expanduser()
    files = (
        [folder] if folder.is_file() else [folder / "config.json", *folder.glob("*.safetensors")]
    )
    return sorted(content.sampled_digests([it for it in files if it.is_file()]))


READERS: Mapping[str, Callable[[object], list[str]]] = {
    "data.paths": _record_files,
    "data.validation_paths": _shard_files,
    "data.tokenizer": _tokenizer_files,
    "data.path": _dataset_files,
    "model.path": _model_files,
    "model.weights": _model_files,
}
"""Keys that name files, and digests of what they hold; none where there are no such files."""


def content_digests(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns a digest of the content of each input of a resolved config that lies here."""
    found = {key: _digest(key, values[key.partition(".")[0]]) for key, _ in _input_paths(values)}
    return {key: digest for key, digest in found.items() if digest is not None}


def _digest(key: str, group_values: Mapping[str, Any]) -> str | None:
    """Returns the digest of one input of a group; None where there are no such files."""
    reader = READERS[key]
    if key == "data.paths" and "validation_paths" in group_values:
        reader = _shard_files  # rows are in the order of the shards
    parts = reader(group_values[key.partition(".")[2]])
    return content.combine_digests(parts) if parts else None


def _input_paths(values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for key in READERS:
        group, _, name = key.partition(".")
        part = values.get(group)
        if isinstance(part, Mapping) and part.get(name):
            yield key, part[name]


def with_digests(values: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """Returns a resolved config with digests in place of the paths of its inputs."""
    replaced = dict(values)
    for key, digest in digests.items():
        group, _, name = key.partition(".")
        if isinstance(replaced.get(group), Mapping):
            replaced[group] = {**replaced[group], name: digest}
    return replaced


def write_inputs(values: Mapping[str, Any], folder: Path) -> None:
    """Writes the launch folder of a run and the digests of its inputs into its folder."""
    at = {"launch_folder": os.getcwd(), "run_folder": str(folder.absolute())}
    write_json(folder / INPUTS_FILE, {**at, "digests": content_digests(values)})


def add_missing(values: dict[str, Any], current_values: Mapping[str, Any] | None = None) -> None:
    """Adds to the resolved config of an earlier version what it did without a key for.

    Documents had no special tokens, which only matters where a tokenizer is given.
    """
    data = values.get("data")
    if not isinstance(data, Mapping) or "special_tokens" in data:
        return
    registry.import_options()
    kind = registry.registered_targets().get(str(data.get("_target_")))
    if not hasattr(kind, "special_tokens"):
        return
    given = (current_values or {}).get("data")
    if data.get("tokenizer") is not None:
        values["data"] = {**data, "special_tokens": False}
    elif isinstance(given, Mapping) and "special_tokens" in given:
        values["data"] = {**data, "special_tokens": given["special_tokens"]}


def recorded_digests(folder: Path) -> Mapping[str, str]:
    """Returns the digests that a run folder records; none in folders of earlier versions."""
    found: dict[str, str] = read_json(folder / INPUTS_FILE).get("digests", {})
    return found


def launch_folders(folder: Path) -> list[Path]:
    """Returns where relative paths of a run may lie.

    First its launch folder as recorded, and as it would be if it moved with the run; then the
    current one.
    """
    known = read_json(folder / INPUTS_FILE)
    found: list[Path] = []
    if {"launch_folder", "run_folder"} <= known.keys():
        launch = known["launch_folder"]
        found.append(Path(launch))
        relative = os.path.relpath(known["run_folder"], launch)
        parts = Path(relative).parts
        if ".." not in parts and folder.absolute().parts[-len(parts) :] == parts:
            found.append(folder.absolute().parents[len(parts) - 1])
    return list(dict.fromkeys([*found, Path.cwd()]))


def check_data(data: object, folder: Path) -> None:
    """Raises ``DataError`` for data files of other content than the run in ``folder`` has read."""
    known = recorded_digests(folder)
    here = content_digests({"data": vars(data)}) if known else {}
    wrong = [
        ConfigIssue(
            key, vars(data)[key.partition(".")[2]], OTHER_CONTENT, f"give {key} with the same files"
        )
        for key in known
        if key.startswith("data.") and here.get(key) != known[key]
    ]
    if wrong:
        raise DataError(wrong)


def relocate_inputs(
    values: Mapping[str, Any], folder: Path, new_paths: Mapping[str, object]
) -> dict[str, Any]:
    """Returns the resolved config of a run with the paths where its inputs lie now.

    ``new_paths`` holds paths that a user gives instead. Raises ``ConfigError`` for given files of
    other content than the run has read.
    """
    known = recorded_digests(folder)
    found = {key: dict(part) if isinstance(part, Mapping) else part for key, part in values.items()}
    wrong = []
    for key, _ in _input_paths(values):
        group, _, name = key.partition(".")
        if key in new_paths:
            found[group][name] = new_paths[key]
            here = _digest(key, found[group])
            if key in known and here != known[key]:
                reason = (
                    "no such files" if here is None else "holds other content than the run read"
                )
                wrong.append(
                    ConfigIssue(key, new_paths[key], reason, f"give {key} with the same files")
                )
            continue
        found[group][name] = _find_moved(key, found[group], folder, known.get(key))
    known_keys = dict(_input_paths(values))
    wrong += [
        ConfigIssue(key, value, "is no path that the run has read", "leave it out")
        for key, value in new_paths.items()
        if key not in known_keys
    ]
    if wrong:
        raise ConfigError(wrong)
    return found


def _find_moved(
    key: str, group_values: Mapping[str, Any], folder: Path, expected_digest: str | None
) -> object:
    """Returns the paths of an input where it lies now, with the known content if possible."""
    name = key.partition(".")[2]
    first = None
    for base in launch_folders(folder):
        place = _join_launch_folder(base, group_values[name], folder)
        digest = _digest(key, {**group_values, name: place})
        if digest is not None and digest == (expected_digest or digest):
            return place
        first = first or (place if digest else None)
    return first or group_values[name]


def _join_launch_folder(base: Path, value: object, folder: Path) -> object:
    """Returns paths as they are from a launch folder; absolute ones move with it."""
    if isinstance(value, str):
        launch = read_json(folder / INPUTS_FILE).get("launch_folder")
        path = Path(value).expanduser()
        if launch is not None and path.is_absolute() and path.is_relative_to(launch):
            path = path.relative_to(launch)
        return str(base / path)
    return (
        [_join_launch_folder(base, it, folder) for it in value]
        if isinstance(value, Sequence)
        else value
    )
