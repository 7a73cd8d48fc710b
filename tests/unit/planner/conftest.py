"""Fixtures of planner tests."""

from collections.abc import Callable

import pytest

from scalewise.planner.plan import Plan, build_plan
from scalewise.planner.search import SearchResult, search_runs
from scalewise.run_config import RunConfig


@pytest.fixture
def plan_of(compose: Callable[..., RunConfig]) -> Callable[..., Plan]:
    """Function that plans overrides without checks of this machine."""
    return lambda *overrides: build_plan(compose(*overrides, check_machine=False))


@pytest.fixture
def find_strategies(compose: Callable[..., RunConfig]) -> Callable[..., SearchResult]:
    """Function that runs a search over overrides without checks of this machine."""
    return lambda search, *overrides: search_runs(
        compose(f"plan.search={search}", *overrides, check_machine=False)
    )
