"""Host memory and disk of a node: offloaded state, ranks and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fixtures.strategies import LLAMA_8B

from scalewise.optimizers import AdamWConfig
from scalewise.optimizers.config import PagedAdamWConfig
from scalewise.parallelism.single import SingleConfig
from scalewise.planner import peak_memory
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.host_memory import (
    checkpoint_bytes,
    node_memory,
    rank_traffic,
    ranks_per_node,
    transfer_seconds,
)
from scalewise.planner.plan import build_plan
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.run_config import RunConfig
from scalewise.units import GIB

Compose = Callable[..., RunConfig]

TRAINING = (*LLAMA_8B, "trainer.micro_batch=1", "memory=checkpoint_full", "hardware.context_gib=1")
OFFLOAD = "parallelism.cpu_offload=true"


def lines(run: RunConfig) -> dict[str, int]:
    return {entry.name: entry.max_bytes for entry in node_memory(run).entries}


@pytest.fixture
def run_of(compose: Compose) -> Compose:
    return lambda *overrides: compose(*TRAINING, *overrides, check_machine=False)


def test_host_memory_includes_offloaded_state(run_of: Compose) -> None:
    default_entries, offloaded = lines(run_of()), lines(run_of(OFFLOAD))
    weights = run_of().model.num_parameters * 4
    assert "offloaded optimizer state" not in default_entries
    assert offloaded["offloaded optimizer state"] == pytest.approx(2 * weights, rel=1e-3)
    assert offloaded["offloaded gradients"] == pytest.approx(weights, rel=1e-3)
    assert offloaded["offloaded parameters"] == pytest.approx(weights, rel=1e-3)


def test_host_memory_of_an_offloaded_optimizer(run_of: Compose) -> None:
    default_run = replace(run_of(), parallelism=SingleConfig())
    run = replace(default_run, optimizer=AdamWConfig(offload=True))
    weights = run.model.num_parameters * 4
    entries = lines(run)
    assert entries["offloaded optimizer state"] == 2 * weights
    assert entries["weights and gradients"] == 4 * 4 * run.model.vocabulary * run.model.width
    assert "offloaded gradients" not in entries
    assert rank_traffic(run, build_rank_memory(run.parallelism, run)).link == 3 * weights
    saved_bytes = (
        peak_memory.worst_rank_breakdown(default_run).peak
        - peak_memory.worst_rank_breakdown(run).peak
    )
    assert saved_bytes == pytest.approx(2 * weights, rel=1e-3)


def test_paged_optimizer_state_moves_only_without_room(run_of: Compose) -> None:
    """A step reads the state in a fixed order, so that the first pages evicted are needed first."""
    default_run = replace(run_of("hardware.memory_gib=200"), parallelism=SingleConfig())
    paged = replace(default_run, optimizer=PagedAdamWConfig())
    small_device_run = replace(paged, hardware=replace(paged.hardware, memory_gib=80.0))
    state = 2 * default_run.model.num_parameters * 4
    assert peak_memory.worst_rank_breakdown(default_run).peak - peak_memory.worst_rank_breakdown(
        paged
    ).peak == pytest.approx(state, rel=1e-3)
    assert lines(paged)["paged optimizer state"] == state
    paged_bytes = [
        rank_traffic(run, build_rank_memory(run.parallelism, run)).paged
        for run in (default_run, paged, small_device_run)
    ]
    assert paged_bytes == [0, 0, 2 * state]
    fast_s, slow_s = (
        transfer_seconds(run, build_rank_memory(run.parallelism, run))
        for run in (paged, small_device_run)
    )
    link = small_device_run.hardware.host_link_gb_per_s
    assert link is not None
    assert slow_s.stepping - fast_s.stepping == pytest.approx(2 * state / (link * 1e9))


def test_host_memory_counts_the_ranks_of_a_node(run_of: Compose) -> None:
    node_run = run_of(OFFLOAD, "hardware.devices_per_node=8")
    half = run_of(OFFLOAD, "hardware.devices_per_node=4", "hardware.nodes=2")
    assert (ranks_per_node(node_run), ranks_per_node(half)) == (8, 4)
    assert 2 * node_memory(half).peak == node_memory(node_run).peak


def test_nvme_offload_is_not_in_host_memory(compose: Compose) -> None:
    def host_entries(name: str, *overrides: str) -> dict[str, int]:
        base_overrides = [
            override for override in TRAINING if not override.startswith("parallelism")
        ]
        return lines(
            compose(*base_overrides, f"parallelism={name}", *overrides, check_machine=False)
        )

    assert "offloaded parameters" in host_entries("deepspeed_zero3_offload")
    on_disk = host_entries("deepspeed_zero3_nvme", "parallelism.nvme_path=/tmp")
    assert not [label for label in on_disk if label.startswith("offloaded")]


def test_host_memory_includes_offloaded_activations(compose: Compose) -> None:
    offload_overrides = ("memory=offload_activations", "precision=bf16_true")
    run = compose(*TRAINING[:-2], *offload_overrides, check_machine=False)
    inputs = run.model.layers * run.tokens_per_step // 8 * run.model.width * 2
    # The last block waits on the device for its backward pass, which comes next.
    last = inputs // run.model.layers
    assert lines(run)["offloaded activations"] == 8 * (inputs - last)
    pipeline_overrides = (
        "parallelism=pipeline",
        "parallelism.pipeline=2",
        "parallelism.pipeline_micro_batches=4",
    )
    base_overrides = [
        override for override in TRAINING[:-2] if not override.startswith("parallelism")
    ]
    pipeline_run = compose(
        *base_overrides,
        *offload_overrides,
        *pipeline_overrides,
        "trainer.micro_batch=4",
        check_machine=False,
    )
    rank_memory = build_rank_memory(pipeline_run.parallelism, pipeline_run, 0)
    assert rank_memory.in_flight == 2  # of one sample each, for the layers of a stage
    stage_bytes = inputs * rank_memory.num_layers // run.model.layers
    assert lines(pipeline_run)["offloaded activations"] == 2 * 2 * stage_bytes
    on_disk = compose(*TRAINING[:-2], *offload_overrides, "hardware=cpu", check_machine=False)
    assert "offloaded activations" not in lines(on_disk)


def test_host_memory_includes_async_checkpoint_copies(run_of: Compose) -> None:
    run = run_of("checkpoint.background=true")
    assert lines(run)["checkpoint on its way"] == pytest.approx(checkpoint_bytes(run), rel=1e-3)


def test_host_memory_may_exceed_the_node(run_of: Compose) -> None:
    overrides = ("hardware.host_memory_gib=100", "checkpoint.background=true")
    plan = build_plan(run_of(*overrides))
    assert plan.fit.host_breakdown is not None
    assert plan.fit.host_breakdown.peak > 100 * GIB
    assert plan.fit.status is FitStatus.host_out_of_memory
    assert plan.suggested_fix is not None
    assert plan.suggested_fix.overrides == ("checkpoint.background=false",)
    assert (
        build_plan(run_of("hardware.host_memory_gib=200", *overrides[1:])).fit.status
        is FitStatus.fits
    )


def test_host_memory_is_unknown_without_a_node_profile(run_of: Compose) -> None:
    fit = build_plan(run_of(OFFLOAD)).fit
    assert fit.host_breakdown is None
    assert fit.status is FitStatus.fits


def test_host_memory_fix_removes_unneeded_offload(run_of: Compose) -> None:
    plan = build_plan(run_of(OFFLOAD, "hardware.host_memory_gib=64"))
    assert plan.fit.status is FitStatus.host_out_of_memory
    assert plan.suggested_fix is not None
    assert plan.suggested_fix.overrides == ("parallelism.cpu_offload=false",)
