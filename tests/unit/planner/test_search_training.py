"""Strategy search: options that change training, and single changes of the best runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scalewise.commands import show_search
from scalewise.planner.alternatives import neighbor_alternatives
from scalewise.planner.search import SearchResult
from scalewise.run_config import RunConfig
from scalewise.typed_override import replace_overrides

Compose = Callable[..., RunConfig]
FindStrategies = Callable[..., SearchResult]

SMALL_RUN = ("model=llama_160m", "hardware=h100", "data=synthetic", "trainer.global_batch=8")


def test_search_keeps_full_training_if_it_fits(find_strategies: FindStrategies) -> None:
    best = find_strategies("memory", *SMALL_RUN).best
    assert best is not None
    assert best.training_overrides == ()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("hardware=h100",), "bf16_mixed"),
        (("hardware=h100", "precision=fp32"), None),
        (("hardware=v100",), None),
        (("hardware=h100", "precision=bf16_true"), None),
    ],
)
def test_search_leads_with_bf16_where_a_gpu_has_it(
    overrides: tuple[str, ...],
    expected: str | None,
    find_strategies: FindStrategies,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = (SMALL_RUN[0], *SMALL_RUN[2:], *overrides)
    result = find_strategies("memory", *small)
    assert result.best is not None
    assert ("precision=bf16_mixed" in result.best.overrides) == (expected is not None)
    assert result.best.training_overrides == ()
    show_search.print_search(result)
    assert ("set precision=fp32 for fp32" in capsys.readouterr().out) == (expected is not None)
    layout = find_strategies("layout", *small).best
    assert layout is not None
    assert not any(override.startswith("precision") for override in layout.overrides)


@pytest.mark.parametrize(
    ("overrides", "unchanged", "changed"),
    [
        (
            (
                *("hardware=h100", "hardware.devices_per_node=2"),
                *("parallelism=pipeline", "parallelism.pipeline=2"),
            ),
            {
                f"parallelism.pipeline_schedule={schedule}"
                for schedule in (
                    *("gpipe", "interleaved_1f1b"),
                    *("interleaved_zero_bubble", "zbv_zero_bubble"),
                )
            }
            | {"optimizer=adamw_paged", "compile=none"},
            {"precision=fp8", "optimizer=adamw_8bit", "optimizer=adamw_4bit"},
        ),
        (
            (
                *("hardware=a100_80g", "hardware.devices_per_node=2"),
                *("parallelism=fsdp", "parallelism.shards=2"),
            ),
            {
                *("parallelism.shard=optimizer", "parallelism.shard=gradients"),
                *("parallelism.cpu_offload=true", "compile=none"),
            },
            {"optimizer=adamw_8bit", "optimizer=adamw_4bit"},
        ),
        (
            ("hardware=a100_80g", "hardware.devices_per_node=2"),
            {
                *("parallelism.shard=optimizer", "parallelism.shard=gradients"),
                *("parallelism.cpu_offload=true", "compile=none"),
                *("parallelism=deepspeed_zero1", "parallelism=deepspeed_zero2"),
                *("parallelism=deepspeed_zero3", "parallelism=deepspeed_zero2_offload"),
                *("parallelism=deepspeed_zero3_offload", "optimizer.offload=true"),
                "optimizer=adamw_paged",
            },
            {"optimizer=adamw_8bit", "optimizer=adamw_4bit", "optimizer=adafactor"},
        ),
        (
            ("hardware=a100_80g", "precision=bf16_true", "trainer.clip_norm=null"),
            {
                *("optimizer.offload=true", "optimizer.in_backward=true", "optimizer=adamw_paged"),
                "compile=none",
            },
            {"optimizer=adamw_8bit", "optimizer=adamw_4bit", "optimizer=adafactor"},
        ),
        (("hardware=a100_80g", "optimizer=adamw"), {"compile=none"}, set()),
        (("hardware=a100_80g", "optimizer=adamw", "compile=none"), set(), set()),
        (("hardware=a100_80g", "optimizer=adamw", "compile=block"), set(), set()),
    ],
    ids=["pipeline", "shards", "data_parallel", "single", "typed", "eager", "compiled"],
)
def test_search_refines_the_best_runs(
    overrides: tuple[str, ...],
    unchanged: set[str],
    changed: set[str],
    find_strategies: FindStrategies,
    compose: Compose,
) -> None:
    request = (SMALL_RUN[0], *SMALL_RUN[2:], *overrides)
    result = find_strategies("all", *request)
    refined = {one.refinement[0]: one for one in result.candidates if one.refinement}
    trained = {one.training_overrides: one for one in result.candidates if one.training_overrides}
    assert set(refined) == unchanged
    for key, candidate in (refined | {key: trained[(key,)] for key in changed}).items():
        composed = compose(*replace_overrides(request, candidate.overrides), check_machine=False)
        for group in (
            *("optimizer", "precision", "memory", "parallelism", "trainer"),
            *("objective", "compile"),
        ):
            assert getattr(composed, group) == getattr(candidate.run, group), (key, group)
    assert result.best is not None
    assert result.best.training_overrides == ()


def test_search_chunks_the_loss_of_the_best_runs(find_strategies: FindStrategies) -> None:
    small = (SMALL_RUN[0], *SMALL_RUN[2:], "hardware=a100_80g", "optimizer=adamw")
    chunked = [
        one
        for one in find_strategies("all", *small).candidates
        if "objective.loss_chunk=1024" in one.overrides and not one.training_overrides
    ]
    assert chunked
    assert not any(one.refinement for one in chunked)
    typed = find_strategies("all", *small, "objective.loss_chunk=512").candidates
    assert {one.run.objective.loss_chunk for one in typed} == {512}


def test_search_prefers_fsdp_to_an_insignificant_gain_of_deepspeed(
    find_strategies: FindStrategies, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("model=llama3_8b", "hardware=h100_8", "adapter=lora", "data=synthetic")
    overrides += ("optimizer=adamw", "memory=none", "trainer.micro_batch=2", "compile=block")
    result = find_strategies("all", *overrides, "data.sequence=2048", "trainer.global_batch=16")
    fastest = result.lowest_cost
    assert fastest is not None
    assert fastest.needs_deepspeed
    assert result.best is not None
    assert not result.best.needs_deepspeed
    assert result.best.step_seconds < fastest.step_seconds * 1.05
    show_search.print_search(result)
    assert "needs DeepSpeed; its predicted time is" in capsys.readouterr().out


def test_search_marks_changed_training_and_does_not_lead_with_it(
    find_strategies: FindStrategies,
) -> None:
    overrides = ("model=llama_160m", "hardware=h100", "data=synthetic", "trainer.global_batch=8")
    result = find_strategies("all", *overrides)
    changing = ("optimizer=adamw_8bit", "optimizer=adamw_4bit", "optimizer=adafactor")
    for change in (*changing, "precision=fp8", "precision=bf16_true", "quantization=nf4"):
        found = [one for one in result.candidates if change in one.overrides]
        assert found, change
        assert all(change in one.training_overrides for one in found), change
        assert not any(one is leader for one in found for leader in result.pareto_front), change
    assert result.best is not None
    assert result.best.training_overrides == ()
    assert min(one.step_seconds for one in result.candidates) < result.best.step_seconds


def test_search_proposes_an_adapter_if_nothing_else_fits(find_strategies: FindStrategies) -> None:
    overrides = ("model=llama3_8b", "hardware=rtx4090", "data=synthetic", "data.sequence=2048")
    all_of = find_strategies("memory", *overrides)
    assert all_of.best is not None
    assert "adapter=lora" in all_of.best.overrides
    assert all(
        candidate.training_overrides for candidate in all_of.candidates if candidate.is_acceptable
    )


def test_search_separates_changed_training(
    find_strategies: FindStrategies, capsys: pytest.CaptureFixture[str]
) -> None:
    all_of = find_strategies("memory", *SMALL_RUN)
    assert all_of.best in all_of.pareto_front
    assert not any(candidate.training_overrides for candidate in all_of.pareto_front)
    assert all(candidate.training_overrides for candidate in all_of.changed_training_front)
    reasons_by_value = {
        it.value: it.reason for it in neighbor_alternatives(all_of) if it.choice == "training"
    }
    assert reasons_by_value["adapter=lora"].endswith("% less time, but changes the training")
    assert not any("-" in reason for reason in reasons_by_value.values())
    show_search.print_search(all_of)
    stdout = capsys.readouterr().out
    heads = ("\nUnchanged training: Pareto", "\nChanged training: Pareto")
    last = "\nBest time with unchanged training: single"
    assert 0 < stdout.find(heads[0]) < stdout.find(heads[1]) < stdout.find(last)
