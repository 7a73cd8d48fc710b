"""``scalewise VERB [overrides]``: finds the verb, and turns every ending into an exit code."""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from scalewise import console
from scalewise.commands import usage
from scalewise.commands.usage import VERBS
from scalewise.console import print_lines
from scalewise.errors import EXIT_CODES, ScalewiseError, format_value
from scalewise.failures import describe_exception
from scalewise.launch import external_launcher

TRACEBACK = "HYDRA_FULL_ERROR"
"""Environment variable that asks for tracebacks, as in any Hydra application."""
UNUSABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
}
"""What a path answers with that is somebody else's, read-only, too long or no folder at all."""


def command() -> NoReturn:
    """Ends this process with the exit code of its command line."""
    code = main()
    if external_launcher.is_external_rank():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: a thread of gloo that still gives up a tensor then would abort the process.
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of one command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    console.open_standard_streams()
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # our child processes run no code of this folder
    # Before torch is imported: on a busy processor, threads that spin for each other cost 10x.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of what its profiler has not seen begin
    with console.shield_streams():
        try:
            return _dispatch(given)
        except ScalewiseError as error:
            print_lines(*f"scalewise: {error}".split("\n"), stderr=True)
            return error.exit_code
        except KeyboardInterrupt:
            print_lines("scalewise: interrupted", stderr=True)
            return 130
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of code in Rust is no Exception
            return _print_unexpected(error)


def _print_unexpected(error: BaseException) -> int:
    """Prints an exception that nobody has handled in one line; returns the exit code."""
    if isinstance(error, OSError) and error.errno in UNUSABLE and error.filename is not None:
        print_lines(f"scalewise: {format_value(error.filename)}: {error.strerror}", stderr=True)
        return EXIT_CODES["refused"]
    print_lines(f"scalewise: {describe_exception(error)}", stderr=True)
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    elif not isinstance(error, OSError):
        print_lines(f"scalewise: {TRACEBACK}=1 scalewise ... shows the traceback", stderr=True)
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
        print_lines(*(usage.command_help(command) if command in VERBS else usage.general_help()))
        return 0
    if "--version" in arguments:
        print_lines(f"scalewise {_version()}")
        return 0
    if command not in VERBS:
        import difflib

        close = difflib.get_close_matches(command, VERBS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"verbs: {', '.join(VERBS)}"
        print_lines(f"scalewise: no verb {command!r}; {hint}", stderr=True)
        return 2
    if incomplete is not None and command == "train":
        raise incomplete
    name = f"scalewise.commands.{command.replace('-', '_')}"
    if name not in sys.modules:
        gc.disable()  # what starting makes stays: looking for garbage in it was a sixth of a plan
        try:
            importlib.import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    return int(sys.modules[name].main(arguments[1:]))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("scalewise")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def _is_completion_request(arguments: list[str]) -> bool:
    return bool(arguments) and arguments[0] in ("-sc", "--shell-completion", "--shell_completion")


def _complete(arguments: list[str]) -> int:
    """Answers the shell: verbs ourselves, overrides through Hydra with the verb taken out."""
    line = os.environ.get("COMP_LINE", "")
    program, _, rest = line.partition(" ")
    words = rest.split(" ")
    if arguments[1:] and arguments[1].startswith("query") and len(words) == 1:
        print_lines(" ".join(command for command in VERBS if command.startswith(words[0])))
        return 0
    if words[0] == "explain":
        from scalewise.commands import explain

        print_lines(" ".join(explain.completions(words[-1])))
        return 0
    if words[0] in VERBS:
        line = " ".join([program, *words[1:]])
        os.environ["COMP_LINE"], os.environ["COMP_POINT"] = line, str(len(line))
    from scalewise.config.app import Command, run_command

    return run_command(Command(), ["-sc", *arguments[1:]])
