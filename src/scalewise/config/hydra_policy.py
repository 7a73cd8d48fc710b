"""Checks of the ``hydra`` node of a composed config, before Hydra instantiates any part of it.

Hydra calls every ``_target_`` below ``hydra.callbacks``, ``hydra.launcher`` and ``hydra.sweeper``,
every factory of its logging configs, and imports packages on its search path. A config file must
not run code that way, so only the suite's own launchers and sweepers are accepted.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core import utils
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from scalewise.config import registry
from scalewise.config.parse import WOULD_REVEAL
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.redaction import HIDDEN, redact, reveals_secret
from scalewise.typed_override import shell_word

PLUGINS = {
    "launcher": ("hydra_plugins.scalewise_launcher.ScalewiseLauncher",),
    "sweeper": (
        "hydra_plugins.scalewise_sweeper.ScalewiseSweeper",
        "hydra_plugins.scalewise_optuna.OptunaSweeper",
        "hydra_plugins.scalewise_screen.ScreenSweeper",
    ),
}
"""Classes that ``hydra.launcher._target_`` and ``hydra.sweeper._target_`` may name."""

LOG_CLASSES = (
    "logging.FileHandler",
    "logging.Formatter",
    "logging.NullHandler",
    "logging.StreamHandler",
)
"""Classes that a logging config may name."""
LOG_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_JOB_LOG = r"\$\{hydra\.job\.name\}\.log"
_LOG_FILE = re.compile(
    rf"\$\{{hydra\.runtime\.output_dir\}}/(?:\w[\w.-]*|{_JOB_LOG})|hydra-{_JOB_LOG}"
)
_JOB_NAME = re.compile(r"\w[\w.-]*")

FOREIGN_TARGET = "would call code that is not the suite's"
LEAVE_OUT = "leave it out"


@contextmanager
def enforce_policy() -> Iterator[None]:
    """Checks every config that Hydra composes within the block, and its search path.

    Interpolations cannot read secrets of the environment there, and what Hydra saves holds none.
    """
    load, append = ConfigLoaderImpl.load_configuration, ConfigSearchPathImpl.append
    if getattr(load, "checks_hydra_node", False):
        yield
        return

    def load_checked(self: ConfigLoaderImpl, *args: Any, **kwargs: Any) -> DictConfig:
        config = load(self, *args, **kwargs)
        if issues := list(policy_issues(config)):
            raise ConfigError(issues)
        return config

    def append_checked(self: Any, provider: str, path: str, *args: Any, **kwargs: Any) -> None:
        if issues := list(_search_path_issues(provider, path)):
            raise ConfigError(issues)
        append(self, provider, path, *args, **kwargs)

    def save_redacted(cfg: DictConfig, filename: str, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / filename).write_text(redact(OmegaConf.to_yaml(cfg)), "utf-8")

    load_checked.checks_hydra_node = True  # type: ignore[attr-defined]  # marks the replacement
    ConfigLoaderImpl.load_configuration = load_checked  # type: ignore[method-assign]
    ConfigSearchPathImpl.append = append_checked  # type: ignore[method-assign]
    save, utils._save_config = utils._save_config, save_redacted
    OmegaConf.register_new_resolver("oc.env", _environment_value, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        utils._save_config = save
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]
        ConfigSearchPathImpl.append = append  # type: ignore[method-assign]


def policy_issues(config: DictConfig) -> Iterator[ConfigIssue]:
    """Yields each entry of ``config.hydra`` that would call or load foreign code."""
    raw: Any = OmegaConf.to_container(config.hydra, resolve=False)
    for name, value in raw.items():
        key = f"hydra.{name}"
        if name in PLUGINS:
            yield from _plugin_issues(name, value)
        elif name == "callbacks":
            yield from _callback_issues(value)
        elif name in ("job_logging", "hydra_logging"):
            yield from _logging_issues(key, value)
        elif name == "job":
            yield from _job_issues(value)
        elif name != "overrides":  # the lines as typed, which Hydra only records
            yield from _nested_targets(key, value)


def _environment_value(name: str, *default: Any) -> Any:
    """Returns what ``oc.env`` does, but raises ``ValueError`` for a secret, however it is named."""
    if reveals_secret(name, os.environ.get(name, "")):
        raise ValueError(WOULD_REVEAL)
    return oc.env(name, *default)


def _search_path_issues(provider: str, path: str) -> Iterator[ConfigIssue]:
    """Yields that a package would be imported to look for configs in it."""
    typed = provider == "main" or provider.startswith("hydra.searchpath")
    if not typed or not path.startswith("pkg://"):
        return
    known = {
        "scalewise",
        *(e.value.split(".")[0] for e in entry_points(group=registry.ENTRY_POINTS)),
    }
    if re.split(r"[./]", path.removeprefix("pkg://"))[0] not in known:
        fix = "give the folder: 'hydra.searchpath=[file:///path/to/its/conf]'"
        reason = "would import a package that offers no options to the suite"
        yield ConfigIssue("hydra.searchpath", path, reason, fix)


def _plugin_issues(name: str, options: object) -> Iterator[ConfigIssue]:
    """Yields a launcher or sweeper that is not the suite's, and targets in its options.

    ``_recursive_`` is false in the suite's own, so a target that an interpolation brings in later
    stays plain data.
    """
    key, given = f"hydra.{name}", options if isinstance(options, Mapping) else {}
    if (target := given.get("_target_")) not in PLUGINS[name]:
        own = {"launcher": "scalewise", "sweeper": "basic"}[name]
        fix = f"set hydra/{name}={own} instead"
        yield ConfigIssue(f"{key}._target_", target, FOREIGN_TARGET, fix)
    elif (recursive := given.get("_recursive_")) is not False:
        yield ConfigIssue(f"{key}._recursive_", recursive, FOREIGN_TARGET, LEAVE_OUT)
    for option, value in given.items():
        if option in ("_args_", "_partial_"):
            yield ConfigIssue(f"{key}.{option}", value, FOREIGN_TARGET, LEAVE_OUT)
        yield from _nested_targets(f"{key}.{option}", value)


def _callback_issues(value: object) -> Iterator[ConfigIssue]:
    """Yields every callback of Hydra's; the suite has none."""
    entries = value if isinstance(value, Mapping) else {"": value} if value else {}
    fix = "leave it out; a Lightning callback goes under callbacks.NAME._target_"
    for name, entry in entries.items():
        yield ConfigIssue(f"hydra.callbacks.{name}".rstrip("."), entry, FOREIGN_TARGET, fix)


