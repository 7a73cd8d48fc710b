"""Context of Hydra's compose API, also usable inside a Hydra application."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra

from scalewise.compat.hydra import suspended_application
from scalewise.config import hydra_policy, paths


@contextmanager
def hydra_session() -> Iterator[ConfigLoader]:
    """Initialize Hydra on conf/ and yield its loader; restore the previous Hydra on exit."""
    with (
        suspended_application(),
        warnings.catch_warnings(),
        hydra_policy.enforce_policy(),
        initialize_config_dir(str(paths.project_root() / "conf"), version_base="1.3"),
    ):
        warnings.filterwarnings("error", message="provider=.* is not available")
        yield GlobalHydra.instance().config_loader()
