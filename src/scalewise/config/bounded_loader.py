"""Bounds on the YAML files that Hydra reads."""

from typing import Any

from omegaconf import _utils

from scalewise.bounded_yaml import check_bounds


def bound_omegaconf() -> None:
    """Makes ``OmegaConf.load``, by which Hydra reads files, check each document first."""
    loader: Any = _utils.get_yaml_loader()
    if issubclass(loader, _BoundedStream):
        return
    bounded = type("BoundedLoader", (_BoundedStream, loader), {})
    _utils.get_yaml_loader = lambda: bounded


class _BoundedStream:
    """Reads a stream whole and checks it before the parser sees it."""

    def __init__(self, stream: Any) -> None:
        text = stream if isinstance(stream, str) else stream.read()
        check_bounds(text if isinstance(text, str) else text.decode("utf-8"))
        super().__init__(text)  # type: ignore[call-arg]  # of the loader behind it
