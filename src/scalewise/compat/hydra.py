"""Private names of Hydra."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig

from scalewise.compat import PrivateNames

__all__ = [
    "CachingConfigRepository",
    "ConfigLoaderImpl",
    "ConfigSearchPathImpl",
    "DefaultsList",
    "FileConfigSource",
    "IConfigRepository",
    "Overrides",
    "add_listed_name",
    "compose_defaults",
    "create_defaults_list",
    "create_interpolation_map",
    "get_args_parser",
    "header_dict",
    "log_setup_hook",
    "normalized_file_name",
    "parse_overrides",
    "replaced_composition",
    "replaced_loading",
    "replaced_path_class",
    "run_job_hook",
    "suspended_application",
    "without_mode_composition",
]

private = PrivateNames("hydra-core")

LOADER = "hydra._internal.config_loader_impl"
SEARCH_PATH = "hydra._internal.config_search_path_impl"

with private:
    from hydra._internal.utils import get_args_parser

    """Parser of Hydra's flags; the public API parses ``sys.argv`` only."""

with private:
    from hydra._internal.core_plugins.file_config_source import FileConfigSource

    """Config source of ``file://``; plugins cannot extend a built-in source otherwise."""

with private:
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

    """Search path of an application; no public hook checks its entries."""

with private:
    from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository

    """Repository of config files; it has no public interface."""

with private:
    from hydra._internal import defaults_list
    from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list

    """Defaults list of a config; the public compose API does not return it."""

    create_interpolation_map = defaults_list._create_interpolation_map
    """Config of the options chosen so far, for interpolations in a defaults list."""

with private:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    """Config loader of an application; no public hook sees a config before its use."""

    parse_overrides = ConfigLoaderImpl._parse_overrides_and_create_caching_repo
    """Overrides and repository of a composition; Hydra has no public step for them."""
    compose_defaults = ConfigLoaderImpl._compose_config_from_defaults_list
    """Config of a defaults list; Hydra has no public step for it."""

if not TYPE_CHECKING:
    __getattr__ = private.missing_name


@private.reads("_normalize_file_name")
def normalized_file_name(source: ConfigSource, path: str) -> str:
    """Config path with its extension; part of no documented plugin interface."""
    return source._normalize_file_name(path)


@private.reads("_get_header_dict")
def header_dict(source: ConfigSource, text: str) -> dict[str, str | None]:
    """Header of a config file, ``# @package``; part of no documented plugin interface."""
    return source._get_header_dict(text)


@private.reads("_list_add_result")
def add_listed_name(
    source: ConfigSource, names: list[str], path: str, name: str, kind: ObjectType | None
) -> None:
    """Add a name to the list of a source; part of no documented plugin interface."""
    source._list_add_result(names, path, name, kind)


@contextmanager
def replaced_composition(
    *,
    parse: Callable[..., Any],
    compose: Callable[..., Any],
    list_defaults: Callable[..., Any],
    map_choices: Callable[..., Any],
) -> Iterator[None]:
    """Context with other steps of a composition, which Hydra does not cache.

    Does nothing within another such context.

    Args:
        parse: Replaces ``parse_overrides``.
        compose: Replaces ``compose_defaults``.
        list_defaults: Replaces ``create_defaults_list``.
        map_choices: Replaces ``create_interpolation_map``.
    """
    if private.get(f"{LOADER}:create_defaults_list") is not create_defaults_list:
        yield
        return
    with ExitStack() as replacements:
        for path, value in (
            (f"{LOADER}:ConfigLoaderImpl._parse_overrides_and_create_caching_repo", parse),
            (f"{LOADER}:ConfigLoaderImpl._compose_config_from_defaults_list", compose),
            (f"{LOADER}:create_defaults_list", list_defaults),
            ("hydra._internal.defaults_list:_create_interpolation_map", map_choices),
        ):
            replacements.enter_context(private.replaced(path, value))
        yield


@contextmanager
def replaced_loading(
    *,
    load_configuration: Callable[..., DictConfig],
    append: Callable[..., None],
    save_config: Callable[..., None],
) -> Iterator[None]:
    """Context in which Hydra loads configs, extends search paths and saves configs otherwise.

    Hydra's callbacks run later, and are themselves configured by the config.

    Args:
        load_configuration: Replaces ``ConfigLoaderImpl.load_configuration``.
        append: Replaces ``ConfigSearchPathImpl.append``.
        save_config: Replaces the writer of ``.hydra/*.yaml``.
    """
    with (
        private.replaced(f"{LOADER}:ConfigLoaderImpl.load_configuration", load_configuration),
        private.replaced(f"{SEARCH_PATH}:ConfigSearchPathImpl.append", append),
        private.replaced("hydra.core.utils:_save_config", save_config),
    ):
        yield


def replaced_path_class(path_class: type[Path]) -> AbstractContextManager[None]:
    """Context in which Hydra creates run folders by ``path_class``; it reports none of them."""
    return private.replaced("hydra.core.utils:Path", path_class)


@contextmanager
def log_setup_hook(callback: Callable[[], None]) -> Iterator[None]:
    """Context in which ``callback`` is called each time that Hydra has configured ``logging``."""
    path = "hydra._internal.logging_config:configure_logging"
    configure_logging = private.get(path)

    def hooked(config: dict[str, Any]) -> None:
        configure_logging(config)
        callback()

    with private.replaced(path, hooked):
        yield


@contextmanager
def run_job_hook(callback: Callable[[DictConfig], None]) -> Iterator[None]:
    """Context in which ``callback`` sees the config of a single run before its folder exists.

    Hydra's own callbacks run after it has created the folder.
    """
    run_job = private.get("hydra._internal.hydra:run_job")

    def hooked(**kwargs: Any) -> Any:
        callback(kwargs["config"])
        return run_job(**kwargs)

    with private.replaced("hydra._internal.hydra:run_job", hooked):
        yield


@contextmanager
def suspended_application() -> Iterator[None]:
    """Context in which Hydra can be initialized inside of an application.

    The public ``initialize_config_dir`` rejects a second initialization.
    """
    state = GlobalHydra.instance()
    previous, state.hydra = state.hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = previous  # Hydra has replaced the instance


def without_mode_composition() -> AbstractContextManager[None]:
    """Context in which Hydra does not compose a config to read ``hydra.mode``; no option exists."""
    return private.replaced("hydra._internal.hydra:Hydra.get_mode", lambda *_, **__: None)
