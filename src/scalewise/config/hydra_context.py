"""Hydra's compose API on the suite's tree, also inside a Hydra application."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra

from scalewise.config import hydra_policy, paths


@contextmanager
def hydra_session() -> Iterator[ConfigLoader]:
    """Yields the loader over conf/; a Hydra that was initialized before is put back."""
    state = GlobalHydra.instance()
    held, state.hydra = state.hydra, None
    try:
        with (
            warnings.catch_warnings(),
            hydra_policy.enforce_policy(),
            initialize_config_dir(str(paths.project_root() / "conf"), version_base="1.3"),
        ):
            warnings.filterwarnings("error", message="provider=.* is not available")
            yield state.config_loader()
    finally:
        GlobalHydra.instance().hydra = held  # Hydra has put another instance in its place
