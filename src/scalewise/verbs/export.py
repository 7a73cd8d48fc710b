"""``scalewise export RUN``: a trained model in the formats of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalewise.errors import Complaint
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
    from scalewise.exports import folder as exports
    from scalewise.exports.staging import check_free

    check_free(to)
    told = trained.recorded(folder, options["step"], options)
    lacks = exports.write(told, to, Form(options["adapter"]))
    for line in (f"exported step {told.step} of {folder}", *lacks, f"result {to}"):
        print_lines(line)
    return 0
