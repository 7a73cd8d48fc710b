"""W&B server access outside of training: finding, reopening and uploading runs, and sweeps."""

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
    REQUEST_TIMEOUT,
    base_url,
    call_with_timeout,
    is_answering,
    require_answer,
    server_error_text,
    wandb_client,
)
from scalewise.tracking.tables import define_metrics

UPLOAD_TIMEOUT = 60.0
"""Seconds for the upload of a small file."""
SYNC_TIMEOUT = 300.0
"""Seconds for ``wandb sync`` of one run."""

T = TypeVar("T")
MAX_RETRIES = {"GRAPHQL": "2", "FILE_STREAM": "3", "FILE_TRANSFER": "3"}
"""Default retries of the client by service, unless the environment sets them."""
RUN_VARIABLES = (
    *("MODE", "RUN_ID", "RUN_GROUP", "NAME", "NOTES", "TAGS", "JOB_TYPE", "RESUME", "DIR"),
)
"""Suffixes of ``WANDB_*`` variables for a new run, which must not affect existing ones."""


class WandbServer:
    """Authenticated access to a W&B server.

    Raises the errors of :func:`scalewise.tracking.connection.wandb_client` on creation.
    """

    def __init__(self) -> None:
        self.url = base_url()
        self._api = wandb_client()
        self.account = str(self._api.default_entity)

    def require_answer(self) -> None:
        """Raise ``ScalewiseError`` if the server does not respond."""
        require_answer(self.url)

    def find_run(self, path: str) -> Any:
        """The run ``entity/project/id`` of the server; ``None`` if it does not exist."""
        from wandb.errors import CommError

        self._api.flush()  # clears the cache of the client
        try:
            return self._request(lambda: self._api.run(path))
        except CommError as error:
            if isinstance(error.exc, ValueError):  # the server responded that there is none
                return None
            raise ScalewiseError(server_error_text(error)) from None

    def _request(self, request: Callable[[], T], timeout: float = REQUEST_TIMEOUT) -> T:
        return call_with_timeout(self.url, request, timeout)

    def has_artifact(self, name: str) -> bool:
        """Whether the artifact ``entity/project/name:alias`` exists."""
        try:
            return bool(self._request(lambda: self._api.artifact_exists(name)))
        except ScalewiseError:
            raise
        except Exception as error:  # the client raises many types
            raise ScalewiseError(server_error_text(error)) from None

    def upload_files(self, run: Any, folder: Path, names: Iterable[str]) -> None:
        """Upload files of ``folder`` to a run returned by ``find_run``."""
        for name in names:
            try:
                send = partial(run.upload_file, str(folder / name), root=str(folder))
                self._request(send, UPLOAD_TIMEOUT)
            except ScalewiseError:
                raise
            except Exception as error:  # the client raises many types
                # An IndexError only means that the uploaded file is not listed yet.
                if not isinstance(getattr(error, "exc", error), IndexError):
                    raise ScalewiseError(server_error_text(error)) from None

    def sync_log(self, log: Path, entity: str, project: str) -> None:
        """Upload the transaction log of a run that the server does not have.

        For an existing run, all rows would be duplicated. The client reports success and marks the
        log as synced even if the server rejected it: check with ``find_run`` afterwards.
        """
        command = [sys.executable, "-P", "-m", "wandb", "sync"]
        command += ["--include-online", "--include-synced"]
        command += ["--entity", entity, "--project", project, str(log)]
        try:
            with TemporaryDirectory(prefix="scalewise-sync-") as log_folder:
                code, stderr = self._run_sync(command, log_folder)
        except subprocess.TimeoutExpired:
            raise ScalewiseError(f"wandb sync did not finish within {SYNC_TIMEOUT:g} s") from None
        errors = [text for text in stderr.splitlines() if "ERROR" in text]
        if errors or code:
            message = errors[-1] if errors else stderr or f"exit code {code}"
            if "error while uploading" in message:
                message = "the server rejected part of the data; try again later"
            raise ScalewiseError(server_error_text(message))

    def _run_sync(self, command: list[str], log_folder: str) -> tuple[int, str]:
        """Run a command and return exit code and stderr; kill it if the server stops responding."""
        deadline = time.monotonic() + SYNC_TIMEOUT
        with subprocess.Popen(  # noqa: S603 (no shell)
            command,
            # The client reports errors on stderr only if it is not silent, and logs to TMPDIR.
            env={**os.environ, "WANDB_SILENT": "false", "TMPDIR": log_folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            while True:
                try:
                    _, stderr = process.communicate(timeout=REQUEST_TIMEOUT)
                except subprocess.TimeoutExpired:
                    if time.monotonic() < deadline and is_answering(self.url):
                        continue
                    os.killpg(process.pid, signal.SIGKILL)  # with its service process
                    if time.monotonic() < deadline:
                        require_answer(self.url)
                    raise
                except BaseException:
                    os.killpg(process.pid, signal.SIGKILL)  # its own session gets no Ctrl-C
                    raise
                return process.returncode, stderr

    def create_sweep(self, config: Mapping[str, Any], entity: str | None, project: str) -> str:
        """Create a sweep and return its ``ENTITY/PROJECT/ID``.

        Call it within :func:`wandb_environment`: with the client's default retries, the request may
        hang.
        """
        import wandb

        entity = os.environ.get("WANDB_ENTITY", entity)
        project = os.environ.get("WANDB_PROJECT", project)
        try:
            with redirect_stdout(StringIO()):
                sweep_id = wandb.sweep(redact_tree(config), entity=entity, project=project)
        except Exception as error:  # the client raises many types
            raise ScalewiseError(
                f"cannot create the W&B sweep: {server_error_text(error)}"
            ) from None
        # The client sets these variables to the entity and project that the server chose.
        return f"{os.environ['WANDB_ENTITY']}/{os.environ['WANDB_PROJECT']}/{sweep_id}"

    @contextmanager
    def reopen_run(
        self, entity: str, project: str, run_id: str, *, exit_code: int, timeout: float
    ) -> Iterator[Any]:
        """Resume an existing run to add data, and finish it with ``exit_code``.

        Raises ``ScalewiseError`` if the final upload takes longer than ``timeout`` seconds.
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
                    init_timeout=round(REQUEST_TIMEOUT),
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
        except Exception as error:  # the client raises many types
            if run is not None and wandb.run is run and is_answering(self.url):
                with suppress(Exception):
                    self._request(partial(run.finish, exit_code=exit_code))
            if isinstance(error, ScalewiseError):
                raise
            raise ScalewiseError(server_error_text(error)) from None


@contextmanager
def wandb_environment() -> Iterator[None]:
    """Environment for the client: few retries, and a temporary ``WANDB_DIR``."""
    before = dict(os.environ)
    for name in RUN_VARIABLES:
        os.environ.pop(f"WANDB_{name}", None)
    for name, retries in MAX_RETRIES.items():
        os.environ.setdefault(f"WANDB__{name}_RETRY_MAX", retries)
    os.environ["WANDB_SILENT"] = "true"
    try:
        with TemporaryDirectory(prefix="scalewise-wandb-") as folder:
            os.environ["WANDB_DIR"] = folder
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
