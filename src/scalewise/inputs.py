"""Input files of a run: digests of their content, and their paths after the run has moved."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from scalewise import registry, regular_files
from scalewise.data.base import DataConfig
from scalewise.data.input_files import combine_digests, file_digests, match_paths, sampled_digests
from scalewise.data.remote_files import copy_inputs, is_remote
from scalewise.data.tokenizer import tokenizer_files
from scalewise.errors import ConfigError, ConfigIssue, DataError
from scalewise.run_files import read_json, write_json

INPUTS_FILE = "inputs.json"
"""File of a run folder with the launch folder and the digests of the input files."""

CHANGED_CONTENT = "has other content than the run has read"


def _files(patterns: object) -> list[Path]:
    return match_paths([str(it) for it in patterns]) if isinstance(patterns, Sequence) else []


def _record_digests(patterns: object) -> list[str]:
    return sorted(file_digests(_files(patterns)))


def _shard_digests(patterns: object) -> list[str]:
    return file_digests(_files(patterns))


def _tokenizer_digests(path: object) -> list[str]:
    return sorted(file_digests(tokenizer_files(str(path))))


def _dataset_digests(path: object) -> list[str]:
    return sorted(file_digests(match_paths([str(Path(str(path)) / "**" / "*")])))


def _model_digests(path: object) -> list[str]:
    folder = regular_files.expand_home(str(path))
    files = (
        [folder] if folder.is_file() else [folder / "config.json", *folder.glob("*.safetensors")]
    )
    return sorted(sampled_digests([it for it in files if it.is_file()]))


DIGEST_FUNCTIONS: Mapping[str, Callable[[object], list[str]]] = {
    "data.paths": _record_digests,
    "data.validation_paths": _shard_digests,
    "data.tokenizer": _tokenizer_digests,
    "data.path": _dataset_digests,
    "model.path": _model_digests,
    "model.weights": _model_digests,
}
"""Function that returns the file digests of each option with input files."""


def content_digests(values: Mapping[str, Any], *, remote: bool = True) -> dict[str, str]:
    """Return the digest of each existing input of a resolved config, by its key.

    ``remote``: whether inputs with URLs are included, by the content of their copies.
    """
    digests = {
        key: _digest(key, _entry(values, key))
        for key, paths in _input_paths(values)
        if remote or not _has_remote(paths)
    }
    return {key: digest for key, digest in digests.items() if digest is not None}


def _has_remote(paths: object) -> bool:
    if not isinstance(paths, Sequence) or isinstance(paths, str):
        return False
    return any(is_remote(str(path)) for path in paths)


def _digest(key: str, group_values: Mapping[str, Any]) -> str | None:
    """Return the digest of one input of a config group; None if there are no such files."""
    group, name = key.partition(".")[0], key.rpartition(".")[2]
    compute_digests = DIGEST_FUNCTIONS[f"{group}.{name}"]
    if name == "paths" and "validation_paths" in group_values:
        # The order of the shards decides the order of the sequences.
        compute_digests = _shard_digests
    digests = compute_digests(group_values[name])
    return combine_digests(digests) if digests else None


def _input_paths(values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the key and the value of each input, also of the sources of a mixture."""
    data = values.get("data")
    sources = data.get("sources") if isinstance(data, Mapping) else None
    parts = [
        (f"data.sources.{name}.data", source["data"]) for name, source in (sources or {}).items()
    ]
    for key in DIGEST_FUNCTIONS:
        group, _, name = key.partition(".")
        for prefix, group_values in [
            (group, values.get(group)),
            *(parts if group == "data" else ()),
        ]:
            if isinstance(group_values, Mapping) and group_values.get(name):
                yield f"{prefix}.{name}", group_values[name]


def _entry(values: Mapping[str, Any], key: str) -> Any:
    """Return the mapping that contains the last part of a dotted key."""
    for part in key.split(".")[:-1]:
        values = values[part]
    return values


