"""What ``export`` and ``evaluate`` are given: the folder of a run, and words of ``key=value``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise import inputs
from scalewise.config.near import meant
from scalewise.config.read import part, typed_value
from scalewise.errors import Complaint, ConfigError
from scalewise.objectives import UserModule
from scalewise.run import spec_complaints

if TYPE_CHECKING:
    from scalewise.checkpoints.trained import Trained


def read(
    verb: str, arguments: Sequence[str], defaults: Mapping[str, str], wrong: list[Complaint]
) -> tuple[Path, dict[str, str]]:
    """Returns a run's folder and the options; raises ``ConfigError`` with all that is wrong.

    ``wrong`` holds what the caller has found already, by ``options``.
    """
    folders = [word for word in arguments if "=" not in word or os.path.isdir(word)]
    wrong = [
        *(
            Complaint(key, value, "no such key", meant(key, list(defaults)))
            for key, value in options(arguments).items()
            if key not in (*defaults, *inputs.READERS)
        ),
        *wrong,
    ]
    if len(folders) != 1:
        reason = f"one run at a time, not {len(folders)}" if folders else "no folder given"
        wrong.append(Complaint("", "", reason, f"scalewise {verb} runs/NAME/TIMESTAMP"))
    if wrong:
        raise ConfigError(wrong)
    return Path(folders[0]).expanduser().absolute(), {**defaults, **options(arguments)}


def options(arguments: Sequence[str]) -> dict[str, str]:
    """Returns what was typed as ``key=value``."""
    words = (word for word in arguments if "=" in word and not os.path.isdir(word))
    return dict(word.split("=", 1) for word in words)


def recorded(
    folder: Path,
    step: str = "last",
    given: Mapping[str, str] | None = None,
    *,
    beginning: bool = False,
    reads_data: bool = False,
) -> Trained:
    """Returns a checkpoint of a run with its specs; raises ``ConfigError`` where there is none.

    ``given``: options, among them paths of the run's inputs where they have moved. ``beginning``:
    whether step 0 is asked for, of which no checkpoint is kept. ``reads_data``: whether the caller
    reads the data, which need not be there otherwise.
    """
    from scalewise.checkpoints import trained

    values = inputs.located(trained.resolved(folder), folder, _paths(given or {}))
    try:
        parts = [part(group, values[group]) for group in trained.SPECS]
    except ConfigError as error:
        raise _of_record(folder, error.complaints) from None
    if any(isinstance(spec, UserModule) for spec in parts):
        reason, cure = "is of a module of yours", "load its checkpoint in code of your own"
        raise ConfigError.one("", "", f"{folder} {reason}", cure)
    named = zip(trained.SPECS, parts, strict=True)
    complaints = [
        complaint
        for group, spec in named
        if reads_data or group != "data"
        for complaint in spec_complaints(group, spec)
    ]
    if complaints:
        raise _of_record(folder, complaints)
    told = trained.Trained(folder, None, int(values["seed"]), *parts)
    if beginning:
        return told
    return replace(told, checkpoint=trained.checkpoint(folder, step, told.reads))


def _of_record(folder: Path, complaints: Iterable[Complaint]) -> ConfigError:
    """Returns the error of values in ``resolved.yaml``, which names that file.

    Paths of inputs are left as they are: the file is whole where these have moved.
    """
    file = folder / "resolved.yaml"
    return ConfigError(
        complaint
        if complaint.key in inputs.READERS
        else Complaint("", "", f"{file}: {complaint}", "put a copy of it back")
        for complaint in complaints
    )


def _paths(given: Mapping[str, str]) -> dict[str, object]:
    """Returns the options that are paths of inputs, with values as Hydra reads them."""
    found: dict[str, object] = {}
    for key in inputs.READERS:
        if key in given:
            value = typed_value(key, given[key], f"set {key}=FILE")
            several = key.endswith("paths")
            found[key] = [str(it) for it in _listed(value)] if several else str(value)
    return found


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
