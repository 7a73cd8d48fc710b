"""Predicted step time: rates, pipeline bubble, links and launch latency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fixtures.strategies import LLAMA_8B_STEP

from scalewise.hardware import Hardware
from scalewise.models.op_graph import OpWork, build_op_graphs
from scalewise.optimizers.base import ROUNDED_ELEMENTS
from scalewise.parallelism.collective import CollectiveKind
from scalewise.parallelism.mesh import AXES
from scalewise.planner import peak_memory
from scalewise.planner.activation_liveness import model_op_graphs
from scalewise.planner.forward_pass import forward_spec
from scalewise.planner.operator_time import DeviceRates, forward_seconds
from scalewise.planner.plan import Plan
from scalewise.planner.step_parts import StepTime
from scalewise.planner.step_time import predict_collective_seconds, predict_step_time, ring_link
from scalewise.run_config import RunConfig
from scalewise.units import GIB, GIGA, MICRO

Compose = Callable[..., RunConfig]


def test_step_time_follows_from_hardware_rates(compose: Compose) -> None:
    run = compose(*LLAMA_8B_STEP, "hardware.step_scale=1", check_machine=False)
    slow_step, fast_step = (
        predict_step_time(
            replace(run, hardware=replace(run.hardware, product_share=matmul_fraction))
        )
        for matmul_fraction in (0.4, 0.8)
    )
    assert slow_step is not None
    assert fast_step is not None
    assert slow_step.matmul == pytest.approx(2 * fast_step.matmul, rel=0.05)
    assert fast_step.seconds == pytest.approx(sum(fast_step.parts().values()))
    tokens = run.tokens_per_step / run.world_size
    min_seconds = 6 * run.model.num_parameters * tokens / (989.5e12 * 0.8)
    assert fast_step.matmul == pytest.approx(min_seconds, rel=0.1)  # the embedding is not a matmul


def test_step_time_of_full_checkpointing_adds_a_forward_pass(compose: Compose) -> None:
    default_step, checkpointed_step = (
        predict_step_time(compose(*LLAMA_8B_STEP, f"memory={memory}", check_machine=False))
        for memory in ("none", "checkpoint_full")
    )
    assert default_step is not None
    assert checkpointed_step is not None
    assert default_step.recompute == 0
    forward = (default_step.matmul + default_step.attention + default_step.pointwise) / 3
    assert checkpointed_step.recompute == pytest.approx(forward, rel=0.2)


def test_step_time_includes_the_pipeline_bubble(compose: Compose) -> None:
    overrides = (
        "parallelism=pipeline",
        "parallelism.pipeline=4",
        "hardware=h100",
        *LLAMA_8B_STEP[3:8],
    )
    steps = {
        chunks: predict_step_time(
            compose(
                "model=llama3_8b",
                *overrides,
                "trainer.micro_batch=32",
                f"parallelism.pipeline_micro_batches={chunks}",
                check_machine=False,
            )
        )
        for chunks in (4, 32)
    }
    bubble_fractions = {
        chunks: step.pipeline_bubble / (step.seconds - step.pipeline_bubble)
        for chunks, step in steps.items()
        if step
    }
    assert bubble_fractions[4] == pytest.approx(3 / 4, rel=0.1)  # (stages - 1) / micro-batches
    assert bubble_fractions[32] == pytest.approx(3 / 32, rel=0.1)


NODES_OF_8_H200 = Hardware(
    link_gb_per_s=450,
    link_latency_us=4,
    devices_per_node=8,
    node_link_gb_per_s=50,
    node_link_latency_us=8,
)


def test_ring_leaves_a_node_by_the_link_of_each_of_its_ranks() -> None:
    """nccl-tests all_reduce_perf, 4 nodes of 8 H200 with a 400 Gb/s port each: 364.65 GB/s."""
    size = 4 * GIB
    link = ring_link(NODES_OF_8_H200, CollectiveKind.all_reduce, 32, 8)
    seconds = link.seconds(CollectiveKind.all_reduce, 32, size)
    assert 2 * 31 / 32 * size / seconds / GIGA == pytest.approx(364.65, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "ranks", "ranks_per_node", "latency_us", "gb_per_s"),
    [
        (CollectiveKind.all_gather, 8, 8, 7 * 4, 450),
        (CollectiveKind.all_gather, 32, 8, 27 * 4 + 4 * 8, 400),
        (CollectiveKind.all_gather, 8, 2, 3 * 4 + 4 * 8, 100),
        (CollectiveKind.all_gather, 4, 1, 3 * 8, 50),
        (CollectiveKind.reduce_scatter, 16, 8, 13 * 4 + 2 * 8, 400),
        (CollectiveKind.all_reduce, 4, 1, 6 * 8, 50),
        (CollectiveKind.send, 4, 2, 8, 50),
        (CollectiveKind.send, 4, 4, 4, 450),
        (CollectiveKind.all_to_all, 4, 2, 4 + 2 * 8, 3 / (1 / 450 + 2 / 50)),
        (CollectiveKind.all_to_all, 4, 4, 3 * 4, 450),
    ],
)
def test_ring_link_of_a_group(
    kind: CollectiveKind, ranks: int, ranks_per_node: int, latency_us: float, gb_per_s: float
) -> None:
    link = ring_link(NODES_OF_8_H200, kind, ranks, ranks_per_node)
    assert link.seconds(kind, ranks, 0) == pytest.approx(latency_us * MICRO)
    assert link.bytes_per_s == pytest.approx(gb_per_s * GIGA)


@pytest.mark.parametrize("kind", CollectiveKind)
def test_ring_link_of_equal_links_is_that_within_a_node(kind: CollectiveKind) -> None:
    for hardware in (Hardware(link_gb_per_s=450, link_latency_us=4), Hardware()):
        link = ring_link(hardware, kind, 32, 1)
        expected = ring_link(hardware, kind, 32, 32)
        assert link.latency_s == pytest.approx(expected.latency_s), hardware
        assert link.bytes_per_s == pytest.approx(expected.bytes_per_s), hardware


def test_hsdp_reduces_over_one_link_per_rank(compose: Compose) -> None:
    overrides = ("model=llama3_8b", "parallelism=hsdp", "hardware=h100_8x4", "data=synthetic")
    overrides = (*overrides, "parallelism.replicate=4")
    mesh = compose(*overrides, check_machine=False).parallelism
    assert (mesh.sizes["replicate"], mesh.sizes["shards"]) == (4, 8)
    assert mesh.describe_group(("shards", "context"), 8) == (8, 8)
    assert mesh.describe_group(("replicate",), 8) == (4, 1)
    assert mesh.describe_group(AXES, 8) == (32, 8)
    assert mesh.describe_group(("shards",), 4) == (8, 4)
    assert mesh.describe_group(("shards",), None) == (8, 8)


def test_second_copy_of_zero3_is_gathered_within_a_node(compose: Compose) -> None:
    overrides = (
        *("model=llama3_8b", "parallelism=deepspeed_zero3", "precision=bf16_mixed"),
        *("hardware=h100_8x4", "hardware.node_link_gb_per_s=5"),
    )
    steps = [
        predict_step_time(
            compose(*overrides, f"parallelism.hierarchical={ranks}", check_machine=False)
        )
        for ranks in (1, 8)
    ]
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[1].seconds < 0.8 * steps[0].seconds


def test_step_time_uses_the_link_between_nodes(compose: Compose) -> None:
    overrides = (
        *("model=openllama_7b", "parallelism=mesh", "parallelism.tensor=8", "data=synthetic"),
        *("precision=bf16_mixed", "hardware=h100_8x4"),
    )
    intra_node, inter_node = (
        predict_step_time(
            compose(*overrides, f"hardware.devices_per_node={devices}", check_machine=False)
        )
        for devices in (8, 1)
    )
    assert intra_node is not None
    assert inter_node is not None
    assert (
        inter_node.exposed_communication["tensor"] > 4 * intra_node.exposed_communication["tensor"]
    )


CPU = (
    "experiment=smoke",
    "hardware=cpu",
    "hardware.memory_gb_per_s=10",
    "hardware.fp32_tflops=0.1",
    "trainer.micro_batch=4",
    "trainer.global_batch=8",
)


def step(plan_of: Callable[..., Plan], *overrides: str) -> StepTime:
    step_time = plan_of(*CPU, *overrides).step_time
    assert isinstance(step_time, StepTime)
    return step_time


def test_step_time_prefers_measured_rates(plan_of: Callable[..., Plan]) -> None:
    default_step = step(plan_of, "hardware.product_share=0.5")
    calibrated_step = step(plan_of, "hardware.fp32_reached_tflops=0.05")
    assert calibrated_step.matmul == pytest.approx(default_step.matmul)
    assert step(plan_of, "hardware.fp32_reached_tflops=0.005").matmul > 5 * calibrated_step.matmul


def test_step_time_includes_launch_latency(plan_of: Callable[..., Plan]) -> None:
    run = plan_of(*CPU).run
    operators = (
        len(build_op_graphs(run.model, forward_spec(run, 4, 128)).block.operators)
        * run.model.layers
    )
    latency_step = step(plan_of, "hardware.launch_us=100000")
    compute_s = latency_step.matmul + latency_step.attention + latency_step.pointwise
    assert compute_s >= operators * run.accumulation * 0.1
    assert latency_step.pointwise > 100 * step(plan_of).pointwise


def test_step_time_launches_a_fused_kernel_once(compose: Compose) -> None:
    run = compose("model=llama3_1b", "hardware=h100", check_machine=False)
    spec = forward_spec(run, 1, 1)
    rates = DeviceRates(*[float("inf")] * 4, launch_s=1.0)
    kernels = []
    for is_compiled in (False, True):
        graph = model_op_graphs(run.model, replace(spec, is_compiled=is_compiled)).block
        launched = [op for op in graph.operators if op.writes[0] not in graph.fused_intermediates]
        seconds = sum(forward_seconds(graph, op, rates) for op in graph.operators)
        assert seconds == len([op for op in launched if op.work is not OpWork.communication])
        kernels.append(seconds)
    assert kernels[1] < 0.7 * kernels[0]


def test_step_time_divides_a_processor_among_ranks(plan_of: Callable[..., Plan]) -> None:
    two_rank_step = step(plan_of, "parallelism=ddp", "parallelism.replicas=2")
    one_rank_step = step(plan_of)
    assert two_rank_step.matmul == pytest.approx(one_rank_step.matmul)
    assert two_rank_step.pointwise == pytest.approx(one_rank_step.pointwise)


def test_step_time_includes_data_loading(plan_of: Callable[..., Plan]) -> None:
    assert step(plan_of).data_loading == 0
    tokens = plan_of(*CPU).run.tokens_per_step
    assert step(plan_of, "hardware.loader_tokens_per_s=1000").data_loading == tokens / 1000


def test_collectives_by_kind_add_up_to_the_communication_of_the_step(compose: Compose) -> None:
    overrides = ("model=llama3_8b", "hardware=h100_8", "precision=bf16_mixed", "data=synthetic")
    run = compose(
        *(*overrides, "trainer.global_batch=8", "trainer.micro_batch=4", "parallelism=mesh"),
        *("parallelism.shards=2", "parallelism.tensor=4"),
        check_machine=False,
    )
    step, collectives = predict_step_time(run), predict_collective_seconds(run)
    assert step is not None
    assert {f"{kind} over tensor" for kind in ("all-gather", "reduce-scatter")} <= {*collectives}
    assert {f"{kind} over shards" for kind in ("all-gather", "reduce-scatter")} <= {*collectives}
    exposed = sum(step.exposed_communication.values())
    assert sum(collectives.values()) == pytest.approx(exposed + step.overlapped_communication)
    single = compose("parallelism=single", "hardware=h100", check_machine=False)
    assert predict_collective_seconds(single) == {}


def test_compute_during_collectives_is_slower_on_gpus(compose: Compose) -> None:
    """Lee et al., 2025: compute takes 1.189 times as long during collectives."""
    overrides = ("model=llama3_8b", "precision=bf16_mixed", "data=synthetic", "parallelism=fsdp")
    batch = ("trainer.global_batch=8", "trainer.micro_batch=1")
    run = compose(*overrides, "hardware=h100_8", *batch, check_machine=False)
    step = predict_step_time(run)
    assert step is not None
    assert step.overlapped_communication > 0
    slower_s = step.overlapped_communication * (1 - 1 / 1.189)
    assert step.parts()["overlap slowdown"] == pytest.approx(slower_s)
    assert step.seconds == pytest.approx(sum(step.parts().values()))
    exposed = step.without_overlap()
    added_s = step.overlapped_communication - slower_s
    assert exposed.seconds == pytest.approx(step.seconds + added_s)
    cpu_step = predict_step_time(compose(*CPU, "hardware.link_gb_per_s=1", "parallelism=fsdp"))
    assert cpu_step is not None
    assert cpu_step.overlapped_communication > 0
    assert cpu_step.overlap_slowdown == 0


def test_stochastic_rounding_adds_traffic_and_bounded_memory(compose: Compose) -> None:
    overrides = ("model=llama3_1b", "hardware=h100", "data=synthetic", "precision=bf16_true")
    run, rounded = (
        compose(*overrides, f"precision.stochastic_rounding={value}", check_machine=False)
        for value in ("false", "true")
    )
    step, rounded_step = predict_step_time(run), predict_step_time(rounded)
    assert step is not None
    assert rounded_step is not None
    # Bytes per element: gradient norm, then weight, gradient and moments; with rounding also casts.
    ratio = (68 + 2 * 20 + 2) / (2 + 2 * 3 + 2 * 4)
    assert rounded_step.optimizer == pytest.approx(ratio * step.optimizer)
    assert rounded_step.matmul == step.matmul
    sizes = [peak_memory.worst_rank_breakdown(each).entries for each in (run, rounded)]
    scratch = [[entry for entry in entries if entry.name == "step"] for entries in sizes]
    assert scratch[0] == []
    (entry,) = scratch[1]
    assert max(entry.bytes.values()) == ROUNDED_ELEMENTS * 4 * 4  # of 262,668,288