def _logging_issues(key: str, value: object) -> Iterator[ConfigIssue]:
    """Yields what a logging config would construct, import or open beside Hydra's defaults."""
    if isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _logging_issues(f"{key}.{number}", entry)
        return
    if not isinstance(value, Mapping):
        if isinstance(value, str) and (
            "${" in value or "cfg://" in value or ("ext://" in value and value not in LOG_STREAMS)
        ):
            yield ConfigIssue(key, value, "may not be looked up in a logging config", LEAVE_OUT)
        return
    for name, entry in value.items():
        inner = f"{key}.{name}"
        if name in ("()", "factory", "_target_", "."):
            yield ConfigIssue(inner, entry, FOREIGN_TARGET, LEAVE_OUT)
        elif name == "class":
            if entry not in LOG_CLASSES:
                yield ConfigIssue(
                    inner, entry, FOREIGN_TARGET, f"choose one of {', '.join(LOG_CLASSES)}"
                )
        elif name == "filename":
            if not (isinstance(entry, str) and _LOG_FILE.fullmatch(entry)):
                fix = "set " + shell_word(f"{inner}='${{hydra.runtime.output_dir}}/run.log'")
                yield ConfigIssue(inner, entry, "is no file of the run's own folder", fix)
        else:
            yield from _logging_issues(inner, entry)


def _job_issues(job: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """Yields a job name that leads out of a folder, and variables of the environment.

    Some variables name libraries that are loaded.
    """
    if not _JOB_NAME.fullmatch(str(job.get("name"))):
        yield ConfigIssue("hydra.job.name", job["name"], "is no file name", LEAVE_OUT)
    for name, value in (job.get("env_set") or {}).items():
        if reveals_secret(str(name), str(value)):
            yield ConfigIssue(f"hydra.job.env_copy.{name}", HIDDEN, WOULD_REVEAL, LEAVE_OUT)
        elif value != os.environ.get(str(name)):  # Hydra copies those of hydra.job.env_copy here
            fix = "leave it out, and export it in the shell"
            reason = "is a variable of the environment, which no config may set"
            yield ConfigIssue(f"hydra.job.env_set.{name}", value, reason, fix)


def _nested_targets(key: str, value: object) -> Iterator[ConfigIssue]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if name == "_target_":
                yield ConfigIssue(f"{key}._target_", entry, FOREIGN_TARGET, LEAVE_OUT)
            else:
                yield from _nested_targets(f"{key}.{name}", entry)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _nested_targets(f"{key}.{number}", entry)
