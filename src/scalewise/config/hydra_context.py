"""Context of Hydra's compose API, also usable inside a Hydra application."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra

from scalewise.config import hydra_policy, paths


@contextmanager
def hydra_session() -> Iterator[ConfigLoader]:
    """Initialize Hydra on conf/ and yield its loader; restore the previous Hydra on exit."""
    state = GlobalHydra.instance()
    previous, state.hydra = state.hydra, None
    try:
        with (
            warnings.catch_warnings(),
            hydra_policy.enforce_policy(),
            initialize_config_dir(str(paths.project_root() / "conf"), version_base="1.3"),
        ):
            warnings.filterwarnings("error", message="provider=.* is not available")
            yield state.config_loader()
    finally:
        GlobalHydra.instance().hydra = previous  # Hydra has replaced the instance
