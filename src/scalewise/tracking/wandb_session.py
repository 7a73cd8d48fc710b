"""The Weights & Biases run of a job: begun without a prompt, fed in windows, always finished."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from scalewise.console import print_lines
from scalewise.errors import ScalewiseError
from scalewise.redaction import redact, redact_tree
from scalewise.run_config import RunConfig
from scalewise.tracking.config import WandbConfig, WandbMode
from scalewise.tracking.connection import base_url, has_key, hide_credentials, is_answering
from scalewise.tracking.metric_names import METRICS
from scalewise.tracking.wandb_sweeps import flat_keys

INIT_WAIT = 5.0
"""Seconds that a server which took the connection has to take the run."""
FINISH_WAIT = 5.0
"""Seconds that finishing may take; what is left is on disk, and ``publish`` sends it."""

ONE_RUN = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME")
"""Variables that say which run a process is: an agent or a batch script sets them."""

Row = dict[str, Any]


class NullSession:
    """No tracker. The other sessions do something in each of these places."""

    facts: Mapping[str, object] = {"mode": "disabled", "url": None, "folder": None}

    def log_plan(self, plan: Mapping[str, object]) -> None:
        """Sends what is foreseen of the run: the content of ``plan.json``."""

    def log(self, rows: list[Row]) -> None:
        """Sends one window of steps."""

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """Sends what stays of the run: the content of ``summary.json``."""

    def finish(self, status: str, reason: str, exit_code: int) -> None:
        """Ends the run; called on every ending."""


class WandbSession(NullSession):
    """One W&B run."""

    def __init__(
        self, run: RunConfig, folder: Path, mode: WandbMode, facts: Mapping[str, object]
    ) -> None:
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
        if facts.get("attempt", 1) != 1:
            given["id"] = secrets.token_hex(4)  # WANDB_RUN_ID names the first attempt
        self._run = wandb.init(
            **cast(dict[str, Any], given),
            dir=environment.get("WANDB_DIR") or str(folder),
            mode=cast(Literal["online", "offline", "disabled"], mode.value),
            job_type=environment.get("WANDB_JOB_TYPE", "train"),
            tags=[*_run_tags(environment), *tracking.tags, *_part_tags(run)],
            config=redact_tree({**_without_flat_keys(run.as_dict()), **facts}),
            settings=wandb.Settings(
                x_transaction_log_flush_interval=1.0,  # else a killed run leaves nothing
                finish_timeout=FINISH_WAIT,
                init_timeout=INIT_WAIT,
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
            "folder": _paste_path(Path(self._run.dir).parent),
            "resumed_from": facts.get("resumed_from"),
        }

    def log_plan(self, plan: Mapping[str, object]) -> None:
        """Writes what is foreseen into the run's summary, where what was measured will stand."""
        self._run.summary.update(predicted_metrics(plan))

    def log(self, rows: list[Row]) -> None:
        """Sends the mean of each metric over the window, at the window's last step."""
        self._run.log(average_window(rows))

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """Writes the summary's numbers under ``final/``."""
        self._run.summary.update(summary_metrics(summary))

    def finish(self, status: str, reason: str, exit_code: int) -> None:
        """Ends the run with its exit code, so that W&B tells failure from success."""
        self._run.summary.update({"status": status, "reason": redact(reason)})
        self._run.finish(exit_code=exit_code)


class GuardedSession(NullSession):
    """Another session, whose troubles never reach the training: it is said once and let go."""

    def __init__(self, session: NullSession) -> None:
        self._session, self._failed = session, False
        self.facts = session.facts

    def log_plan(self, plan: Mapping[str, object]) -> None:
        """Sends what is foreseen of the run."""
        self._call_guarded(self._session.log_plan, plan)

    def log(self, rows: list[Row]) -> None:
        """Sends one window of steps."""
        self._call_guarded(self._session.log, rows)

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """Sends what stays of the run."""
        self._call_guarded(self._session.log_summary, summary)

    def finish(self, status: str, reason: str, exit_code: int) -> None:
        """Ends the run, in time bounded by ``FINISH_WAIT``."""
        self._call_guarded(self._session.finish, status, reason, exit_code)

    def _call_guarded(self, send: Callable[..., None], *content: object) -> None:
        if self._failed:
            return
        try:
            send(*content)
        except ScalewiseError:
            raise
        except Exception as error:  # a tracker, whatever ails it, must not end a training
            self._failed = True
            print_lines(f"W&B is lost ({_short_text(error)}); the run's folder holds all")


