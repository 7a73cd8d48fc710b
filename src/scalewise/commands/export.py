"""``scalewise export``: a trained model in Hugging Face format, or a config of another library."""

from __future__ import annotations

from collections.abc import Sequence

from scalewise import regular_files
from scalewise.commands import export_config, run_arguments
from scalewise.console import print_lines
from scalewise.errors import ConfigIssue
from scalewise.export import AdapterExport, check_target_free
from scalewise.interop.translation import LIBRARIES

DEFAULTS = {"to": "", "step": "last", "adapter": AdapterExport.merged.value}


def main(arguments: Sequence[str]) -> int:
    """Write the model to ``RUN/export`` or ``to=FOLDER`` and print the path; return the exit code.

    ``accelerate`` or ``deepspeed`` instead of a folder print the config of a composed run.
    """
    if arguments and arguments[0] in LIBRARIES:
        return export_config.export_config(arguments[0], list(arguments[1:]))
    issues = []
    adapter_format = run_arguments.parse_options(arguments).get("adapter", AdapterExport.merged)
    if adapter_format not in set(AdapterExport):
        fix = f"choose one of adapter={', '.join(AdapterExport)}"
        issues.append(ConfigIssue("adapter", adapter_format, "is not an export format", fix))
    folder, options = run_arguments.read_arguments("export", arguments, DEFAULTS, issues)
    target = (
        regular_files.expand_home(options["to"]).absolute() if options["to"] else folder / "export"
    )
    from scalewise.export import hf_export as exports

    check_target_free(target)
    trained_run = run_arguments.load_trained(folder, options["step"], options)
    notes = exports.write_export(trained_run, target, AdapterExport(options["adapter"]))
    for line in (f"exported step {trained_run.step} of {folder}", *notes, f"result {target}"):
        print_lines(line)
    return 0
