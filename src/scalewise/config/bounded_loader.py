"""Size limits of the YAML files that Hydra reads."""

from typing import Any

from scalewise.bounded_yaml import check_bounds
from scalewise.compat.omegaconf import replace_yaml_loader, yaml_loader


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
