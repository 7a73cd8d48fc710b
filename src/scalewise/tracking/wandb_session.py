"""W&B run of a job during training: never prompts, logs window means, always finishes."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal, cast

from scalewise.errors import ScalewiseError
from scalewise.redaction import redact, redact_tree
from scalewise.run_config import RunConfig
from scalewise.tracking.connection import base_url, has_key, hide_credentials, is_answering
from scalewise.tracking.tables import (
    Row,
    average_window,
    define_metrics,
    predicted_metrics,
    summary_metrics,
)
from scalewise.tracking.wandb_sweeps import flat_keys
from scalewise.tracking_config import WandbConfig, WandbMode

logger = logging.getLogger(__name__)

INIT_TIMEOUT = 5.0
"""Seconds for the creation of the run."""
FINISH_TIMEOUT = 5.0
"""Seconds for finishing the run; ``scalewise publish`` uploads the rest from disk."""

SINGLE_RUN_VARIABLES = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME")
"""Variables that identify one run, set by a W&B agent or a batch script."""


class NullSession:
    """Session of an untracked job, which ignores all calls; base class of the other sessions."""

    facts: Mapping[str, object] = {"mode": "disabled", "url": None, "folder": None}
    """Facts of the W&B run for ``status.json``."""

    def log_plan(self, plan: Mapping[str, object]) -> None:
        """Log the predictions in ``plan.json``."""

    def log(self, rows: list[Row]) -> None:
        """Log one window of steps."""

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """Log the content of ``summary.json``."""

    def finish(self, status: str, reason: str, exit_code: int) -> None:
        """Finish the run; called for every outcome."""


class WandbSession(NullSession):
    """A W&B run.

    Args:
        run: Config of the job.
        folder: Run folder.
        mode: Online or offline.
        facts: Further entries of the W&B config.
    """

    def __init__(
        self, run: RunConfig, folder: Path, mode: WandbMode, facts: Mapping[str, object]
    ) -> None:
        import wandb

        tracking, environment = run.tracking, os.environ
        defaults = {
            "project": ("WANDB_PROJECT", tracking.project),
            "entity": ("WANDB_ENTITY", tracking.entity),
            "group": ("WANDB_RUN_GROUP", tracking.group),
            "name": ("WANDB_NAME", run.name),
            "notes": ("WANDB_NOTES", tracking.notes or run.question or None),
        }
        arguments = {
            key: value for key, (name, value) in defaults.items() if name not in environment
        }
        if facts.get("attempt", 1) != 1:
            arguments["id"] = secrets.token_hex(4)  # WANDB_RUN_ID is the id of the first attempt
        self._run = wandb.init(
            **cast(dict[str, Any], arguments),
            dir=environment.get("WANDB_DIR") or str(folder),
            mode=cast(Literal["online", "offline", "disabled"], mode.value),
            job_type=environment.get("WANDB_JOB_TYPE", "train"),
            tags=[*_run_tags(environment), *tracking.tags, *_part_tags(run)],
            config=redact_tree({**_without_flat_keys(run.as_dict()), **facts}),
            settings=wandb.Settings(
                x_transaction_log_flush_interval=1.0,  # keeps the data of a killed run
                finish_timeout=FINISH_TIMEOUT,
                init_timeout=INIT_TIMEOUT,
                silent=True,
                show_errors=True,
            ),
        )
        define_metrics(self._run)
        self.facts = {
            "mode": mode.value,
            "id": self._run.id,
            "entity": self._run.entity or None,
            "project": self._run.project,
            "group": self._run.group or None,
            "url": self._run.url if mode is WandbMode.online else None,
            "folder": _display_path(Path(self._run.dir).parent),
            "resumed_from": facts.get("resumed_from"),
        }

    def log_plan(self, plan: Mapping[str, object]) -> None:
        """Write the predictions to the summary of the W&B run, next to the measurements."""
        self._run.summary.update(predicted_metrics(plan))

    def log(self, rows: list[Row]) -> None:
        """Log the mean of each metric over the window at its last step."""
        self._run.log(average_window(rows))

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """Write the values of ``summary.json`` to the W&B summary, under ``final/``."""
        self._run.summary.update(summary_metrics(summary))

    def finish(self, status: str, reason: str, exit_code: int) -> None:
        """Finish the run with its exit code, so that W&B marks failures."""
        self._run.summary.update({"status": status, "reason": redact(reason)})
        self._run.finish(exit_code=exit_code)


class GuardedSession(NullSession):
    """Wrapper of a session that disables it after its first error, so that training continues."""

    def __init__(self, session: NullSession) -> None:
        self._session, self._failed = session, False
        self.facts = session.facts

    def log_plan(self, plan: Mapping[str, object]) -> None:
        """Log the predictions in ``plan.json``."""
        self._call_guarded(self._session.log_plan, plan)

    def log(self, rows: list[Row]) -> None:
        """Log one window of steps."""
        self._call_guarded(self._session.log, rows)

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """Log the content of ``summary.json``."""
        self._call_guarded(self._session.log_summary, summary)

    def finish(self, status: str, reason: str, exit_code: int) -> None:
        """Finish the run within ``FINISH_TIMEOUT``."""
        self._call_guarded(self._session.finish, status, reason, exit_code)

    def _call_guarded(self, send: Callable[..., None], *content: object) -> None:
        if self._failed:
            return
        try:
            send(*content)
        except ScalewiseError:
            raise
        except Exception as error:  # no tracking error may stop the training
            self._failed = True
            logger.info(
                f"W&B tracking stopped ({_short_text(error)}); the run folder has all the data"
            )


def clear_run_id(environment: MutableMapping[str, str]) -> None:
    """Remove the variables that identify one run, so that each job gets its own run."""
    for name in SINGLE_RUN_VARIABLES:
        environment.pop(name, None)


def open_session(run: RunConfig, folder: Path, facts: Mapping[str, object]) -> NullSession:
    """Open the tracking session of a job.

    If the server rejects the run, a line is printed and mode ``offline`` is used; training goes
    on.

    Args:
        run: Config of the job.
        folder: Run folder.
        facts: Further entries of the W&B config.
    """
    # W&B's log files: on a full disk, each line of them would print a traceback.
    logging.raiseExceptions = False
    try:
        if run.tracking.is_enabled:
            hide_credentials()
        mode = choose_mode(run.tracking)
    except Exception as error:  # invalid W&B settings files or variables
        logger.info(f"W&B mode is offline: {_short_text(error)}")
        mode = WandbMode.offline
    for attempt in dict.fromkeys((mode, WandbMode.offline)):
        if mode is WandbMode.disabled:
            break
        try:
            return GuardedSession(WandbSession(run, folder, attempt, facts))
        except Exception as error:  # the client raises many types; the next mode is tried
            logger.info(f"W&B {attempt} mode is unavailable: {_short_text(error)}")
    return NullSession()


def _short_text(error: Exception) -> str:
    return redact(" ".join(str(error).split()))[:200] or type(error).__name__


def choose_mode(tracking: WandbConfig) -> WandbMode:
    """Resolve the mode without letting W&B prompt or wait.

    ``WANDB_MODE`` takes precedence except over ``disabled``. ``auto`` is online if an API key is
    set and the server responds.
    """
    if tracking.requested_mode is not WandbMode.auto:
        return tracking.requested_mode
    server = base_url()
    return WandbMode.online if has_key(server) and is_answering(server) else WandbMode.offline


def _without_flat_keys(config: Mapping[str, object]) -> dict[str, object]:
    """Move config entries that a W&B sweep overwrites with its flat keys to ``parts``.

    A sweep sets flat keys such as ``precision: bf16_mixed`` in the config, which would replace the
    group ``precision: {compute: ...}``.
    """
    overwritten = {key: part for key, part in config.items() if key in flat_keys()}
    if not overwritten:
        return dict(config)
    other_entries = {key: part for key, part in config.items() if key not in overwritten}
    return {**other_entries, "parts": overwritten}


def _run_tags(environment: Mapping[str, str]) -> list[str]:
    return [tag for tag in environment.get("WANDB_TAGS", "").split(",") if tag]


def _part_tags(run: RunConfig) -> list[str]:
    keys = ("model", "parallelism", "precision", "optimizer", "experiment")
    return [run.choices[key] for key in keys if key in run.choices]


def _display_path(path: Path) -> str:
    """Path relative to the launch folder, if it is below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
