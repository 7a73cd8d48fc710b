"""CLI entry point, ``scalewise COMMAND [overrides]``: command dispatch and exit codes."""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from scalewise import console
from scalewise.commands import usage
from scalewise.commands.usage import COMMANDS
from scalewise.console import print_lines
from scalewise.errors import EXIT_CODES, ScalewiseError, format_value
from scalewise.failures import describe_exception
from scalewise.launch import external_launcher
from scalewise.torch_environment import set_torch_variables

TRACEBACK = "HYDRA_FULL_ERROR"
"""Environment variable that enables tracebacks, as in any Hydra application."""
PATH_ERRORS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
}
"""Error numbers of a path that is not writable, not a folder or too long."""


def command() -> NoReturn:
    """Run the command line and exit the process with its exit code."""
    code = main()
    if external_launcher.is_external_rank():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: a gloo thread that frees a tensor during finalization aborts the process.
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    console.open_standard_streams()
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # no imports from this folder
    set_torch_variables(os.environ)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides profiler warnings
    with console.shield_streams():
        try:
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set for the imports
                signal.signal(signal.SIGINT, signal.default_int_handler)
            return _dispatch(argv)
        except ScalewiseError as error:
            print_lines(*f"scalewise: {error}".split("\n"), stderr=True)
            return error.exit_code
        except KeyboardInterrupt:
            print_lines("scalewise: interrupted", stderr=True)
            return 130
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a Rust panic is a BaseException
            return _print_unexpected(error)


def _print_unexpected(error: BaseException) -> int:
    """Print an unhandled exception in one line and return the exit code."""
    if isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename is not None:
        print_lines(f"scalewise: {format_value(error.filename)}: {error.strerror}", stderr=True)
        return EXIT_CODES["refused"]
    print_lines(f"scalewise: {describe_exception(error)}", stderr=True)
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    elif not isinstance(error, OSError):
        print_lines(f"scalewise: {TRACEBACK}=1 scalewise ... prints the traceback", stderr=True)
    return EXIT_CODES["out_of_memory" if isinstance(error, MemoryError) else "failed"]


def _dispatch(arguments: list[str]) -> int:
    incomplete = external_launcher.adopt_slurm_step(os.environ)
    if _is_completion_request(arguments):
        return _complete(arguments)
    command = arguments[0] if arguments else ""
    if command in ("", "-h", "--help", "help"):
        print_lines(*usage.general_help())
        return 0
    if "--help" in arguments or "-h" in arguments:
        print_lines(*(usage.command_help(command) if command in COMMANDS else usage.general_help()))
        return 0
    if "--version" in arguments:
        print_lines(f"scalewise {_version()}")
        return 0
    if command not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
        print_lines(f"scalewise: unknown command {command!r}; {hint}", stderr=True)
        return 2
    if incomplete is not None and command == "train":
        raise incomplete
    module = {"import": "import_config"}.get(command, command.replace("-", "_"))
    if command == "train" and _only_shows_config(arguments):
        module = "show_config"
    name = f"scalewise.commands.{module}"
    if name not in sys.modules:
        gc.disable()  # imported objects live until exit; collections took 1/6 of a plan
        try:
            importlib.import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    return int(sys.modules[name].main(arguments[1:]))


def _only_shows_config(arguments: Sequence[str]) -> bool:
    flags = {"-c", "--cfg", "-i", "--info"}
    resumes = any(argument.startswith(("resume_sweep=", "retry=")) for argument in arguments)
    return not flags.isdisjoint(arguments) and not resumes


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("scalewise")
    except PackageNotFoundError:
        return "(source checkout, not installed)"


def _is_completion_request(arguments: list[str]) -> bool:
    return bool(arguments) and arguments[0] in ("-sc", "--shell-completion", "--shell_completion")


def _complete(arguments: list[str]) -> int:
    """Print shell completions: commands from a list, overrides from Hydra without the command."""
    line = os.environ.get("COMP_LINE", "")
    program, _, typed = line.partition(" ")
    words = typed.split(" ")
    if arguments[1:] and arguments[1].startswith("query") and len(words) == 1:
        print_lines(" ".join(command for command in COMMANDS if command.startswith(words[0])))
        return 0
    if words[0] == "explain":
        from scalewise.commands import explain

        print_lines(" ".join(explain.completions(words[-1])))
        return 0
    if words[0] in COMMANDS:
        line = " ".join([program, *words[1:]])
        os.environ["COMP_LINE"], os.environ["COMP_POINT"] = line, str(len(line))
    from scalewise.config.app import run_command
    from scalewise.config.command import Command

    try:
        return run_command(Command(), ["-sc", *arguments[1:]])
    except ScalewiseError:  # the command being typed is rejected when it is run
        return 0