def clear_run_id(environment: MutableMapping[str, str]) -> None:
    """Removes what names one run, so that each job of a sweep becomes a run of its own."""
    for name in ONE_RUN:
        environment.pop(name, None)


def define_metrics(run: Any) -> None:
    """Makes the optimizer step the axis of every metric, and the lowest loss the one that stays."""
    run.define_metric("step")
    for key in METRICS:
        if key != "step":
            summary = "min" if key.endswith("/loss") else "last"
            run.define_metric(key, step_metric="step", summary=summary)


def average_window(rows: Sequence[Row]) -> Row:
    """Returns one row of a window of steps: means of what a step measures, else the last value.

    What a user's module logs by names of its own goes along.
    """
    sent: Row = {}
    for key in dict.fromkeys([*METRICS, *(key for row in rows for key in row)]):
        known = [row[key] for row in rows if row.get(key) is not None]
        if known:
            mean = key.startswith(("train/loss", "train/grad", "throughput/", "time/"))
            sent[key] = sum(known) / len(known) if mean else known[-1]
    return sent


def summary_metrics(summary: Mapping[str, Any]) -> Row:
    """Returns the numbers of a ``summary.json`` by their keys at W&B."""
    rest = {key: value for key, value in summary.items() if key not in ("metrics", "notes")}
    return {f"final/{key}": value for key, value in {**summary["metrics"], **rest}.items()}


def predicted_metrics(plan: Mapping[str, Any]) -> Row:
    """Returns the numbers of a ``plan.json`` by their keys at W&B."""
    return {key: value for key, value in plan.items() if key.startswith("plan/")}


def open_session(run: RunConfig, folder: Path, facts: Mapping[str, object]) -> NullSession:
    """Returns the tracker of a job. ``facts`` are further entries of its config.

    A server that refuses the run costs a line and the online mode, never the training.
    """
    try:
        if run.tracking.is_enabled:
            hide_credentials()
        mode = choose_mode(run.tracking)
    except Exception as error:  # W&B's settings files and variables may hold anything
        print_lines(f"W&B goes offline: {_short_text(error)}")
        mode = WandbMode.offline
    for attempt in dict.fromkeys((mode, WandbMode.offline)):
        if mode is WandbMode.disabled:
            break
        try:
            return GuardedSession(WandbSession(run, folder, attempt, facts))
        except Exception as error:  # the client raises many kinds; the next mode is tried
            print_lines(f"W&B {attempt} is not to be had: {_short_text(error)}")
    return NullSession()


def _short_text(error: Exception) -> str:
    return redact(" ".join(str(error).split()))[:200] or type(error).__name__


def choose_mode(tracking: WandbConfig) -> WandbMode:
    """Returns the mode to use, before W&B could prompt or wait.

    ``WANDB_MODE`` wins over all but ``disabled``; ``auto`` is online where a key is found and the
    server answers.
    """
    if tracking.requested_mode is not WandbMode.auto:
        return tracking.requested_mode
    server = base_url()
    return WandbMode.online if has_key(server) and is_answering(server) else WandbMode.offline


def _without_flat_keys(config: Mapping[str, object]) -> dict[str, object]:
    """Returns a config in which nothing is lost to the flat keys of a W&B sweep.

    The sweep's ``precision: bf16_mixed``, by which its search knows the run, would take the place
    of our ``precision: {compute: ...}``: that is then found under ``parts``.
    """
    taken = {key: part for key, part in config.items() if key in flat_keys()}
    if not taken:
        return dict(config)
    return {**{key: part for key, part in config.items() if key not in taken}, "parts": taken}


def _run_tags(environment: Mapping[str, str]) -> list[str]:
    return [tag for tag in environment.get("WANDB_TAGS", "").split(",") if tag]


def _part_tags(run: RunConfig) -> list[str]:
    keys = ("model", "parallelism", "precision", "optimizer", "experiment")
    return [run.choices[key] for key in keys if key in run.choices]


def _paste_path(path: Path) -> str:
    """Returns a path to paste where the run was started."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
