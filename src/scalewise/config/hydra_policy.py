"""Security policy for what Hydra loads, and sessions of Hydra's compose API under it.

Hydra instantiates every ``_target_`` below ``hydra.callbacks``, ``hydra.launcher`` and
``hydra.sweeper``, calls the factories of its logging configs and imports packages of its search
path. The policy keeps config files from running code in these ways: it is checked before Hydra
instantiates anything and accepts the launchers and sweepers of scalewise only. It also bounds the
size of the YAML files that Hydra parses.
"""

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from scalewise import registry
from scalewise.bounded_yaml import check_bounds
from scalewise.compat.hydra import (
    ConfigLoaderImpl,
    ConfigSearchPathImpl,
    replaced_loading,
    suspended_application,
)
from scalewise.compat.omegaconf import replace_yaml_loader, yaml_loader
from scalewise.config import paths
from scalewise.config.launchers import LAUNCHER_TARGET
from scalewise.config.parse import LEAK_REASON
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.redaction import HIDDEN, redact, reveals_secret
from scalewise.typed_override import shell_word

PLUGINS = {
    "launcher": (LAUNCHER_TARGET,),
    "sweeper": (
        "hydra_plugins.scalewise_sweepers.ScalewiseSweeper",
        "hydra_plugins.scalewise_sweepers.OptunaSweeper",
        "hydra_plugins.scalewise_sweepers.CasesSweeper",
        "hydra_plugins.scalewise_sweepers.ScreenSweeper",
    ),
}
"""Allowed values of ``hydra.launcher._target_`` and ``hydra.sweeper._target_``."""

LOG_CLASSES = (
    "logging.FileHandler",
    "logging.Formatter",
    "logging.NullHandler",
    "logging.StreamHandler",
)
"""Allowed classes in a logging config."""
LOG_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
"""Allowed streams in a logging config."""
_JOB_LOG = r"\$\{hydra\.job\.name\}\.log"
_LOG_FILE = re.compile(
    rf"\$\{{hydra\.runtime\.output_dir\}}/(?:\w[\w.-]*|{_JOB_LOG})|hydra-{_JOB_LOG}"
)
_JOB_NAME = re.compile(r"\w[\w.-]*")
_SUBFOLDER = re.compile(r"\.?\w[\w.-]*")

FOREIGN_TARGET = "calls code outside of scalewise, which a config must not do"
REMOVE = "remove it"


@contextmanager
def enforce_policy() -> Iterator[None]:
    """Context manager that checks every config and search path that Hydra loads.

    Within the block, interpolations cannot read secrets of the environment, and files that Hydra
    saves are redacted.
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
    OmegaConf.register_new_resolver("oc.env", _environment_value, replace=True)
    try:
        with replaced_loading(
            load_configuration=load_checked, append=append_checked, save_config=save_redacted
        ):
            yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def policy_issues(config: DictConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for each entry of ``config.hydra`` that calls or loads foreign code."""
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
        elif name == "output_subdir":
            if value is not None and not _SUBFOLDER.fullmatch(str(value)):
                reason = "is not the name of a folder in the run folder"
                yield ConfigIssue(key, value, reason, f"set {key}=null")
        elif name != "overrides":  # overrides as typed, which Hydra only records
            yield from _nested_targets(key, value)


def _environment_value(name: str, *default: Any) -> Any:
    """Resolver ``oc.env`` that raises ``ValueError`` for secrets."""
    if reveals_secret(name, os.environ.get(name, "")):
        raise ValueError(LEAK_REASON)
    return oc.env(name, *default)


def _search_path_issues(provider: str, path: str) -> Iterator[ConfigIssue]:
    """Yield an issue for a search path entry that imports an unregistered package."""
    is_user_entry = provider == "main" or provider.startswith("hydra.searchpath")
    if not is_user_entry or not path.startswith("pkg://"):
        return
    registered = {
        "scalewise",
        *(e.value.split(".")[0] for e in entry_points(group=registry.ENTRY_POINTS)),
    }
    if re.split(r"[./]", path.removeprefix("pkg://"))[0] not in registered:
        fix = "set 'hydra.searchpath=[file:///path/to/its/conf]'"
        reason = "imports a package that registers no options"
        yield ConfigIssue("hydra.searchpath", path, reason, fix)


