"""``scalewise export RUN``: a trained model in the formats of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise.config.near import meant
from scalewise.config.read import part
from scalewise.errors import Complaint, ConfigError
from scalewise.exports import Form

if TYPE_CHECKING:
    from scalewise.exports.folder import Exported

DEFAULTS = {"to": "", "step": "last", "adapter": Form.merged.value}


def main(arguments: Sequence[str]) -> int:
    """Writes ``RUN/export``, or ``to=FOLDER``, and prints where it is; exit code 0."""
    folder, options = _read(arguments)
    to = Path(options["to"]).expanduser().absolute() if options["to"] else folder / "export"
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError.one("to", str(to), "is there already", "give to=FOLDER, a new one")
    from scalewise.exports import folder as exports

    told = recorded(folder, options["step"])
    lacks = exports.write(told, to, Form(options["adapter"]))
    for line in (f"exported {told.checkpoint.name} of {folder.name}", *lacks, f"result {to}"):
        print(line)
    return 0


def recorded(folder: Path, step: str = "last") -> Exported:
    """Returns a checkpoint of a run with its specs; raises ``ConfigError`` where there is none."""
    from scalewise.exports import folder as exports

    values = exports.resolved(folder)
    found = exports.checkpoint(folder, step)
    model, adapter, data = (part(group, values[group]) for group in exports.SPECS)
    return exports.Exported(folder, found, model, adapter, data, int(values["seed"]))


def _read(arguments: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """Returns the run's folder and the options; raises ``ConfigError`` with all that is wrong."""
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    folders = [word for word in arguments if "=" not in word]
    wrong = [
        Complaint(key, value, "no such key", meant(key, list(DEFAULTS)))
        for key, value in given.items()
        if key not in DEFAULTS
    ]
    options = {**DEFAULTS, **given}
    if options["adapter"] not in set(Form):
        cure = f"choose one of adapter={', '.join(Form)}"
        wrong.append(Complaint("adapter", options["adapter"], "is no form of an export", cure))
    if len(folders) != 1:
        reason = f"one run at a time, not {len(folders)}" if folders else "no folder given"
        wrong.append(Complaint("", "", reason, "scalewise export runs/NAME/TIMESTAMP"))
    if wrong:
        raise ConfigError(wrong)
    return Path(folders[0]).expanduser().absolute(), options
