"""``scalewise export RUN``: a trained model in the formats of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from scalewise.errors import Complaint, ConfigError
from scalewise.exports import Form
from scalewise.output import print_lines
from scalewise.verbs import trained

DEFAULTS = {"to": "", "step": "last", "adapter": Form.merged.value}


def main(arguments: Sequence[str]) -> int:
    """Writes ``RUN/export``, or ``to=FOLDER``, and prints where it is; exit code 0."""
    wrong = []
    form = trained.options(arguments).get("adapter", Form.merged)
    if form not in set(Form):
        cure = f"choose one of adapter={', '.join(Form)}"
        wrong.append(Complaint("adapter", form, "is no form of an export", cure))
    folder, options = trained.read("export", arguments, DEFAULTS, wrong)
    to = Path(options["to"]).expanduser().absolute() if options["to"] else folder / "export"
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError.one("to", str(to), "is there already", "give to=FOLDER, a new one")
    from scalewise.exports import folder as exports

    told = trained.recorded(folder, options["step"])
    with _made(to):
        lacks = exports.write(told, to, Form(options["adapter"]))
    for line in (f"exported step {told.step} of {folder.name}", *lacks, f"result {to}"):
        print_lines(line)
    return 0


@contextmanager
def _made(to: Path) -> Iterator[None]:
    """Makes the folder, and takes a new one away again where nothing came to lie in it."""
    new = not to.exists()
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason, cure = f"cannot be made: {error.strerror}", "give to=FOLDER where you may write"
        raise ConfigError.one("to", str(to), reason, cure) from None
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if new:
                to.rmdir()
        raise
