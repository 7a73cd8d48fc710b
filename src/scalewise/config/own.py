"""Hydra's compose API on the suite's tree, also inside a Hydra application."""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra

from scalewise.config import tree


@contextmanager
def own_hydra() -> Iterator[ConfigLoader]:
    """Yields the loader over conf/; a Hydra that was initialized before is put back."""
    state = GlobalHydra.instance()
    held, state.hydra = state.hydra, None
    try:
        with initialize_config_dir(str(tree.root() / "conf"), version_base="1.3"):
            yield state.config_loader()
    finally:
        state.hydra = held
