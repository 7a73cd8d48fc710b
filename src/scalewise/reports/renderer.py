"""Renders Vega-Lite in a process of its own, which may die without taking the caller with it.

The renderer is a JavaScript engine: it aborts where it finds no memory, and fails on standard
streams that are closed. ``python -m scalewise.reports.renderer`` answers a specification, as a line
of JSON, with a line of JSON that holds ``svg`` or ``error``; it ends with its input.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

DEATHS = 2
"""How often the process may die before no more charts are tried."""
PATIENCE = 60.0
"""Seconds that one chart may take."""


class RenderError(Exception):
    """A chart that could not be rendered."""


class ChartRenderer:
    """The process, started by the first chart."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._num_crashes = 0
        self._lock = threading.Lock()

    def svg(self, spec: Mapping[str, Any], version: str) -> str:
        """Returns the SVG of a specification; raises ``RenderError``."""
        line = json.dumps({"spec": spec, "version": version}) + "\n"
        with self._lock:
            if self._num_crashes == DEATHS:
                raise RenderError("the chart renderer has died before")
            process = self._start_process()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(PATIENCE, process.kill)
            timer.daemon = True
            timer.start()
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write(line)
                    process.stdin.flush()
                answer = process.stdout.readline()
            except BaseException:  # a signal: its answer would be taken for that of the next chart
                process.kill()
                self.close()
                raise
            finally:
                timer.cancel()
            if not answer:
                self._num_crashes += 1
                raise RenderError(f"the chart renderer died: {self._find_exit_cause()}")
        told = json.loads(answer)
        if "error" in told:
            raise RenderError(told["error"])
        return str(told["svg"])

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._find_exit_cause()

    def _start_process(self) -> subprocess.Popen[str]:
        if self._process is None:
            try:
                self._process = subprocess.Popen(  # noqa: S603 (a list of our own words)
                    [sys.executable, "-P", "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    encoding="utf-8",
                    process_group=0,  # a terminal's Ctrl-C is for its parent, whose end it notices
                )
            except OSError as error:
                self._num_crashes = DEATHS
                raise RenderError(f"no process for the chart renderer: {error}") from error
        return self._process

    def _find_exit_cause(self) -> str:
        """Ends the process and returns how it died."""
        process, self._process = self._process, None
        assert process is not None
        with suppress(OSError):
            process.__exit__(None, None, None)  # closes the pipes, at which it ends, and waits
        code = process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


RENDERER = ChartRenderer()
svg = RENDERER.svg
atexit.register(RENDERER.close)


def serve_charts(requests: IO[str], answers: IO[str]) -> None:
    """Answers specifications until there are no more."""
    import vl_convert

    for line in requests:
        asked = json.loads(line)
        try:
            found = vl_convert.vegalite_to_svg(asked["spec"], vl_version=asked["version"])
            told = {"svg": found}
        except Exception as error:  # whatever it is, the next chart may do
            told = {"error": " ".join(str(error).split())}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the engine prints is no answer
    serve_charts(sys.stdin, pipe)
    os._exit(0)  # the engine's threads are not waited for
