"""Fixtures of all tests: a separate cache, no W&B account and a temporary folder."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from scalewise.console import print_log_messages
from scalewise.data.build_cache import cache_folder
from scalewise.run_config import RunConfig

pytest_plugins = [
    "fixtures.hf_architectures",
    "fixtures.hf_checkpoints",
    "fixtures.rejections",
    "fixtures.run_folders",
    "fixtures.reference_runs",
    "fixtures.multi_stack_models",
]

ROOT = Path(__file__).parents[1]
EXTENSIONS = cache_folder() / "extensions"
"""Compiled extensions in the cache of the user, outside the environment of tests."""

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
    """Restore SIGHUP, which ``nohup`` ignores: test commands inherit the disposition."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache for all workers of a session, so that the corpus is built once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def compiled_extensions(shared_cache: Path) -> None:
    """Keep compiled extensions between sessions: builds of DeepSpeed take minutes."""
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another worker was first
        (shared_cache / "extensions").symlink_to(EXTENSIONS)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("NETRC", str(shared_cache / "no-netrc"))
    monkeypatch.setenv("SCALEWISE_CACHE", str(shared_cache))


@pytest.fixture(autouse=True)
def _printed_log() -> Iterator[None]:
    """Print log messages as in a command, so that tests of functions see the output of commands."""
    with print_log_messages():
        yield


@cache
def _composed(*overrides: str, check_machine: bool = True) -> RunConfig:
    from scalewise.config.compose import compose

    return compose(overrides, check_machine=check_machine)


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Compose a ``RunConfig`` from overrides, in the temporary folder of the test.

    A ``RunConfig`` is immutable, so that compositions are cached.
    """
    monkeypatch.chdir(tmp_path)
    return _composed


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Restore the root logger and enable every logger that a logging config has disabled."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    enabled = [
        it for it in logging.root.manager.loggerDict.values() if not getattr(it, "disabled", 1)
    ]
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for logger in enabled:
        logger.disabled = False
