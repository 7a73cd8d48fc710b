"""Cache of Hydra compositions, shared by the jobs of one command.

Hydra composes every job of a multirun from files, which takes 0.1 to 0.3 s per job. The composed
node of a root key depends only on the entries of the defaults list that set this key. Such a node
is composed once and copied. Overrides of the command line are then applied to the copy, as Hydra
does last. Files are read once.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.base import Metadata

from scalewise.compat.hydra import (
    CachingConfigRepository,
    ConfigLoaderImpl,
    DefaultsList,
    IConfigRepository,
    Overrides,
    compose_defaults,
    create_defaults_list,
    create_interpolation_map,
    parse_overrides,
    replaced_composition,
)
from scalewise.compat.omegaconf import (
    build_config,
    child_nodes,
    detach,
    full_key,
    interpolation_text,
    interpolations_hook,
    node_metadata,
)

SEARCH_PATH = "hydra.searchpath"
"""Override that changes the search path of config files."""
MAX_CACHED_NODES = 1000
"""Maximum number of cached nodes; the 25 nodes of a config take about 1 MB."""

_NO_CHOICES = OmegaConf.create()


@contextmanager
def shared_composition_cache() -> Iterator[None]:
    """Context manager in which Hydra's loaders share compositions.

    The files of the search path must not change within the block.
    """
    shared = _CompositionCache()
    with replaced_composition(
        parse=lambda *args: shared.parse(*args),
        compose=lambda *args, **kwargs: shared.compose(*args, **kwargs),
        list_defaults=shared.list_defaults,
        map_choices=_map_choices_for_interpolations,
    ):
        yield


class _CompositionCache:
    """Parsed overrides, defaults lists and composed nodes of one command."""

    def __init__(self) -> None:
        self._parsed: dict[str, Override] = {}
        self._repositories: dict[object, CachingConfigRepository] = {}
        self._lists: dict[object, DefaultsList] = {}
        self._roots: dict[object, tuple[Metadata, Sequence[object]]] = {}
        """Metadata and keys of composed configs."""
        self._nodes: dict[object, Node] = {}
        """Composed node of each root key, by the defaults list entries that set it."""

    def parse(
        self, loader: ConfigLoaderImpl, config_name: str | None, overrides: Sequence[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        """Parse overrides, each once, and return them with the shared repository of files."""
        parser = OverridesParser.create()
        for text in overrides:
            if text not in self._parsed:
                (self._parsed[text],) = parser.parse_overrides([text])
        parsed = [self._parsed[text] for text in overrides]
        search_paths = (override.input_line for override in parsed if _is_search_path(override))
        sources = ((source.provider, source.path) for source in loader.get_sources())
        key = (*sources, config_name, *search_paths)
        if key not in self._repositories:
            repository: Any = parse_overrides(loader, config_name, list(overrides))[1]
            repository.group_exists = cache(repository.group_exists)  # accesses the disk
            self._repositories[key] = repository
        return parsed, self._repositories[key]

    def list_defaults(
        self,
        repo: CachingConfigRepository,
        config_name: str | None,
        overrides_list: list[Override],
        prepend_hydra: bool,
        skip_missing: bool,
    ) -> DefaultsList:
        """Defaults list of the chosen options, with the value overrides of this job."""
        job_overrides = Overrides(repo=repo, overrides_list=overrides_list)
        values = {id(override) for override in job_overrides.config_overrides}
        chosen = (o.input_line for o in overrides_list if id(o) not in values)
        key = (repo, config_name, prepend_hydra, skip_missing, *chosen)
        if key not in self._lists:
            self._lists[key] = create_defaults_list(
                repo, config_name, overrides_list, prepend_hydra, skip_missing
            )
        cached = self._lists[key]
        return DefaultsList(
            cached.defaults, cached.defaults_tree, job_overrides.config_overrides, cached.overrides
        )

    def compose(
        self, loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        """Compose the config of a defaults list from cached nodes.

        An entry sets the first key of its package, or any key if its package is the root. No other
        entry changes the node of a key, unless a merge copies the target of an interpolation.
        """
        entries = [
            (re.split(r"[.[]", entry.package or "")[0], (entry.config_path, entry.package))
            for entry in defaults
        ]
        structure = (repo, *dict.fromkeys(key or entry for key, entry in entries))

        def origin(name: object) -> object:
            return (repo, name, *(entry for key, entry in entries if key in ("", name)))

        if structure not in self._roots or any(
            origin(name) not in self._nodes for name in self._roots[structure][1]
        ):
            with _cross_node_references() as references:
                composed = compose_defaults(loader, defaults, cast(Any, _CopyingRepository(repo)))
            if references:
                return composed
            if len(self._nodes) >= MAX_CACHED_NODES:
                self._nodes.clear()
            nodes = child_nodes(composed)
            self._roots[structure] = node_metadata(composed), tuple(nodes)
            for name, node in nodes.items():
                detach(node)  # a parent reference keeps the config alive
                self._nodes[origin(name)] = node
        metadata, names = self._roots[structure]
        return build_config(metadata, {name: self._nodes[origin(name)] for name in names})


@contextmanager
def _cross_node_references() -> Iterator[list[Node]]:
    """Collect the interpolations resolved within the block that may copy nodes of other keys.

    An interpolation within a longer string yields a string and copies no node.
    """
    references: list[Node] = []

    def collect(node: Node) -> None:
        if (text := interpolation_text(node)).endswith("}"):
            own_key = re.escape(full_key(node).partition(".")[0])
            if text.startswith("${") and not re.fullmatch(rf"\$\{{{own_key}\.[\w.]+\}}", text):
                references.append(node)

    with interpolations_hook(collect):
        yield references


def _is_search_path(override: Override) -> bool:
    return override.get_key_element().lstrip("+~") == SEARCH_PATH


class _CopyingRepository:
    """Repository that returns copies of its configs, because composition moves their nodes."""

    def __init__(self, repo: IConfigRepository) -> None:
        self._repo = repo

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Load a copy of a config; None if it does not exist."""
        config = self._repo.load_config(config_path)
        return None if config is None else copy.deepcopy(config)

    def get_schema_source(self) -> ConfigSource:
        """Source of the schemas in Hydra's ConfigStore."""
        return self._repo.get_schema_source()


def _map_choices_for_interpolations(
    overrides: Overrides, children: list[InputDefault], self_added: bool
) -> DictConfig:
    """Config of the options chosen so far; empty unless a child interpolates them."""
    if any(child.is_interpolation() for child in children):
        return create_interpolation_map(overrides, children, self_added)
    return _NO_CHOICES
