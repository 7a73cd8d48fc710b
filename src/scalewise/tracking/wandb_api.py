"""Weights & Biases outside of a run: what it has of one, one opened again, a sweep made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from scalewise.errors import ScalewiseError
from scalewise.redaction import redact_tree
from scalewise.tracking.connection import (
    ANSWER_WAIT,
    base_url,
    call_with_timeout,
    is_answering,
    require_answer,
    server_error_text,
    wandb_client,
)
from scalewise.tracking.wandb_session import define_metrics

UPLOAD_WAIT = 60.0
"""Seconds that one small file may take."""
SYNC_WAIT = 300.0
"""Seconds that ``wandb sync`` may take for one run."""

T = TypeVar("T")
TRIES = {"GRAPHQL": "2", "FILE_STREAM": "3", "FILE_TRANSFER": "3"}
"""How often the client tries again, where the environment does not say."""
OF_A_RUN = ("MODE", "RUN_ID", "RUN_GROUP", "NAME", "NOTES", "TAGS", "JOB_TYPE", "RESUME", "DIR")
"""Variables that are about a run to be made: those that are sent here were made before."""


class WandbServer:
    """One server and one account."""

    def __init__(self) -> None:
        """Raises as :func:`connected` does."""
        self.url = base_url()
        self._api = wandb_client()
        self.account = str(self._api.default_entity)

    def require_answer(self) -> None:
        """Raises ``ScalewiseError`` where nobody takes a connection any more."""
        require_answer(self.url)

    def find_run(self, path: str) -> Any:
        """Returns the run at ``entity/project/id`` as the server has it; None where it has none."""
        from wandb.errors import CommError

        self._api.flush()  # it keeps what it has once seen
        try:
            return self._request(lambda: self._api.run(path))
        except CommError as error:
            if isinstance(error.exc, ValueError):  # it answered, and there is none
                return None
            raise ScalewiseError(server_error_text(error)) from None

    def _request(self, request: Callable[[], T], timeout: float = ANSWER_WAIT) -> T:
        return call_with_timeout(self.url, request, timeout)

    def has_artifact(self, name: str) -> bool:
        """Returns whether ``entity/project/name:alias`` is there."""
        try:
            return bool(self._request(lambda: self._api.artifact_exists(name)))
        except ScalewiseError:
            raise
        except Exception as error:  # the client raises many kinds
            raise ScalewiseError(server_error_text(error)) from None

    def upload_files(self, run: Any, folder: Path, names: Iterable[str]) -> None:
        """Uploads files of ``folder`` to a run that ``find_run`` returned."""
        for name in names:
            try:
                send = partial(run.upload_file, str(folder / name), root=str(folder))
                self._request(send, UPLOAD_WAIT)
            except ScalewiseError:
                raise
            except Exception as error:  # the client raises many kinds
                if not isinstance(getattr(error, "exc", error), IndexError):  # not listed yet
                    raise ScalewiseError(server_error_text(error)) from None

    def sync_log(self, log: Path, entity: str, project: str) -> None:
        """Sends the transaction log of a run that the server has nothing of.

        Of one that it knows all rows would come a second time. The client ends well, and marks
        the log as sent, whether the server took it or not: ask ``find_run`` afterwards.
        """
        line = [sys.executable, "-P", "-m", "wandb", "sync"]
        line += ["--include-online", "--include-synced"]
        line += ["--entity", entity, "--project", project, str(log)]
        try:
            with TemporaryDirectory(
                prefix="scalewise-sync-"
            ) as scratch:  # for the client's own log
                code, stderr = self._run_sync(line, scratch)
        except subprocess.TimeoutExpired:
            raise ScalewiseError(f"not sent within {SYNC_WAIT:g} s") from None
        errors = [text for text in stderr.splitlines() if "ERROR" in text]
        if errors or code:
            told = errors[-1] if errors else stderr or f"exit code {code}"
            if "error while uploading" in told:
                told = "the server dropped some of it; try again later"
            raise ScalewiseError(server_error_text(told))

    def _run_sync(self, command: list[str], scratch: str) -> tuple[int, str]:
        """Returns exit code and stderr; kills the command if the server stops answering."""
        deadline = time.monotonic() + SYNC_WAIT
        with subprocess.Popen(  # noqa: S603 (a list of our own words)
            command,
            # It says there what went wrong.
            env={**os.environ, "WANDB_SILENT": "false", "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            while True:
                try:
                    _, stderr = process.communicate(timeout=ANSWER_WAIT)
                except subprocess.TimeoutExpired:
                    if time.monotonic() < deadline and is_answering(self.url):
                        continue
                    os.killpg(process.pid, signal.SIGKILL)  # and its service, which has the pipe
                    if time.monotonic() < deadline:
                        require_answer(self.url)
                    raise
                except BaseException:
                    os.killpg(process.pid, signal.SIGKILL)  # it is beyond a terminal's Ctrl-C
                    raise
                return process.returncode, stderr

    def create_sweep(self, config: Mapping[str, Any], entity: str | None, project: str) -> str:
        """Makes a sweep; returns its ``ENTITY/PROJECT/ID``.

        Within ``own_environment``, or tries outlast the client's patience with its service, whose
        end it then waits for without one.
        """
        import wandb

        entity = os.environ.get("WANDB_ENTITY", entity)
        project = os.environ.get("WANDB_PROJECT", project)
        try:
            with redirect_stdout(StringIO()):
                known = wandb.sweep(redact_tree(config), entity=entity, project=project)
        except Exception as error:  # the client raises many kinds
            raise ScalewiseError(f"W&B made no sweep: {server_error_text(error)}") from None
        # The client notes there where the server has put the sweep.
        return f"{os.environ['WANDB_ENTITY']}/{os.environ['WANDB_PROJECT']}/{known}"

    @contextmanager
    def reopen_run(
        self, entity: str, project: str, run_id: str, *, exit_code: int, timeout: float
    ) -> Iterator[Any]:
        """Opens a run again to add to it, as it stands at the server, then ends it so.

        ``timeout``: seconds that sending may take at the end; past them it is a ``ScalewiseError``.
        """
        import wandb

        run = None
        try:
            run = wandb.init(
                entity=entity,
                project=project,
                id=run_id,
                resume="must",
                mode="online",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    finish_timeout=timeout,
                    finish_timeout_raises=True,
                    init_timeout=round(ANSWER_WAIT),
                    x_disable_stats=True,
                    x_disable_meta=True,
                    x_save_requirements=False,
                    disable_git=True,
                    disable_code=True,
                    disable_job_creation=True,
                ),
            )
            define_metrics(run)
            yield run
            self._request(partial(run.finish, exit_code=exit_code), timeout)
        except Exception as error:  # the client raises many kinds
            if run is not None and wandb.run is run and is_answering(self.url):
                with suppress(Exception):
                    self._request(partial(run.finish, exit_code=exit_code))
            if isinstance(error, ScalewiseError):
                raise
            raise ScalewiseError(server_error_text(error)) from None


@contextmanager
def wandb_environment() -> Iterator[None]:
    """Keeps the client quick to give up, and what it leaves on disk in a folder that goes."""
    before = dict(os.environ)
    for name in OF_A_RUN:
        os.environ.pop(f"WANDB_{name}", None)
    for name, tries in TRIES.items():
        os.environ.setdefault(f"WANDB__{name}_RETRY_MAX", tries)
    os.environ["WANDB_SILENT"] = "true"
    try:
        with TemporaryDirectory(prefix="scalewise-wandb-") as folder:
            os.environ["WANDB_DIR"] = folder
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
