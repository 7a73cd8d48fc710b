"""Shares what Hydra composes between the jobs of one command.

Hydra composes every job of a multirun from its files, in a tenth of a second. Where the defaults
lists of two jobs agree in all entries that set a key of the root, so do the composed nodes of that
key: each is composed once and copied. The values of the command line are applied to the copy, which
is what Hydra itself does last. Files are read once.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.base import Metadata

SEARCH_PATH = "hydra.searchpath"
"""The one value that decides where files are looked for."""
CACHED = 1000
"""Nodes that are kept at once; the 25 of a config take about a megabyte."""

_parse = ConfigLoaderImpl._parse_overrides_and_create_caching_repo
_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_list_defaults = defaults_list.create_defaults_list
_map_choices = defaults_list._create_interpolation_map
_NO_CHOICES = OmegaConf.create()
_follow = Node._dereference_node_impl


@contextmanager
def shared_composition_cache() -> Iterator[None]:
    """Makes Hydra's loaders share what they compose within the block.

    The files of the search path must not change meanwhile.
    """
    loader: Any = ConfigLoaderImpl
    impl: Any = config_loader_impl
    lists: Any = defaults_list
    if impl.create_defaults_list is not _list_defaults:  # within another block
        yield
        return
    shared = _CompositionCache()
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


class _CompositionCache:
    """What the compositions of one command have in common."""

    def __init__(self) -> None:
        self._parsed: dict[str, Override] = {}
        self._repositories: dict[object, CachingConfigRepository] = {}
        self._lists: dict[object, DefaultsList] = {}
        self._roots: dict[object, tuple[Metadata, Sequence[object]]] = {}
        """Metadata and keys of composed configs."""
        self._nodes: dict[object, Node] = {}
        """Nodes of their keys, by the entries that they are composed of."""

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
        searched = ((source.provider, source.path) for source in loader.get_sources())
        key = (*searched, config_name, *places)
        if key not in self._repositories:
            repository: Any = _parse(loader, config_name, list(overrides))[1]
            repository.group_exists = cache(repository.group_exists)  # else it asks the disk
            self._repositories[key] = repository
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
        """Returns the config that a defaults list gives.

        An entry sets the key that its package begins with, or any key where that is the root. No
        other entry changes a key's node, unless merging copies what an interpolation refers to.
        """
        entries = [
            (re.split(r"[.[]", entry.package or "")[0], (entry.config_path, entry.package))
            for entry in defaults
        ]
        shape = (repo, *dict.fromkeys(key or entry for key, entry in entries))

        def origin(name: object) -> object:
            return (repo, name, *(entry for key, entry in entries if key in ("", name)))

        if shape not in self._roots or any(
            origin(name) not in self._nodes for name in self._roots[shape][1]
        ):
            with _cross_node_references() as references:
                composed = _compose(loader, defaults, cast(Any, _CopyingRepository(repo)))
            if references:
                return composed
            if len(self._nodes) >= CACHED:
                self._nodes.clear()
            nodes = dict(cast(Mapping[Any, Node], composed._content))
            self._roots[shape] = composed._metadata, tuple(nodes)
            for name, node in nodes.items():
                node._set_parent(None)  # else one node keeps the whole config
                self._nodes[origin(name)] = node
        metadata, names = self._roots[shape]
        return _merge_copies(metadata, {name: self._nodes[origin(name)] for name in names})


def _merge_copies(metadata: Metadata, nodes: Mapping[object, Node]) -> DictConfig:
    """Returns a config of copies of these nodes."""
    config = OmegaConf.create()
    copies = {name: copy.deepcopy(node) for name, node in nodes.items()}
    for node in copies.values():
        node._set_parent(config)
    config.__dict__.update(_metadata=copy.deepcopy(metadata), _content=copies)
    return config


@contextmanager
def _cross_node_references() -> Iterator[list[Node]]:
    """Yields the interpolations followed within the block that may lead to nodes of other keys.

    One within a longer text gives a text, wherever it leads.
    """
    found: list[Node] = []

    def follow(node: Node, *given: Any, **named: Any) -> Node | None:
        if node._is_interpolation() and (text := str(node._value())).endswith("}"):
            own = re.escape(node._get_full_key(None).partition(".")[0])
            if text.startswith("${") and not re.fullmatch(rf"\$\{{{own}\.[\w.]+\}}", text):
                found.append(node)
        return _follow(node, *given, **named)

    loose: Any = Node
    loose._dereference_node_impl = follow
    try:
        yield found
    finally:
        loose._dereference_node_impl = _follow


def _is_search_path(override: Override) -> bool:
    return override.get_key_element().lstrip("+~") == SEARCH_PATH


class _CopyingRepository:
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
    return _NO_CHOICES
