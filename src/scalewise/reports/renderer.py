"""Vega-Lite renderer in a subprocess, so that its crash does not end the caller.

The renderer embeds a JavaScript engine. It aborts if it cannot allocate memory and fails if a
standard stream is closed. ``python -m scalewise.reports.renderer`` reads one specification per line
as JSON and writes one line of JSON with ``svg`` or ``error``. It exits when its input ends.
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

MAX_CRASHES = 2
"""Crashes after which no further chart is rendered."""
RENDER_TIMEOUT = 60.0
"""Seconds allowed per chart."""


class RenderError(Exception):
    """A chart that could not be rendered."""


class ChartRenderer:
    """Client of the renderer process, which starts with the first chart."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._num_crashes = 0
        self._lock = threading.Lock()

    def svg(self, spec: Mapping[str, Any], version: str) -> str:
        """Render a Vega-Lite specification as SVG; raises :class:`RenderError`."""
        request = json.dumps({"spec": spec, "version": version}) + "\n"
        with self._lock:
            if self._num_crashes == MAX_CRASHES:
                raise RenderError(f"the chart renderer crashed {MAX_CRASHES} times")
            process = self._start_process()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(RENDER_TIMEOUT, process.kill)
            timer.daemon = True
            timer.start()
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write(request)
                    process.stdin.flush()
                answer = process.stdout.readline()
            except (
                BaseException
            ):  # on a signal: the pending answer would be read for the next chart
                process.kill()
                self.close()
                raise
            finally:
                timer.cancel()
            if not answer:
                self._num_crashes += 1
                raise RenderError(f"the chart renderer crashed: {self._close_process()}")
        response = json.loads(answer)
        if "error" in response:
            raise RenderError(response["error"])
        return str(response["svg"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._close_process()

    def _start_process(self) -> subprocess.Popen[str]:
        if self._process is None:
            try:
                self._process = subprocess.Popen(  # noqa: S603 (no shell, no user input)
                    [sys.executable, "-P", "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    encoding="utf-8",
                    process_group=0,  # Ctrl-C reaches the parent only; EOF ends this process
                )
            except OSError as error:
                self._num_crashes = MAX_CRASHES
                raise RenderError(f"cannot start the chart renderer: {error}") from error
        return self._process

    def _close_process(self) -> str:
        """End the process and return its signal name or exit code."""
        process, self._process = self._process, None
        assert process is not None
        with suppress(OSError):
            process.__exit__(None, None, None)  # closes the pipes, which ends it, and waits
        code = process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


RENDERER = ChartRenderer()
svg = RENDERER.svg
atexit.register(RENDERER.close)


def serve_charts(requests: IO[str], answers: IO[str]) -> None:
    """Render specifications until the input ends."""
    import vl_convert

    for line in requests:
        request = json.loads(line)
        try:
            svg_text = vl_convert.vegalite_to_svg(request["spec"], vl_version=request["version"])
            response = {"svg": svg_text}
        except Exception as error:  # one bad chart does not end the process
            response = {"error": " ".join(str(error).split())}
        answers.write(json.dumps(response) + "\n")
        answers.flush()


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the engine must not mix with the answers
    serve_charts(sys.stdin, pipe)
    os._exit(0)  # does not wait for the engine's threads