def _plugin_issues(name: str, options: object) -> Iterator[ConfigIssue]:
    """Yield issues for a foreign launcher or sweeper, and for targets in its options.

    ``_recursive_`` must be false, so that a target from an interpolation is not instantiated.
    """
    key, entries = f"hydra.{name}", options if isinstance(options, Mapping) else {}
    if (target := entries.get("_target_")) not in PLUGINS[name]:
        builtin = {"launcher": "scalewise", "sweeper": "basic"}[name]
        fix = f"set hydra/{name}={builtin} instead"
        yield ConfigIssue(f"{key}._target_", target, FOREIGN_TARGET, fix)
    elif (recursive := entries.get("_recursive_")) is not False:
        yield ConfigIssue(f"{key}._recursive_", recursive, FOREIGN_TARGET, REMOVE)
    for option, value in entries.items():
        if option in ("_args_", "_partial_"):
            yield ConfigIssue(f"{key}.{option}", value, FOREIGN_TARGET, REMOVE)
        yield from _nested_targets(f"{key}.{option}", value)


def _callback_issues(value: object) -> Iterator[ConfigIssue]:
    """Yield an issue for every Hydra callback; scalewise has none."""
    entries = value if isinstance(value, Mapping) else {"": value} if value else {}
    fix = "remove it; configure a Lightning callback with callbacks.NAME._target_"
    for name, entry in entries.items():
        yield ConfigIssue(f"hydra.callbacks.{name}".rstrip("."), entry, FOREIGN_TARGET, fix)


def _logging_issues(key: str, value: object) -> Iterator[ConfigIssue]:
    """Yield issues for classes, imports and files of a logging config that are not allowed."""
    if isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _logging_issues(f"{key}.{number}", entry)
        return
    if not isinstance(value, Mapping):
        if isinstance(value, str) and (
            "${" in value or "cfg://" in value or ("ext://" in value and value not in LOG_STREAMS)
        ):
            yield ConfigIssue(key, value, "is not allowed in a logging config", REMOVE)
        return
    for name, entry in value.items():
        inner = f"{key}.{name}"
        if name in ("()", "factory", "_target_", "."):
            yield ConfigIssue(inner, entry, FOREIGN_TARGET, REMOVE)
        elif name == "class":
            if entry not in LOG_CLASSES:
                yield ConfigIssue(
                    inner, entry, FOREIGN_TARGET, f"choose one of {', '.join(LOG_CLASSES)}"
                )
        elif name == "filename":
            if not (isinstance(entry, str) and _LOG_FILE.fullmatch(entry)):
                fix = "set " + shell_word(f"{inner}='${{hydra.runtime.output_dir}}/run.log'")
                yield ConfigIssue(inner, entry, "is not a file in the run folder", fix)
        else:
            yield from _logging_issues(inner, entry)


def _job_issues(job: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """Yield issues for an unsafe job name and for environment variables.

    Some variables make the dynamic loader load libraries.
    """
    if not _JOB_NAME.fullmatch(str(job.get("name"))):
        yield ConfigIssue("hydra.job.name", job["name"], "is not a valid file name", REMOVE)
    for name, value in (job.get("env_set") or {}).items():
        if reveals_secret(str(name), str(value)):
            yield ConfigIssue(f"hydra.job.env_copy.{name}", HIDDEN, LEAK_REASON, REMOVE)
        elif value != os.environ.get(str(name)):  # env_set also has the entries of env_copy
            fix = "remove it, and export the variable in the shell"
            reason = "sets an environment variable, which a config must not do"
            yield ConfigIssue(f"hydra.job.env_set.{name}", value, reason, fix)


def _nested_targets(key: str, value: object) -> Iterator[ConfigIssue]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if name == "_target_":
                yield ConfigIssue(f"{key}._target_", entry, FOREIGN_TARGET, REMOVE)
            else:
                yield from _nested_targets(f"{key}.{name}", entry)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _nested_targets(f"{key}.{number}", entry)


@contextmanager
def hydra_session() -> Iterator[ConfigLoader]:
    """Initialize Hydra on conf/ and yield its loader; restore the previous Hydra on exit."""
    with (
        suspended_application(),
        warnings.catch_warnings(),
        enforce_policy(),
        initialize_config_dir(str(paths.project_root() / "conf"), version_base="1.3"),
    ):
        warnings.filterwarnings("error", message="provider=.* is not available")
        yield GlobalHydra.instance().config_loader()


def bound_omegaconf() -> None:
    """Patch the YAML loader of OmegaConf, which Hydra uses, to check size limits first."""
    loader = yaml_loader()
    if issubclass(loader, _BoundedStream):
        return
    replace_yaml_loader(type("BoundedLoader", (_BoundedStream, loader), {}))


class _BoundedStream:
    """Mixin of a YAML loader that checks the text of a stream before parsing it."""

    def __init__(self, stream: Any) -> None:
        text = stream if isinstance(stream, str) else stream.read()
        check_bounds(text if isinstance(text, str) else text.decode("utf-8"))
        super().__init__(text)  # type: ignore[call-arg]  # constructor of the YAML loader
