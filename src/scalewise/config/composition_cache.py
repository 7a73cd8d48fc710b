"""Shares what Hydra composes between the jobs of one command.

Hydra composes every job of a multirun from its files, in a tenth of a second. Jobs that choose the
same options differ in values alone: their defaults list and its config are composed once and
copied, and the values are applied to the copy, which is what Hydra itself does last. Jobs that
choose other options share the files that were read.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

SEARCH_PATH = "hydra.searchpath"
"""The one value that decides where files are looked for."""
KEPT = 32
"""Configs that are kept at once; each takes about a megabyte."""

_parse = ConfigLoaderImpl._parse_overrides_and_create_caching_repo
_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_list_defaults = defaults_list.create_defaults_list
_map_choices = defaults_list._create_interpolation_map


@contextmanager
def composed_once() -> Iterator[None]:
    """Makes Hydra's loaders share what they compose within the block.

    The files of the search path must not change meanwhile.
    """
    loader: Any = ConfigLoaderImpl
    impl: Any = config_loader_impl
    lists: Any = defaults_list
    if impl.create_defaults_list is not _list_defaults:  # within another block
        yield
        return
    shared = _Shared()
    loader._parse_overrides_and_create_caching_repo = lambda *given: shared.parse(*given)
    loader._compose_config_from_defaults_list = lambda *given, **named: shared.compose(
        *given, **named
    )
    impl.create_defaults_list = shared.list_defaults
    lists._create_interpolation_map = _map_choices_for_interpolations
    try:
        yield
    finally:
        loader._parse_overrides_and_create_caching_repo = _parse
        loader._compose_config_from_defaults_list = _compose
        impl.create_defaults_list = _list_defaults
        lists._create_interpolation_map = _map_choices


class _Shared:
    """What the compositions of one command have in common."""

    def __init__(self) -> None:
        self._parsed: dict[str, Override] = {}
        self._repositories: dict[object, CachingConfigRepository] = {}
        self._lists: dict[object, DefaultsList] = {}
        self._composed: dict[int, DictConfig] = {}
        """By identity of a list of defaults, which ``_lists`` keeps alive."""

    def parse(
        self, loader: ConfigLoaderImpl, config_name: str | None, overrides: Sequence[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        """Returns overrides, each parsed once, and the files read so far."""
        parser = OverridesParser.create()
        for text in overrides:
            if text not in self._parsed:
                (self._parsed[text],) = parser.parse_overrides([text])
        found = [self._parsed[text] for text in overrides]
        places = (override.input_line for override in found if _is_search_path(override))
        key = (loader.repository, config_name, *places)
        if key not in self._repositories:
            self._repositories[key] = _parse(loader, config_name, list(overrides))[1]
        return found, self._repositories[key]

    def list_defaults(
        self,
        repo: CachingConfigRepository,
        config_name: str | None,
        overrides_list: list[Override],
        prepend_hydra: bool,
        skip_missing: bool,
    ) -> DefaultsList:
        """Returns the defaults list of the options chosen, with the values that follow it."""
        own = Overrides(repo=repo, overrides_list=overrides_list)
        values = {id(override) for override in own.config_overrides}
        chosen = (o.input_line for o in overrides_list if id(o) not in values)
        key = (repo, config_name, prepend_hydra, skip_missing, *chosen)
        if key not in self._lists:
            self._lists[key] = _list_defaults(
                repo, config_name, overrides_list, prepend_hydra, skip_missing
            )
        kept = self._lists[key]
        return DefaultsList(kept.defaults, kept.defaults_tree, own.config_overrides, kept.overrides)

    def compose(
        self, loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        """Returns a copy of the config that a defaults list gives."""
        if id(defaults) not in self._composed:
            while len(self._composed) >= KEPT:
                self._composed.pop(next(iter(self._composed)))
            self._composed[id(defaults)] = _compose(loader, defaults, cast(Any, _Copies(repo)))
        return copy.deepcopy(self._composed[id(defaults)])


def _is_search_path(override: Override) -> bool:
    return override.get_key_element().lstrip("+~") == SEARCH_PATH


class _Copies:
    """A repository that gives copies of its configs: composing moves their nodes elsewhere."""

    def __init__(self, repo: IConfigRepository) -> None:
        self._repo = repo

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Returns a copy of a config; None: there is none."""
        found = self._repo.load_config(config_path)
        return None if found is None else copy.deepcopy(found)

    def get_schema_source(self) -> ConfigSource:
        """Returns the source of the schemas that Hydra itself keeps."""
        return self._repo.get_schema_source()


def _map_choices_for_interpolations(
    overrides: Overrides, children: list[InputDefault], self_added: bool
) -> DictConfig:
    """Returns the options chosen so far, if any child interpolates them: a config is slow."""
    if any(child.is_interpolation() for child in children):
        return _map_choices(overrides, children, self_added)
    return OmegaConf.create()
