"""Strategy search: optimality, reproducible overrides and explained losers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from fixtures.strategies import LLAMA_8B

from scalewise.commands import plan as plan_verb
from scalewise.commands import show_search
from scalewise.errors import ConfigError
from scalewise.plan_config import RankBy
from scalewise.planner.alternatives import neighbor_alternatives
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.layout_enumeration import axis_sizes
from scalewise.planner.plan import Plan
from scalewise.planner.search import SearchCandidate, SearchResult, search_runs
from scalewise.run_config import RunConfig
from scalewise.typed_override import replace_overrides

Compose = Callable[..., RunConfig]
FindStrategies = Callable[..., SearchResult]

LARGE_RUN = (
    "model=llama3_70b",
    "hardware=h100_8x4",
    "precision=bf16_mixed",
    "data=synthetic",
    "data.sequence=4096",
    "trainer.global_batch=64",
)
NODE_RUN = (
    *(override for override in LLAMA_8B if not override.startswith("parallelism")),
    "hardware.devices_per_node=8",
    "trainer.global_batch=16",
)
SMALL_RUN = ("model=llama_160m", "hardware=h100", "data=synthetic", "trainer.global_batch=8")


@pytest.mark.parametrize("search", ["layout", "memory", "all"])
def test_search_overrides_reproduce_the_candidate(
    search: str, find_strategies: FindStrategies, plan_of: Callable[..., Plan]
) -> None:
    kinds = {}
    for candidate in find_strategies(search, *NODE_RUN).candidates:
        run = candidate.run
        axes = tuple(override.split("=")[0] for override in candidate.overrides)
        kinds[type(run.parallelism), axes, candidate.training_overrides] = candidate
    assert len(kinds) > 4
    for candidate in list(kinds.values())[:: max(1, len(kinds) // 12)]:
        candidate_plan = plan_of(
            *replace_overrides((f"plan.search={search}", *NODE_RUN), candidate.overrides)
        )
        assert candidate_plan.fit.breakdown.peak == candidate.fit.breakdown.peak, (
            candidate.overrides
        )
        if candidate.step_time is not None:
            assert candidate_plan.step_time == candidate.step_time, candidate.overrides


def test_search_best_beats_every_candidate(
    find_strategies: FindStrategies, plan_of: Callable[..., Plan]
) -> None:
    best = find_strategies("layout", *NODE_RUN).best
    assert best is not None
    strategies = (
        ("parallelism=fsdp", "parallelism.shards=8"),
        ("parallelism=tensor", "parallelism.tensor=8"),
        ("parallelism=mesh", "parallelism.shards=4", "parallelism.context=2"),
        ("parallelism=hsdp", "parallelism.shards=4"),
        ("parallelism=mesh", "parallelism.shards=4", "parallelism.tensor=2"),
        ("parallelism=ddp", "parallelism.replicas=8"),
    )
    memory_options = ("none", "checkpoint_selective", "checkpoint_full")
    for strategy, memory, micro_batch in product(strategies, memory_options, (1, 2)):
        plan = plan_of(
            *NODE_RUN, *strategy, f"memory={memory}", f"trainer.micro_batch={micro_batch}"
        )
        if plan.fit.status is FitStatus.fits:
            assert plan.step_time is not None
            assert plan.step_time.seconds >= best.step_seconds * 0.999, (
                strategy,
                memory,
                micro_batch,
            )


def test_search_prefers_fewer_axes_to_an_insignificant_gain(
    find_strategies: FindStrategies, capsys: pytest.CaptureFixture[str]
) -> None:
    result = find_strategies("layout", *NODE_RUN)
    simple = result.lowest_cost
    assert simple is not None
    assert simple.step_time is not None
    assert simple is result.best
    complex_one = next(
        one
        for one in result.candidates
        if one.is_acceptable and sum(size > 1 for size in axis_sizes(one.run.parallelism)) == 2
    )
    for factor, expected in ((0.96, simple), (0.9, complex_one)):
        candidate = replace(complex_one, step_time=simple.step_time.scale(factor))
        changed = SearchResult(result.base_run, (simple, candidate))
        assert changed.lowest_cost is candidate
        assert changed.best is (simple if expected is simple else candidate), factor
        show_search.print_search(changed)
        printed = capsys.readouterr().out
        assert ("4.0% less, which is within the error" in printed) == (expected is simple)
    by_memory = replace(result.base_run, plan=replace(result.base_run.plan, rank_by=RankBy.memory))
    result = SearchResult(by_memory, result.candidates)
    assert result.best is result.lowest_cost


@pytest.mark.parametrize("rank", ["time", "memory"])
def test_search_prunes_only_losers(
    rank: str, find_strategies: FindStrategies, plan_of: Callable[..., Plan]
) -> None:
    overrides = ("model=tinyllama_1b", "hardware=rtx4090", "precision=bf16_mixed", "data=synthetic")
    overrides += ("data.sequence=2048", "trainer.global_batch=8", "adapter=none", "optimizer=adamw")
    best = find_strategies("memory", *overrides, f"plan.rank_by={rank}").best
    assert best is not None
    fitting_figures = []
    for memory, chunk, micro_batch in product(
        ("none", "checkpoint_selective", "checkpoint_full"), ("null", "1024"), (1, 2, 4, 8)
    ):
        candidate_overrides = (
            f"memory={memory}",
            f"objective.loss_chunk={chunk}",
            f"trainer.micro_batch={micro_batch}",
        )
        plan = plan_of(*overrides, *candidate_overrides)
        if plan.fit.status is FitStatus.fits and plan.step_time is not None:
            figures = {"time": plan.step_time.seconds, "memory": plan.fit.breakdown.peak}
            fitting_figures.append(figures[rank])
    assert best.cost(best.run.plan.rank_by)[0] == pytest.approx(min(fitting_figures))


def test_search_front_is_undominated(find_strategies: FindStrategies) -> None:
    all_of = find_strategies("layout", *LARGE_RUN)

    def figures(candidate: SearchCandidate) -> tuple[float, float, float]:
        seconds, peak = candidate.step_seconds, candidate.fit.breakdown.peak
        return seconds, peak, seconds * candidate.run.world_size

    acceptable = [figures(candidate) for candidate in all_of.candidates if candidate.is_acceptable]
    front = {figures(candidate) for candidate in all_of.pareto_front}
    for candidate_figures in acceptable:
        dominating = [
            other_figures
            for other_figures in acceptable
            if other_figures != candidate_figures
            and all(a <= b for a, b in zip(other_figures, candidate_figures, strict=True))
        ]
        assert (candidate_figures in front) == (not dominating), candidate_figures


def test_search_candidates_keep_the_global_batch(find_strategies: FindStrategies) -> None:
    for candidate in find_strategies("layout", *LARGE_RUN).candidates:
        run = candidate.run
        assert run.global_batch == 64, candidate
        assert run.samples_per_forward * run.accumulation == 64, candidate
        assert 32 % run.world_size == 0, candidate


def test_search_keeps_typed_values(find_strategies: FindStrategies) -> None:
    typed_overrides = ("parallelism=mesh", "parallelism.tensor=8", "memory=checkpoint_full")
    for candidate in find_strategies(
        "all", *LARGE_RUN, *typed_overrides, "adapter=none", "optimizer=adamw"
    ).candidates:
        run = candidate.run
        assert run.parallelism.sizes["tensor"] == 8, candidate
        assert run.memory.recompute == "full", candidate
        assert run.precision.compute == "bf16", candidate
        assert candidate.training_overrides == (), candidate


def test_search_rejects_impossible_sizes(compose: Compose) -> None:
    run = compose(
        "plan.search=layout",
        *NODE_RUN,
        "parallelism.shards=16",
        "parallelism=fsdp",
        check_machine=False,
    )
    with pytest.raises(ConfigError, match="the fixed sizes need more than"):
        search_runs(run)


def test_search_reports_progress(compose: Compose) -> None:
    progress_calls: list[int] = []
    result = search_runs(
        compose("plan.search=memory", *NODE_RUN, check_machine=False), progress_calls.append
    )
    assert progress_calls == [*range(1, len(result.candidates) + 1)]


def test_search_explains_losers(find_strategies: FindStrategies) -> None:
    flat = ("parallelism=mesh", "parallelism.pipeline=1")
    search = find_strategies("layout", *LARGE_RUN, *flat)
    assert search.best is not None
    assert search.best.run.parallelism.sizes["shards"] == 32
    reasons = {it.value: it.reason for it in neighbor_alternatives(search)}
    assert "time: communication over tensor" in reasons["shards 16 x tensor 2"]
    assert "GiB of 80.00 GiB" in reasons["replicate 2 x shards 16"]
    assert "block activations" in reasons["nothing"]


def test_search_explains_an_invalid_strategy(find_strategies: FindStrategies) -> None:
    overrides = ("parallelism=mesh", "parallelism.tensor=8", "parallelism.shards=4")
    reasons = neighbor_alternatives(find_strategies("layout", *LARGE_RUN, *overrides))
    assert any("does not divide model.kv_heads" in it.reason for it in reasons)


def test_search_places_the_pipeline_across_slow_links(find_strategies: FindStrategies) -> None:
    best = find_strategies("layout", *LARGE_RUN, "hardware.node_link_gb_per_s=1").best
    assert best is not None
    assert best.run.parallelism.sizes["pipeline"] >= 4


def test_search_by_price_prefers_few_devices(find_strategies: FindStrategies) -> None:
    small_overrides = ("model=llama_160m", *LARGE_RUN[1:], "data.sequence=2048")
    price = find_strategies("layout", *small_overrides, "plan.rank_by=price").best
    fastest_candidate = find_strategies("layout", *small_overrides).best
    assert price is not None
    assert fastest_candidate is not None
    assert price.run.world_size < fastest_candidate.run.world_size == 32
    assert (price.dollars_for(1e9) or 0) < (fastest_candidate.dollars_for(1e9) or 0)


@pytest.mark.parametrize(("traced", "code"), [(2**30, 0), (2**50, 3)])
def test_search_checks_the_best_by_trace(
    traced: int,
    code: int,
    compose: Compose,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def of_trace(best: Plan) -> Plan:
        return replace(best, fit=replace(best.fit, traced_peak=traced))

    monkeypatch.setattr(plan_verb, "_with_trace", of_trace)
    run = compose("plan.search=memory", "plan.method=trace", *SMALL_RUN, check_machine=False)
    assert plan_verb.PlanCommand().run_single(run, tmp_path) == code
    assert f"\n{'Out of memory' if code else 'Fits'}: " in capsys.readouterr().out


def test_search_reports_that_nothing_fits(find_strategies: FindStrategies) -> None:
    all_of = find_strategies("memory", "model=llama3_70b", "hardware=rtx4090", "data=synthetic")
    assert all_of.best is None
    assert all_of.pareto_front == ()
    assert neighbor_alternatives(all_of) == ()


def test_search_without_rates_ranks_by_memory(find_strategies: FindStrategies) -> None:
    unknown_rate = ("hardware=h100", "hardware.memory_gb_per_s=null")
    overrides = ("experiment=smoke", *unknown_rate, "trainer.global_batch=4")
    all_of = find_strategies("memory", *overrides)
    assert all_of.best is not None
    assert all_of.best.step_time is None
    assert all_of.rank_by is RankBy.memory
    assert not any("time" in it.reason for it in neighbor_alternatives(all_of))


def test_search_may_leave_devices_idle(find_strategies: FindStrategies) -> None:
    six = tuple(override for override in NODE_RUN if "devices_per_node" not in override)
    counts = {
        it.run.world_size
        for it in find_strategies("layout", *six, "hardware.devices_per_node=6").candidates
    }
    assert counts == {1, 2, 3, 4, 6}


def test_search_lists_each_alternative_once(find_strategies: FindStrategies) -> None:
    overrides = (*NODE_RUN, "parallelism=mesh", "parallelism.pipeline=2", "trainer.micro_batch=2")
    alternatives = [
        (it.choice, it.value) for it in neighbor_alternatives(find_strategies("layout", *overrides))
    ]
    assert len(alternatives) == len(set(alternatives))
