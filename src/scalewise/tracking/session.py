"""The Weights & Biases run of a job: begun without a prompt, fed in windows, always finished."""

from __future__ import annotations

import netrc
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from scalewise.errors import ScalewiseError
from scalewise.run import Run
from scalewise.tracking.names import METRICS
from scalewise.tracking.spec import Mode, Wandb

SERVER_WAIT = 1.5
"""Seconds to wait for the server before a run goes offline."""
INIT_WAIT = 10.0
"""Seconds that a server which took the connection has to take the run."""
FINISH_WAIT = 30.0
"""Seconds that finishing may take when the server has gone; what is left is on disk."""

EARLIER_HOST = "api.wandb.ai"
"""The hosted service's name before it moved; the client still takes a login for it."""

Row = dict[str, Any]


class Session:
    """No tracker. The other sessions do something in each of these places."""

    facts: Mapping[str, object] = {"mode": "disabled", "url": None, "folder": None}

    def log(self, rows: list[Row]) -> None:
        """Sends one window of steps."""

    def summarize(self, summary: Mapping[str, object]) -> None:
        """Sends what stays of the run."""

    def finish(self, exit_code: int) -> None:
        """Ends the run; called on every ending."""


class WandbSession(Session):
    """One W&B run."""

    def __init__(self, run: Run, folder: Path, mode: Mode, facts: Mapping[str, object]) -> None:
        import wandb

        tracking, environment = run.tracking, os.environ
        wanted = {
            "project": ("WANDB_PROJECT", tracking.project),
            "entity": ("WANDB_ENTITY", tracking.entity),
            "group": ("WANDB_RUN_GROUP", tracking.group),
            "name": ("WANDB_NAME", run.name),
            "notes": ("WANDB_NOTES", tracking.notes or run.question or None),
        }
        given = {key: value for key, (name, value) in wanted.items() if name not in environment}
        self._run = wandb.init(
            **cast(dict[str, Any], given),
            dir=str(folder),
            mode=cast(Literal["online", "offline", "disabled"], mode.value),
            job_type="train",
            tags=[*tracking.tags, *_part_tags(run)],
            config={**run.as_dict(), **facts},
            settings=wandb.Settings(
                x_transaction_log_flush_interval=1.0,  # else a killed run leaves nothing
                finish_timeout=FINISH_WAIT,
                init_timeout=INIT_WAIT,
                silent=True,
                show_errors=True,
            ),
        )
        self._run.define_metric("step")
        for key in METRICS:
            if key != "step":
                lowest = key.endswith("/loss")
                summary = "min" if lowest else "last"
                self._run.define_metric(key, step_metric="step", summary=summary)
        self.facts = {
            "mode": mode.value,
            "id": self._run.id,
            "url": self._run.url if mode is Mode.online else None,
            "folder": _from_here(Path(self._run.dir).parent),
        }

    def log(self, rows: list[Row]) -> None:
        """Sends the mean of each metric over the window, at the window's last step."""
        last = rows[-1]
        sent: Row = {}
        for key in METRICS:
            known = [row[key] for row in rows if row.get(key) is not None]
            if known:
                averaged = key.startswith(("train/loss", "train/grad", "throughput/", "time/"))
                sent[key] = sum(known) / len(known) if averaged else known[-1]
        self._run.log({**sent, "step": last["step"]})

    def summarize(self, summary: Mapping[str, object]) -> None:
        """Writes the summary's numbers under ``final/``."""
        metrics = cast(Mapping[str, object], summary["metrics"])
        rest = {key: value for key, value in summary.items() if key != "metrics"}
        self._run.summary.update({f"final/{key}": value for key, value in metrics.items()})
        self._run.summary.update({f"final/{key}": value for key, value in rest.items()})

    def finish(self, exit_code: int) -> None:
        """Ends the run with its exit code, so that W&B tells failure from success."""
        self._run.finish(exit_code=exit_code)


class Shielded(Session):
    """Another session, whose troubles never reach the training: it is said once and let go."""

    def __init__(self, session: Session) -> None:
        self._session, self._lost = session, False
        self.facts = session.facts

    def log(self, rows: list[Row]) -> None:
        """Sends one window of steps."""
        self._try(self._session.log, rows)

    def summarize(self, summary: Mapping[str, object]) -> None:
        """Sends what stays of the run."""
        self._try(self._session.summarize, summary)

    def finish(self, exit_code: int) -> None:
        """Ends the run, in time bounded by ``FINISH_WAIT``."""
        self._try(self._session.finish, exit_code)

    def _try(self, send: Callable[[Any], None], content: object) -> None:
        if self._lost:
            return
        try:
            send(content)
        except ScalewiseError:
            raise
        except Exception as error:  # a tracker, whatever ails it, must not end a training
            self._lost = True
            print(f"W&B is lost ({_short(error)}); the run's folder holds all", flush=True)


def open_session(run: Run, folder: Path, facts: Mapping[str, object]) -> Session:
    """Returns the tracker of a job. ``facts`` are further entries of its config.

    A server that refuses the run costs a line and the online mode, never the training.
    """
    try:
        mode = decide_mode(run.tracking)
    except Exception as error:  # W&B's settings files and variables may hold anything
        print(f"W&B goes offline: {_short(error)}", flush=True)
        mode = Mode.offline
    for attempt in dict.fromkeys((mode, Mode.offline)):
        if mode is Mode.disabled:
            break
        try:
            return Shielded(WandbSession(run, folder, attempt, facts))
        except Exception as error:  # the client raises many kinds; the next mode is tried
            print(f"W&B {attempt} is not to be had: {_short(error)}", flush=True)
    return Session()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def decide_mode(tracking: Wandb) -> Mode:
    """Returns the mode to use, before W&B could prompt or wait.

    ``WANDB_MODE`` wins; ``auto`` is online where a key is found and the server answers.
    """
    if tracking.wanted is not Mode.auto:
        return tracking.wanted
    server = base_url()
    return Mode.online if has_key(server) and answers(server) else Mode.offline


def base_url() -> str:
    """Returns the server that W&B would speak to: ``WANDB_BASE_URL``, else its settings files."""
    import wandb

    settings = wandb.Settings()
    settings.update_from_system_settings()
    settings.update_from_env_vars(dict(os.environ))
    return str(settings.base_url)


def has_key(server: str) -> bool:
    """Returns whether the environment or a netrc file holds a key for ``server``."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    hosts = [urlsplit(server).hostname or ""]
    if server == str(wandb.Settings().base_url):
        hosts.append(EARLIER_HOST)
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        known = netrc.netrc(str(file))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(known.authenticators(host) is not None for host in hosts)


def answers(server: str, wait: float = SERVER_WAIT) -> bool:
    """Returns whether ``server`` takes a connection within ``wait`` seconds, DNS included."""
    parts = urlsplit(server)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # no number: the client will say so
        return False
    reached = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname, port), timeout=wait).close()
        except OSError:
            return
        reached.set()

    thread = threading.Thread(target=connect, daemon=True)  # a name server may never answer
    thread.start()
    thread.join(wait)
    return reached.is_set()


def _part_tags(run: Run) -> list[str]:
    keys = ("model", "parallelism", "precision", "optimizer", "experiment")
    return [run.choices[key] for key in keys if key in run.choices]


def _from_here(path: Path) -> str:
    """Returns a path to paste where the run was started."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
