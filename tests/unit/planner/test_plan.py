"""Plans from configs alone: memory entries, operators and collectives."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod

import pytest
from fixtures.strategies import LLAMA_8B, LLAMA_8B_STEP

from scalewise.bench.memory_accuracy_runs import SMALL, WEIGHTS
from scalewise.config import paths
from scalewise.errors import ConfigError
from scalewise.models.op_graph import OpWork, build_op_graphs
from scalewise.parallelism.collective import CollectiveKind
from scalewise.plan_config import MemoryMethod
from scalewise.planner import host_memory
from scalewise.planner.communication import list_collectives
from scalewise.planner.fit_check import FitStatus, check_fit
from scalewise.planner.forward_pass import forward_spec
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryBreakdown, MemoryEntry, StepPhase
from scalewise.planner.peak_memory import worst_rank_breakdown
from scalewise.planner.plan import Plan, build_plan, dollars_per_billion_tokens, plan_record
from scalewise.planner.step_time import predict_step_time
from scalewise.run_config import RunConfig
from scalewise.units import GIB, MIB

Compose = Callable[..., RunConfig]


def test_plan_of_dpo_adds_a_reference_forward_pass(compose: Compose) -> None:
    """A pair has two sequences; without an adapter, reference log-probabilities are cached."""
    pairs = ("objective=dpo", "data.pairs=true")
    overrides_by_name = {"text": (), "cached_reference": pairs, "frozen": ("adapter=lora",)}
    overrides_by_name["disabled_adapter"] = (*pairs, "adapter=lora")
    runs = {
        name: compose(*LLAMA_8B_STEP, *overrides, check_machine=False)
        for name, overrides in overrides_by_name.items()
    }
    steps = {name: run_step for name, run in runs.items() if (run_step := predict_step_time(run))}
    assert steps["cached_reference"].matmul == pytest.approx(2 * steps["text"].matmul, rel=0.01)
    assert steps["disabled_adapter"].matmul == pytest.approx(2 * steps["frozen"].matmul, rel=0.01)
    assert [name for name, step in steps.items() if step.forward_only] == ["disabled_adapter"]
    compute_s = (
        steps["cached_reference"].matmul
        + steps["cached_reference"].attention
        + steps["cached_reference"].pointwise
    )
    assert compute_s / 4 < steps["disabled_adapter"].forward_only < compute_s / 2.5
    assert runs["cached_reference"].flops_per_step == 2 * runs["text"].flops_per_step
    forward_flops = runs["text"].flops_per_token / 3
    assert (
        runs["disabled_adapter"].flops_per_token == runs["frozen"].flops_per_token + forward_flops
    )


def test_plan_peak_is_the_maximum_over_phases() -> None:
    overrides = (
        MemoryEntry("activations", {StepPhase.loss: 6, StepPhase.backward_last: 4}, "", ""),
        MemoryEntry("gradients", {StepPhase.backward_last: 3, StepPhase.optimizer: 5}, "", ""),
    )
    assert (MemoryBreakdown(overrides).peak, MemoryBreakdown(overrides).peak_phase) == (
        7,
        StepPhase.backward_last,
    )


LLAMA_160M = ("model=llama_160m", "hardware=h100", "hardware.devices_per_node=4", "data=synthetic")
TIED = ("experiment=smoke", "model.vocabulary=8192")


@pytest.mark.parametrize(
    "overrides",
    [
        (*LLAMA_160M, "parallelism=deepspeed_zero1", "precision=bf16_mixed"),
        (*LLAMA_160M, "parallelism=deepspeed_zero2"),
        (*LLAMA_160M, "parallelism=ddp"),
        TIED,
        (*TIED, "parallelism=ddp"),
        (*TIED, "parallelism=tensor"),
        (*TIED, "trainer.micro_batch=2", "trainer.global_batch=8"),
        (*TIED, "parallelism=tensor", "trainer.micro_batch=2", "trainer.global_batch=8"),
    ],
    ids=" ".join,
)
def test_plan_formulas_give_the_maximum_of_their_entry(
    overrides: tuple[str, ...], compose: Compose
) -> None:
    entries = worst_rank_breakdown(compose(*overrides, check_machine=False)).entries
    numeric = [it for it in entries if re.fullmatch(r"[\d,.]+( x [\d,.]+)* B", it.formula)]
    assert len(numeric) >= 3
    for entry in numeric:
        factors = entry.formula.removesuffix(" B").replace(",", "").split(" x ")
        assert prod(map(float, factors)) == pytest.approx(entry.max_bytes, rel=1e-3), entry
    tied = [entry for entry in entries if entry.name == "gradient of the tied head"]
    assert all(entry in numeric for entry in tied)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adamw_4bit", "adafactor"])
def test_optimizer_step_in_backward_has_no_temporaries_on_cuda(
    optimizer: str, compose: Compose
) -> None:
    """torchao compiles the update on CUDA; uncompiled it takes more than the gradients."""
    overrides = ("model=llama_160m", "hardware=h100", "trainer.clip_norm=null", "data.sequence=16")
    overrides = (*overrides, "data=synthetic", "trainer.micro_batch=1", "trainer.global_batch=1")
    peaks = [
        worst_rank_breakdown(
            compose(
                *overrides,
                f"optimizer={optimizer}",
                f"optimizer.in_backward={in_backward}",
                check_machine=False,
            )
        ).peak
        for in_backward in (True, False)
    ]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("name", paths.option_names("experiment"))
def test_plan_covers_every_experiment(name: str, compose: Compose) -> None:
    run = compose(f"experiment={name}", check_machine=False)
    if run.objective.trace_only:
        assert run.plan.method is MemoryMethod.trace
        return
    plan = build_plan(run)
    assert plan.fit.status is FitStatus.fits
    assert plan.fit.breakdown.peak > plan.run.model.num_parameters * 4
    assert all(entry.reason for entry in plan.fit.breakdown.entries)


@pytest.mark.parametrize("name", ["llama3_8b", "gpt2_124m", "decoder_nano"])
def test_operator_graph_flops_equal_the_model(name: str, compose: Compose) -> None:
    run = compose(f"model={name}", "data=synthetic", "data.sequence=256", check_machine=False)
    op_graphs = build_op_graphs(run.model, forward_spec(run, sequences=2, tokens_per_sequence=256))
    graphs = [*[op_graphs.block] * run.model.layers, op_graphs.head]
    flops_by_work = {
        work: sum(
            operator.flops + operator.backward_flops
            for graph in graphs
            for operator in graph.operators
            if operator.work is work
        )
        for work in OpWork
    }
    # A causal kernel skips half of the FLOPs that the model counts.
    expected_flops = flops_by_work[OpWork.matmul] + 2 * flops_by_work[OpWork.attention]
    assert expected_flops == pytest.approx(run.model.flops(256) * 2 * 256)


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        (["shards=16"], {"shards"}),
        (["shards=16", "context=2"], {"shards and context", "context"}),
        (["replicate=2", "shards=16"], {"shards", "replicate"}),
    ],
)
def test_collectives_are_named_by_mesh_axes(
    sizes: list[str], axes: set[str], compose: Compose
) -> None:
    overrides = (
        "model=openllama_7b",
        "data.sequence=64",
        "parallelism=mesh",
        "hardware=h100_8x4",
        "trainer.micro_batch=1",
    )
    step = predict_step_time(
        compose(*overrides, *(f"parallelism.{size}" for size in sizes), check_machine=False)
    )
    assert step is not None
    assert set(step.exposed_communication) - {"the whole mesh"} == axes


@pytest.mark.timed
def test_plan_computes_thousands_of_memory_breakdowns_per_second(compose: Compose) -> None:
    run = compose(*LLAMA_8B_STEP, check_machine=False)
    grid = list(product((1, 2, 4, 8), (2, 4, 8, 16, 32, 64, 128, 256)))
    runs = [
        replace(
            run,
            trainer=replace(run.trainer, micro_batch=micro_batch),
            parallelism=replace(run.parallelism, shards=shards),
        )
        for micro_batch, shards in grid
    ] * 8
    start = time.process_time()
    for run_variant in runs:
        check_fit(run_variant)
    rate = len(runs) / (time.process_time() - start)
    print(f"{rate:,.0f} breakdowns/s")
    assert rate > 500  # 2,000 are expected on an idle machine; this one may be busy


def test_plan_imports_no_torch() -> None:
    arguments = ["plan", *LLAMA_8B_STEP, "trainer.micro_batch=8", "trainer.global_batch=64"]
    code = "import sys; sys.modules['torch'] = None; from scalewise.cli import main; "
    code += f"sys.exit(main({arguments!r}))"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 3, completed.stderr
    assert "Suggested fix: " in completed.stdout


def test_zero_collectives_send_gradients_and_weights(plan_of: Callable[..., Plan]) -> None:
    base_overrides = [
        override for override in LLAMA_8B_STEP if not override.startswith("parallelism")
    ]
    replica_overrides = ("parallelism.replicas=8", "trainer.global_batch=32")
    for stage, reduced, gathers in ((1, 1, 1), (2, 4, 1), (3, 4, 8)):
        run = plan_of(*base_overrides, f"parallelism=deepspeed_zero{stage}", *replica_overrides).run
        gradients, weights = list_collectives(run.parallelism, run)
        count = run.model.num_parameters
        assert (gradients.bytes, gradients.count) == (4 * count, reduced), stage
        assert (weights.bytes, weights.count) == (2 * count, gathers), stage
        step = predict_step_time(run)
        assert step is not None
        assert step.overlapped_communication + sum(step.exposed_communication.values()) > 0, stage


def test_plan_notes_a_device_without_bf16(compose: Compose) -> None:
    with pytest.raises(ConfigError, match="V100 has no bf16; set precision=fp16_mixed"):
        compose("hardware=v100", "precision=bf16_mixed", check_machine=False)


def test_memory_breakdown_lists_the_moving_average(plan_of: Callable[..., Plan]) -> None:
    base_overrides = [
        override for override in LLAMA_8B_STEP if not override.startswith("parallelism")
    ]
    zero2 = ("parallelism=deepspeed_zero2", "parallelism.replicas=8")
    zero3 = ("parallelism=deepspeed_zero3", "parallelism.replicas=8")
    for strategy, ranks in (
        (("parallelism=ddp", "parallelism.replicas=8"), 1),
        (("parallelism=fsdp", "parallelism.shards=8"), 8),
        (("parallelism=fsdp", "parallelism.shards=8", "parallelism.cpu_offload=true"), 8),
        (zero2, 8),
        (zero3, 8),
        ((*zero2, "parallelism.offload_optimizer=cpu"), 8),
        ((*zero3, "parallelism.offload_optimizer=cpu"), 8),
    ):
        default_plan, plan = (
            plan_of(*base_overrides, *strategy),
            plan_of(*base_overrides, *strategy, "callbacks=[guard,ema]"),
        )
        average_bytes = 4 * plan.run.model.num_parameters / ranks
        on_device = {entry.name: entry.max_bytes for entry in plan.fit.breakdown.entries}.get(
            "average", 0
        )
        node = {entry.name: entry.max_bytes for entry in host_memory.node_memory(plan.run).entries}
        on_host = node.get("offloaded average", 0)
        if len(strategy) == 3:
            assert on_device == 0, strategy
            assert on_host == pytest.approx(8 * average_bytes, rel=1e-3), strategy
        else:
            assert on_host == 0, strategy
            assert on_device == pytest.approx(average_bytes, rel=1e-3), strategy
        assert plan.fit.breakdown.peak - default_plan.fit.breakdown.peak == on_device, strategy


def test_sharded_state_trades_memory_for_communication(plan_of: Callable[..., Plan]) -> None:
    def plan(state: str) -> Plan:
        accumulation = ("trainer.micro_batch=1", "trainer.global_batch=32")
        return plan_of(*LLAMA_8B, *accumulation, f"parallelism.shard={state}")

    optimizer, gradients, parameters = map(plan, ("optimizer", "gradients", "parameters"))
    peaks = [each.fit.breakdown.peak for each in (optimizer, gradients, parameters)]
    assert peaks == sorted(peaks, reverse=True)
    numel = optimizer.run.model.num_parameters
    unsharded_gradients = 4 * numel * 7 / 8  # fp32, on 8 ranks instead of 1 of 8
    assert peaks[0] - peaks[1] == pytest.approx(unsharded_gradients, rel=0.1)

    def gathered_and_reduced(each: Plan) -> tuple[int, int]:
        sizes = Counter[CollectiveKind]()
        for collective in list_collectives(each.run.parallelism, each.run):
            sizes[collective.kind] += collective.count * collective.bytes
        return sizes[CollectiveKind.all_gather], sizes[CollectiveKind.reduce_scatter]

    gathered, reduced = gathered_and_reduced(optimizer)
    assert (gathered, reduced) == (2 * numel, 4 * numel)  # once per step, bf16 and fp32
    assert gathered_and_reduced(gradients) == (gathered, 4 * reduced)
    assert gathered_and_reduced(parameters)[0] > 7 * gathered
    assert gathered_and_reduced(parameters)[1] == 4 * reduced


def test_matmul_workspaces_count_in_every_phase_on_cuda(plan_of: Callable[..., Plan]) -> None:
    for overrides, size in (
        (("hardware=h100",), 64 * MIB),
        (("hardware=h100", "hardware.matmul_workspace_mib=32"), 32 * MIB),
        (("hardware=a100_80g",), 0),
        (("hardware=cpu", "hardware.matmul_workspace_mib=64"), 0),
    ):
        plan = plan_of("model=llama_160m", "data=synthetic", *overrides)
        entries = [it.bytes for it in plan.fit.breakdown.entries if it.name == "workspaces"]
        expected = [dict.fromkeys(ALL_PHASES, size)] if size else []  # empty entries are left out
        assert entries == expected, overrides


def test_zero_memory_partitions_fp32_masters(plan_of: Callable[..., Plan]) -> None:
    base_overrides = [
        override for override in LLAMA_8B_STEP if not override.startswith("parallelism")
    ]
    ranks, sizes = 8, {}
    for stage in (1, 2, 3):
        zero = (f"parallelism=deepspeed_zero{stage}", f"parallelism.replicas={ranks}")
        plan = plan_of(*base_overrides, *zero)
        sizes = {entry.name: entry.max_bytes for entry in plan.fit.breakdown.entries}
        count = plan.run.model.num_parameters
        weight_ranks = 1 if stage < 3 else ranks
        assert sizes["parameters"] == pytest.approx(2 * count / weight_ranks, rel=1e-3), stage
        assert sizes["masters"] == pytest.approx(4 * count / ranks, rel=1e-3), stage
        assert sizes["optimizer state"] == pytest.approx(8 * count / ranks, rel=1e-3), stage
        gradient_ranks = 1 if stage == 1 else ranks
        assert sizes["gradients"] == pytest.approx(
            (4 if stage > 1 else 2) * count / gradient_ranks, rel=1e-3
        ), stage
    assert sizes["gathered weights"] == pytest.approx(2e9, rel=0.01)


def test_zero3_gathers_weights_in_groups_of_the_prefetch_bucket(
    plan_of: Callable[..., Plan],
) -> None:
    """The sizes of DeepSpeed's all-gathers of this model, of which one block is the largest part.

    Groups of at least 262,144 elements: the largest has 327,936.
    """
    overrides = (*SMALL, *WEIGHTS, "parallelism=deepspeed_zero3", "parallelism.keep_whole_below=1")
    small_buckets = "parallelism.bucket_mib=1"
    all_elements = plan_of(*overrides).run.model.num_parameters
    for options, elements in (
        ((small_buckets,), 327_936),
        ((), all_elements),
        ((small_buckets, "parallelism.replicas=1"), 0),
    ):
        plan = plan_of(*overrides, *options)
        entries = {entry.name: entry.bytes for entry in plan.fit.breakdown.entries}
        assert entries.get("gather buffer", {}).get(StepPhase.forward, 0) == 4 * elements, options
        gathered = entries["gathered weights"]
        head_elements = 256 + 256 * 256
        assert gathered[StepPhase.backward_head] == 4 * all_elements, options
        assert gathered[StepPhase.backward_last] == 4 * (all_elements - head_elements), options
        assert entries["buckets"].keys() == set(ALL_PHASES), options


def test_plan_price_counts_all_devices(compose: Compose) -> None:
    run = compose(*LLAMA_8B_STEP, "hardware.dollars_per_hour=3", check_machine=False)
    assert dollars_per_billion_tokens(run, 1000.0) == pytest.approx(
        3 * run.world_size * 1e9 / 1000 / 3600
    )
    assert build_plan(run).dollars_for(2e9) == pytest.approx(
        2 * (dollars_per_billion_tokens(run, build_plan(run).tokens_per_s) or 0)
    )
    assert dollars_per_billion_tokens(run, None) is None
    assert (
        dollars_per_billion_tokens(
            compose(*LLAMA_8B_STEP, "hardware.dollars_per_hour=null", check_machine=False), 1000.0
        )
        is None
    )


def test_plan_record_has_the_memory_limit(compose: Compose) -> None:
    assert plan_record(compose(*LLAMA_8B_STEP, check_machine=False))["limit_bytes"] == 80 * GIB


def test_v_shaped_pipeline_has_two_copies_of_a_tied_weight(compose: Compose) -> None:
    """As measured: the peak memory of a run is the same with an untied head."""
    schedule = ("parallelism=pipeline", "parallelism.pipeline_schedule=zbv_zero_bubble")
    tied, untied = (
        worst_rank_breakdown(compose(*schedule, "model.layers=4", f"model.tied={value}"))
        for value in ("true", "false")
    )
    assert tied.peak == untied.peak
