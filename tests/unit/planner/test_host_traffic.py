"""Traffic of offloading between devices, hosts and disks, and its time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fixtures.strategies import LLAMA_8B

from scalewise.planner import host_memory
from scalewise.planner.host_memory import HostTraffic
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.planner.step_parts import StepTime
from scalewise.planner.step_time import predict_step_time
from scalewise.run_config import RunConfig
from scalewise.units import GIGA

Compose = Callable[..., RunConfig]

OFFLOAD = "parallelism.cpu_offload=true"
RATES = ("hardware.host_link_gb_per_s=50", "hardware.host_memory_gb_per_s=200")


def host_traffic(run: RunConfig) -> HostTraffic:
    return host_memory.rank_traffic(run, build_rank_memory(run.parallelism, run))


def step(run: RunConfig) -> StepTime:
    step_time = predict_step_time(run)
    assert step_time is not None
    return step_time


@pytest.fixture
def run_of(compose: Compose) -> Compose:
    rates = ("trainer.micro_batch=1", "hardware.step_scale=1")
    return lambda *overrides: compose(*LLAMA_8B, *rates, *overrides, check_machine=False)


@pytest.fixture
def deepspeed(compose: Compose) -> Compose:
    base_overrides = [override for override in LLAMA_8B if not override.startswith("parallelism")]
    return lambda name, *overrides: compose(
        *base_overrides,
        "trainer.micro_batch=1",
        f"parallelism={name}",
        "parallelism.replicas=8",
        *overrides,
        check_machine=False,
    )


def test_host_traffic_is_zero_without_offload(run_of: Compose) -> None:
    assert host_traffic(run_of()) == HostTraffic()
    assert step(run_of()).host_copies == 0


def test_host_traffic_of_offloaded_weights(run_of: Compose) -> None:
    run = run_of(OFFLOAD)
    shard = run.model.num_parameters * 4 / 8
    traffic = host_traffic(run)
    assert traffic.link == pytest.approx(3 * shard, rel=1e-3)
    assert traffic.host == pytest.approx((2 + 2 * 2 + 1) * shard, rel=1e-3)
    assert traffic.disk == 0
    traffic_without_reshard = host_traffic(
        run_of(OFFLOAD, "parallelism.reshard_after_forward=false")
    )
    assert traffic_without_reshard.link == pytest.approx(2 * shard, rel=1e-3)


def test_host_traffic_repeats_per_micro_batch(run_of: Compose) -> None:
    accumulation = ("trainer.global_batch=32", OFFLOAD)
    shard = run_of().model.num_parameters * 4 / 8
    reduce_key = "parallelism.reduce_each_micro_batch"
    reduced_last, reduced_each = (
        host_traffic(run_of(*accumulation, f"{reduce_key}={value}")) for value in ("false", "true")
    )
    assert reduced_last.link == pytest.approx((4 * 2 + 1) * shard, rel=1e-3)
    assert reduced_each.link == pytest.approx(4 * 3 * shard, rel=1e-3)


def test_host_traffic_of_deepspeed_offload(deepspeed: Compose) -> None:
    state = deepspeed("deepspeed_zero2", "parallelism.offload_optimizer=cpu")
    shard = state.model.num_parameters * 4 / 8
    in_bf16 = shard / 2  # compute copies; master weights and state are updated in fp32
    assert host_traffic(state).link == pytest.approx(2 * in_bf16, rel=1e-3)
    assert host_traffic(deepspeed("deepspeed_zero3_offload")).link == pytest.approx(
        3 * in_bf16, rel=1e-3
    )
    disk = host_traffic(deepspeed("deepspeed_zero3_nvme", "parallelism.nvme_path=/tmp")).disk
    assert disk == pytest.approx((2 + 1) * in_bf16 + 2 * (2 + 1) * shard, rel=1e-3)


def test_host_traffic_of_offloaded_activations(run_of: Compose) -> None:
    run = run_of("memory=offload_activations", "precision=bf16_true", *RATES)
    # The last block waits on the device for its backward pass, which comes next.
    inputs = (run.model.layers - 1) * run.tokens_per_step // 8 * run.model.width * 2
    assert host_traffic(run).activations == 2 * inputs
    assert step(run).host_copies == 0
    run_without_rate = run_of("memory=offload_activations", "hardware.host_link_gb_per_s=null")
    assert host_memory.missing_rates(run_without_rate) == ("host_link_gb_per_s",)
    slow_link = "hardware.host_link_gb_per_s=0.5"
    slow = step(run_of("memory=offload_activations", "precision=bf16_true", slow_link))
    compute = slow.matmul + slow.attention + slow.pointwise + slow.recompute
    copies = 2 * inputs / (0.5 * GIGA)
    assert copies - compute < slow.host_copies < copies
    on_disk = run_of("memory=offload_activations", "hardware=cpu")
    assert host_traffic(on_disk).activations == 2 * inputs * run.model.layers // (
        run.model.layers - 1
    )
    assert host_memory.missing_rates(on_disk) == ("disk_gb_per_s",)


def test_host_traffic_time_is_bytes_over_rates(run_of: Compose) -> None:
    run = run_of(OFFLOAD, *RATES, "hardware.devices_per_node=4", "hardware.nodes=2")
    default_run = run_of("hardware.devices_per_node=4", "hardware.nodes=2")
    traffic, run_step = host_traffic(run), step(run)
    host_rate = 200 * GIGA * run.hardware.bandwidth_share
    assert run_step.optimizer == pytest.approx(4 * traffic.host / host_rate)
    hidden = 0.8 * (run_step.matmul + run_step.attention + run_step.pointwise + run_step.recompute)
    spare_s = hidden - run_step.overlapped_communication
    assert run_step.host_copies == pytest.approx(max(0.0, traffic.link / (50 * GIGA) - spare_s))
    slow_link_step = step(run_of(OFFLOAD, "hardware.host_link_gb_per_s=1", *RATES[1:]))
    assert slow_link_step.host_copies > 10 * step(default_run).seconds
    assert slow_link_step.parts()["copies off the device and back"] == slow_link_step.host_copies


def test_host_traffic_reports_a_missing_rate(run_of: Compose, deepspeed: Compose) -> None:
    assert host_memory.missing_rates(run_of()) == ()
    assert host_memory.missing_rates(run_of(OFFLOAD, *RATES)) == ()
    no_rates = ("hardware.host_link_gb_per_s=null", "hardware.host_memory_gb_per_s=null")
    assert host_memory.missing_rates(run_of(OFFLOAD, *no_rates)) == (
        "host_link_gb_per_s",
        "host_memory_gb_per_s",
    )
    on_disk = deepspeed("deepspeed_zero3_nvme", "parallelism.nvme_path=/tmp", *RATES)
    assert host_memory.missing_rates(on_disk) == ("disk_gb_per_s",)


def test_host_traffic_on_cpu_is_zero(compose: Compose) -> None:
    run = compose(
        "parallelism=deepspeed_zero2", "parallelism.offload_optimizer=cpu", check_machine=False
    )
    assert host_memory.missing_rates(run) == ()
    assert host_memory.transfer_seconds(
        run, build_rank_memory(run.parallelism, run)
    ) == host_memory.HostTransferTime(0.0, 0.0, 0.0)
