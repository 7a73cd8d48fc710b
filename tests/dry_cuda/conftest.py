"""A process with a fake CUDA device, which trains on fake tensors in place of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fixtures.fake_cuda import UNAVAILABLE

TESTS = Path(__file__).parents[1]


class DryCuda:
    """Client of ``fixtures.dry_cuda_worker``."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def __call__(self, function: str, **arguments: Any) -> dict[str, Any]:
        """Call a function of the worker; its exception fails the test."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # reported below
            print(json.dumps({"call": function, **arguments}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the worker ended: {self._log.read_text('utf-8')[-2000:]}"
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            pytest.fail(f"{function}({arguments}):\n{answer['error']}", pytrace=False)
        return answer


@pytest.fixture(scope="module")
def dry_cuda(
    shared_cache: Path, compiled_extensions: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DryCuda]:
    """Process that answers calls; its cache keeps compiled extensions between sessions."""
    if UNAVAILABLE:
        pytest.skip(UNAVAILABLE)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "SCALEWISE_CACHE": str(shared_cache),
        "OMP_NUM_THREADS": "1",
    }
    log = tmp_path_factory.mktemp("dry_cuda") / "worker.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "fixtures.dry_cuda_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            cwd=log.parent,
        ) as process,
    ):
        yield DryCuda(process, log)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
