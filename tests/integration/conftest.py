"""Doors for the integration tests, and one warm nursery for jobs that need no door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures.doors import Doors, environment
from fixtures.jobs import Job


@pytest.fixture(scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> dict[str, str]:
    """The environment of every door: one cache of prepared data, a home with nothing in it."""
    return environment(tmp_path_factory.mktemp("home"), shared_cache)


@pytest.fixture
def scalewise(tmp_path: Path, surroundings: dict[str, str]) -> Iterator[Doors]:
    """Opens doors in a folder of the test's own."""
    doors = Doors(tmp_path, surroundings)
    yield doors
    doors.close()


@pytest.fixture(scope="module")
def doors_in(
    tmp_path_factory: pytest.TempPathFactory, surroundings: dict[str, str]
) -> Iterator[Callable[[str], Doors]]:
    """Opens doors for runs that several tests of a module look at."""
    opened: list[Doors] = []

    def doors(name: str) -> Doors:
        opened.append(Doors(tmp_path_factory.mktemp(name), surroundings))
        return opened[-1]

    yield doors
    for each in opened:
        each.close()


@pytest.fixture
def job(tmp_path: Path, shared_cache: Path) -> Job:
    """Runs jobs from the warm nursery of this process: a second each instead of six."""
    return Job(tmp_path, shared_cache)
