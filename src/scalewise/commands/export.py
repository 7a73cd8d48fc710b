"""``scalewise export RUN``: a trained model in the formats of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalewise.commands import trained
from scalewise.console import print_lines
from scalewise.errors import ConfigIssue
from scalewise.export import AdapterExport

DEFAULTS = {"to": "", "step": "last", "adapter": AdapterExport.merged.value}


def main(arguments: Sequence[str]) -> int:
    """Writes ``RUN/export``, or ``to=FOLDER``, and prints where it is; exit code 0."""
    wrong = []
    form = trained.parse_options(arguments).get("adapter", AdapterExport.merged)
    if form not in set(AdapterExport):
        fix = f"choose one of adapter={', '.join(AdapterExport)}"
        wrong.append(ConfigIssue("adapter", form, "is no form of an export", fix))
    folder, options = trained.read_arguments("export", arguments, DEFAULTS, wrong)
    to = Path(options["to"]).expanduser().absolute() if options["to"] else folder / "export"
    from scalewise.export import hf_export as exports
    from scalewise.export.staging import check_target_free

    check_target_free(to)
    told = trained.load_trained(folder, options["step"], options)
    lacks = exports.write_export(told, to, AdapterExport(options["adapter"]))
    for line in (f"exported step {told.step} of {folder}", *lacks, f"result {to}"):
        print_lines(line)
    return 0
