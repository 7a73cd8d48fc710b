"""Caches of a search: the same plans as those of single runs, and their number of computations."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from dataclasses import replace
from functools import _lru_cache_wrapper
from types import ModuleType

import pytest

from scalewise.models.op_graph import build_op_graphs
from scalewise.planner import (
    activation_liveness,
    activation_memory,
    device_memory,
    forward_pass,
    operator_time,
    pipeline_memory,
    rank_memory,
    rank_partition,
    rank_step,
    step_liveness,
    step_time,
    weight_sizes,
)
from scalewise.planner.fit_check import check_fit
from scalewise.planner.last_run import remember_last_run
from scalewise.planner.search import search_runs
from scalewise.planner.search_result import SearchResult
from scalewise.planner.step_time import predict_step_time
from scalewise.run_config import RunConfig

FindStrategies = Callable[..., SearchResult]
PLANNER_MODULES = (
    *(activation_liveness, activation_memory, device_memory, forward_pass, operator_time),
    *(pipeline_memory, rank_memory, rank_partition, rank_step, step_liveness, step_time),
    weight_sizes,
)
MAX_CALLS = 2400
"""Maximum number of Python calls per candidate of a search on 8 devices, with its Pareto front."""
NUM_COMPARED = 15
"""Number of candidates of a search that are planned again without caches."""


def clear_caches(modules: tuple[ModuleType, ...] = PLANNER_MODULES) -> int:
    """Forget all cached values of the planner; returns the number of caches."""
    caches = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, _lru_cache_wrapper)
    ]
    for cache in caches:
        cache.cache_clear()
    return len(caches)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=llama3_8b", "hardware=h100_8", "trainer.global_batch=16"),
        ("model=gpt2_124m", "hardware=rtx4090", "hardware.devices_per_node=4"),
        ("model=llama3_8b", "hardware=a100_80g_8", "compile=none", "plan.rank_by=memory"),
        ("model=qwen3_30b_a3b", "hardware=h100_8", "trainer.global_batch=8"),
    ],
    ids=["8b", "tied", "memory", "experts"],
)
def test_search_plans_equal_plans_without_caches(
    overrides: tuple[str, ...], find_strategies: FindStrategies
) -> None:
    result = find_strategies("all", *overrides, "data=synthetic", "data.sequence=256")
    for candidate in result.candidates[:: max(1, len(result.candidates) // NUM_COMPARED)]:
        assert clear_caches() > 10
        fit, overrides = check_fit(candidate.run), candidate.overrides
        assert fit.breakdown.entries == candidate.fit.breakdown.entries, overrides
        assert fit.breakdown.phases == candidate.fit.breakdown.phases, overrides
        assert fit.reserved == candidate.fit.reserved, overrides
        if candidate.step_time is not None:
            assert predict_step_time(candidate.run) == candidate.step_time, overrides


def test_search_builds_few_operator_graphs(
    find_strategies: FindStrategies, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []

    def count(config: object, spec: object) -> object:
        built.append((config, spec))
        return build_op_graphs(config, spec)  # type: ignore[arg-type]  # counted, not changed

    monkeypatch.setattr(activation_liveness, "build_op_graphs", count)
    clear_caches()
    overrides = ("model=llama3_8b", "hardware=h100_8", "data=synthetic", "trainer.global_batch=16")
    candidates = find_strategies("all", *overrides).candidates
    assert len(built) == len(set(built))
    assert len(built) * 5 < len(candidates)


def test_search_calls_per_candidate(compose: Callable[..., RunConfig]) -> None:
    overrides = ("model=llama3_8b", "hardware=h100_8", "data=synthetic", "trainer.global_batch=16")
    run = compose("plan.search=all", *overrides, check_machine=False)
    clear_caches()
    with cProfile.Profile(builtins=False) as profile:
        result = search_runs(run)
        assert result.best is not None
        assert result.changed_training_front
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls / len(result.candidates) < MAX_CALLS


@pytest.mark.parametrize(
    "rank",
    ["time", *(pytest.param(rank, marks=pytest.mark.exhaustive) for rank in ("price", "memory"))],
)
def test_search_predicts_step_times_of_the_front_only(
    rank: str, find_strategies: FindStrategies
) -> None:
    overrides = ("model=llama3_8b", "hardware=h100_8", "data=synthetic", "trainer.global_batch=16")
    result = find_strategies("all", *overrides, f"plan.rank_by={rank}")
    shown = (result.best, result.lowest_cost, result.pareto_front, result.changed_training_front)
    num_predicted = sum(one.has_predicted_time for one in result.candidates)
    assert num_predicted * 2 < len(result.candidates)
    for candidate in result.candidates:
        assert candidate.least_seconds < candidate.step_seconds or not candidate.is_acceptable
    again = SearchResult(result.base_run, result.candidates)
    fronts = (again.pareto_front, again.changed_training_front)
    assert (again.best, again.lowest_cost, *fronts) == shown
    costs = [
        (one.step_seconds, one.fit.peak, one.step_seconds * one.run.world_size)
        for one in result.candidates
        if one.is_acceptable and not one.training_overrides
    ]
    best = [
        one
        for one in costs
        if not any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in costs
        )
    ]
    assert len({*best}) == len(again.pareto_front)


def test_last_run_is_remembered_by_identity(compose: Callable[..., RunConfig]) -> None:
    calls: list[int] = []

    @remember_last_run
    def double(run: RunConfig, rank: int) -> int:
        calls.append(rank)
        return 2 * rank

    first = compose("model=decoder_nano", check_machine=False)
    second = replace(first)
    assert [double(first, rank) for rank in (1, 2, 1)] == [2, 4, 2]
    assert double(second, 1) == 2
    assert double(first, 1) == 2
    assert calls == [1, 2, 1, 1]
