"""Fixtures of planner tests."""

from collections.abc import Callable

import pytest

from scalewise.planner.plan import Plan, build_plan
from scalewise.run_config import RunConfig


@pytest.fixture
def plan_of(compose: Callable[..., RunConfig]) -> Callable[..., Plan]:
    """Function that plans overrides without checks of this machine."""
    return lambda *overrides: build_plan(compose(*overrides, check_machine=False))
