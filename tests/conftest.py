"""What every test starts from: a cache of its own, no W&B account, a folder to itself."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from scalewise.data.build_cache import cache_folder
from scalewise.run_config import RunConfig

pytest_plugins = [
    "fixtures.checkpoints",
    "fixtures.refusals",
    "fixtures.reports",
    "fixtures.steps",
    "fixtures.stacked",
]

ROOT = Path(__file__).parents[1]
EXTENSIONS = cache_folder() / "extensions"
"""Compiled code in the cache of the user, which a test's own environment does not name."""

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("ci")


def pytest_configure() -> None:
    """Takes SIGHUP back from ``nohup``: doors inherit it, and heed that it is to be ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all workers of a session, so that the corpus is built once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def native_code(shared_cache: Path) -> None:
    """Lets DeepSpeed's compiled code outlive a session: it takes minutes to make."""
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another worker was first
        (shared_cache / "extensions").symlink_to(EXTENSIONS)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("NETRC", str(shared_cache / "no-netrc"))
    monkeypatch.setenv("SCALEWISE_CACHE", str(shared_cache))


@cache
def _composed(*overrides: str, check_machine: bool = True) -> RunConfig:
    from scalewise.config.compose import compose

    return compose(overrides, check_machine=check_machine)


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Composes a Run from overrides given one by one, in a folder of the test's own.

    A Run is immutable, so those that were composed before are kept.
    """
    monkeypatch.chdir(tmp_path)
    return _composed