def with_digests(values: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of a resolved config in which digests replace the paths of its inputs."""
    replaced: dict[str, Any] = copy.deepcopy(dict(values))
    for key, digest in digests.items():
        if isinstance(replaced.get(key.partition(".")[0]), Mapping):
            _entry(replaced, key)[key.rpartition(".")[2]] = digest
    return replaced


def write_inputs(values: Mapping[str, Any], folder: Path) -> None:
    """Write the launch folder and the input digests of a run into its folder."""
    folders = {"launch_folder": os.getcwd(), "run_folder": str(folder.absolute())}
    write_json(folder / INPUTS_FILE, {**folders, "digests": content_digests(values)})


def add_missing(values: dict[str, Any], current_values: Mapping[str, Any] | None = None) -> None:
    """Add options that the resolved config of an earlier version lacks.

    Earlier versions did not add special tokens to documents. This matters only with a given
    tokenizer.
    """
    data = values.get("data")
    if not isinstance(data, Mapping) or "special_tokens" in data:
        return
    registry.import_options()
    data_class = registry.registered_targets().get(str(data.get("_target_")))
    if data_class is None or not any(it.name == "special_tokens" for it in fields(data_class)):
        return
    current_data = (current_values or {}).get("data")
    if data.get("tokenizer") is not None:
        values["data"] = {**data, "special_tokens": False}
    elif isinstance(current_data, Mapping) and "special_tokens" in current_data:
        values["data"] = {**data, "special_tokens": current_data["special_tokens"]}


def recorded_digests(folder: Path) -> Mapping[str, str]:
    """Return the digests that a run folder records; empty for folders of earlier versions."""
    digests: dict[str, str] = read_json(folder / INPUTS_FILE).get("digests", {})
    return digests


def launch_folders(folder: Path) -> list[Path]:
    """Return the folders that relative paths of a run may refer to, in order of preference.

    These are the recorded launch folder, the same folder if it has moved together with the run, and
    the working directory.
    """
    recorded = read_json(folder / INPUTS_FILE)
    folders: list[Path] = []
    if {"launch_folder", "run_folder"} <= recorded.keys():
        launch = recorded["launch_folder"]
        folders.append(Path(launch))
        relative = os.path.relpath(recorded["run_folder"], launch)
        parts = Path(relative).parts
        if ".." not in parts and folder.absolute().parts[-len(parts) :] == parts:
            folders.append(folder.absolute().parents[len(parts) - 1])
    return list(dict.fromkeys([*folders, Path.cwd()]))


def check_data(data: object, folder: Path) -> None:
    """Raise ``DataError`` for data files whose content differs from the run in ``folder``.

    Remote files are copied into the cache first.
    """
    if isinstance(data, DataConfig):
        copy_inputs(data)
    expected_digests = recorded_digests(folder)
    values = {"data": asdict(data)} if expected_digests else {}  # type: ignore[call-overload]  # a config is a dataclass
    digests = content_digests(values)
    issues = [
        ConfigIssue(
            key,
            _entry(values, key)[key.rpartition(".")[2]],
            CHANGED_CONTENT,
            f"set {key} to the same files",
        )
        for key in expected_digests
        if key.startswith("data.") and digests.get(key) != expected_digests[key]
    ]
    if issues:
        raise DataError(issues)


def relocate_inputs(
    values: Mapping[str, Any], folder: Path, new_paths: Mapping[str, object]
) -> dict[str, Any]:
    """Return the resolved config of a run with the current paths of its inputs.

    ``new_paths`` contains paths that the user gives instead, by their key. Raises ``ConfigError``
    if their content differs from that of the run.
    """
    expected_digests = recorded_digests(folder)
    relocated = copy.deepcopy(dict(values))
    issues = []
    for key, _ in _input_paths(values):
        entry, name = _entry(relocated, key), key.rpartition(".")[2]
        if key in new_paths:
            entry[name] = new_paths[key]
            digest = _digest(key, entry)
            is_known = not _has_remote(new_paths[key])  # check_data copies remote files
            if is_known and key in expected_digests and digest != expected_digests[key]:
                reason = "no such files" if digest is None else CHANGED_CONTENT
                issues.append(
                    ConfigIssue(key, new_paths[key], reason, f"set {key} to the same files")
                )
            continue
        entry[name] = _find_moved(key, entry, folder, expected_digests.get(key))
    input_keys = dict(_input_paths(values))
    issues += [
        ConfigIssue(key, value, "is not an input path of the run", "remove it")
        for key, value in new_paths.items()
        if key not in input_keys
    ]
    if issues:
        raise ConfigError(issues)
    return relocated


def _find_moved(
    key: str, group_values: Mapping[str, Any], folder: Path, expected_digest: str | None
) -> object:
    """Return the current paths of an input, preferably with the recorded content."""
    name = key.rpartition(".")[2]
    first_existing = None
    for base in launch_folders(folder):
        path = _join_launch_folder(base, group_values[name], folder)
        digest = _digest(key, {**group_values, name: path})
        if digest is not None and digest == (expected_digest or digest):
            return path
        first_existing = first_existing or (path if digest else None)
    return first_existing or group_values[name]


def _join_launch_folder(base: Path, value: object, folder: Path) -> object:
    """Return paths relative to a launch folder, also those inside the recorded one."""
    if isinstance(value, str) and is_remote(value):
        return value
    if isinstance(value, str):
        launch = read_json(folder / INPUTS_FILE).get("launch_folder")
        path = regular_files.expand_home(value)
        if launch is not None and path.is_absolute() and path.is_relative_to(launch):
            path = path.relative_to(launch)
        return str(base / path)
    return (
        [_join_launch_folder(base, it, folder) for it in value]
        if isinstance(value, Sequence)
        else value
    )
