"""Private names of OmegaConf."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.base import Container, Metadata

from scalewise.compat import PrivateNames

__all__ = [
    "build_config",
    "child_nodes",
    "detach",
    "full_key",
    "interpolation_text",
    "interpolations_hook",
    "node_metadata",
    "replace_yaml_loader",
    "yaml_loader",
]

private = PrivateNames("omegaconf")


def yaml_loader() -> Any:
    """YAML loader class of ``OmegaConf.load``; the public API does not return it."""
    return private.get("omegaconf._utils:get_yaml_loader")()


def replace_yaml_loader(loader: type) -> None:
    """Let OmegaConf read YAML by ``loader``; ``OmegaConf.load`` has no parameter for it."""
    private.replace("omegaconf._utils:get_yaml_loader", lambda: loader)


@private.reads("_content")
def child_nodes(config: DictConfig) -> dict[Any, Node]:
    """Nodes of a config by key, unresolved; the public API resolves or copies them."""
    return dict(cast(Mapping[Any, Node], config._content))


@private.reads("_metadata")
def node_metadata(config: DictConfig) -> Metadata:
    """Types and flags of a node; the public API returns only some of them."""
    return config._metadata


@private.reads("_set_parent")
def detach(node: Node) -> None:
    """Remove the reference of a node to its parent, which a public copy would include."""
    node._set_parent(None)


@private.reads("_set_parent")
def build_config(metadata: Metadata, nodes: Mapping[Any, Node]) -> DictConfig:
    """Config of copies of these nodes; the public constructors convert every value."""
    config = OmegaConf.create()
    copies = {name: deepcopy(node) for name, node in nodes.items()}
    for node in copies.values():
        node._set_parent(cast(Container, config))
    config.__dict__.update(_metadata=deepcopy(metadata), _content=copies)
    return config


@private.reads("_is_interpolation", "_value")
def interpolation_text(node: Node) -> str:
    """Unresolved text of an interpolation, empty for other nodes; the public API needs its key."""
    return str(node._value()) if node._is_interpolation() else ""


@private.reads("_get_full_key")
def full_key(node: Node) -> str:
    """Dotted key of a node in its config; the public API has no access from a node."""
    return node._get_full_key(None)


@contextmanager
def interpolations_hook(callback: Callable[[Node], None]) -> Iterator[None]:
    """Context in which ``callback`` sees each node before it is resolved; no public hook exists."""
    resolve = private.get("omegaconf:Node._dereference_node_impl")

    def hooked(node: Node, *args: Any, **kwargs: Any) -> Any:
        callback(node)
        return resolve(node, *args, **kwargs)

    with private.replaced("omegaconf:Node._dereference_node_impl", hooked):
        yield
