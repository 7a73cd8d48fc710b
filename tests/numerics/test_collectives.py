"""Collectives of each strategy equal the prediction, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixtures.collective_counts import (
    THIRD_STEP,
    CollectiveCounts,
    predicted_collectives,
    recorded_collectives,
)
from fixtures.hf_checkpoints import HFCheckpoints
from fixtures.job_runner import JobRunner
from fixtures.strategies import GEMMA3, GPT2, LLAMA, PHI, STRATEGIES, TINY_DECODER, mesh
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scalewise import compose
from scalewise.models.build import build_model
from scalewise.parallelism.mesh import PipelineSchedule
from scalewise.planner.communication import list_collectives
from scalewise.strategies.ddp import CONSTANT_BUFFERS

SHAPES = {"llama": LLAMA, "gpt2": GPT2}
ARCHITECTURES = {"gemma3": (*LLAMA, *GEMMA3), "phi": (*LLAMA, *PHI)}
RECOMPUTE_OPTIONS = {
    "none": (),
    "full": ("memory=checkpoint_full",),
    "selective": ("memory=checkpoint_selective",),
    "mixture": ("memory=checkpoint_every_n", "memory.otherwise=selective"),
    "loss": ("objective.loss_chunk=24",),
    "spikes": ("trainer.skip_sigma=6",),
    "z_loss": ("objective.z_loss=1e-4",),
    "z_loss, loss": ("objective.z_loss=1e-4", "objective.loss_chunk=24"),
    "lora": ("adapter=lora",),
    "dpo": ("objective=dpo", "data.pairs=true"),
    "dpo, loss": ("objective=dpo", "data.pairs=true", "objective.loss_chunk=24"),
    "dpo, lora": ("objective=dpo", "data.pairs=true", "adapter=lora"),
    "dpo, lora, loss": (
        "objective=dpo",
        "data.pairs=true",
        "adapter=lora",
        "objective.loss_chunk=24",
    ),
    "lora, full": (
        "adapter=lora",
        "adapter.targets=[attention.query,attention.output,feedforward.up,feedforward.down]",
        "memory=checkpoint_full",
    ),
    "dora, all": ("adapter=dora", "adapter.targets=[.*]"),
    "dora, full": ("adapter=dora", "adapter.targets=[.*]", "memory=checkpoint_full"),
    "dora, selective": ("adapter=dora", "adapter.targets=[.*]", "memory=checkpoint_selective"),
    "ia3": ("adapter=ia3",),
    "ia3, full": ("adapter=ia3", "memory=checkpoint_full"),
    "ia3, down": ("adapter=ia3", "adapter.targets=[feedforward.down]"),
    "lora, up": ("adapter=lora", "adapter.targets=[feedforward.up]"),
    "norms": ("adapter=lora", "adapter.trained=[.*norm]"),
    "embedding": ("adapter=lora", "adapter.trained=[embedding]"),
    "prompt": ("adapter=prompt", "model.context=64"),
    "prefix": ("adapter=prefix", "model.context=64"),
    "query": ("adapter=ia3", "adapter.trained=[attention.query]", "memory=checkpoint_full"),
    "down": ("adapter=lora", "adapter.targets=[.*up]", "adapter.trained=[feedforward.down]"),
    "lora, down": ("adapter=lora", "adapter.targets=[feedforward.down]"),
}
"""Options that recompute activations and collectives, or skip collectives."""
MUON = ("ddp", "fsdp", "hsdp", "fsdp_zero2", "context", "shard_context")
"""Strategies under which Muon gathers its updates from shards."""
RUN_OPTIONS = {**RECOMPUTE_OPTIONS, "muon": ("optimizer=muon",)}
CI_CASES = (
    ("gpt2", "tensor", "full"),
    ("gpt2", "pipeline_shard_zbv_zero_bubble", "none"),
    ("llama", "fsdp", "lora, full"),
    ("llama", "fsdp", "loss"),
    ("llama", "fsdp", "spikes"),
    ("llama", "ddp", "spikes"),
    ("llama", "tensor", "z_loss, loss"),
    ("llama", "fsdp", "prompt"),
)
EXHAUSTIVE_STRATEGIES = (
    "ddp_small_buckets",
    "fsdp_zero1",
    "fsdp_prefetch",
    "context_unbalanced",
    "pipeline_gpipe",
)
EXHAUSTIVE_STRATEGIES += (
    "pipeline_interleaved_1f1b",
    "replicate_shard",
    "context_tensor",
    "pipeline_tensor",
)
EXHAUSTIVE_STRATEGIES += (
    "replicate_tensor",
    "shard_context",
    "pipeline_context",
    "pipeline_replicate",
    "fsdp_4",
)
EXHAUSTIVE_STRATEGIES += (
    "fsdp_zero2",
    "fsdp_offload",
    "context_gather",
    "tensor_no_sequence_parallel",
)
EXHAUSTIVE_STRATEGIES += ("pipeline_interleaved_zero_bubble",)
"""Layouts that send what one of the others does, otherwise arranged."""
RECOMPUTING = {
    "memory=checkpoint_full",
    "memory=checkpoint_selective",
    "memory=checkpoint_every_n",
}
"""Options that zero-bubble schedules reject, because they split the backward pass."""
UNSUPPORTED_STRATEGIES = {"prompt": ("context", "pipeline"), "prefix": ("context",)}
"""Axes that shard samples, heads or layers, which adapters reject."""

OPTIONS_OF_BOTH_SHAPES = ("none", "full", "selective", "loss", "lora", "dpo")
"""Options that run with both shapes under every strategy; the others alternate between them."""


def is_tested(strategy: str, shape: str, option: str) -> bool:
    """Whether a strategy and an option run with this shape."""
    if option in OPTIONS_OF_BOTH_SHAPES or (shape, strategy, option) in CI_CASES:
        return True
    number = [*STRATEGIES].index(strategy) + [*RECOMPUTE_OPTIONS].index(option)
    return [*SHAPES].index(shape) == number % len(SHAPES)


@pytest.mark.parametrize(
    ("strategy", "shape", "option"),
    [
        pytest.param(strategy, shape, option, marks=() if runs_in_ci else pytest.mark.exhaustive)
        for strategy in STRATEGIES
        if not strategy.startswith("deepspeed")  # which declares none
        for shape in SHAPES
        for option in RECOMPUTE_OPTIONS
        if is_tested(strategy, shape, option)
        if not (
            "zero_bubble" in strategy and RECOMPUTING & {*RECOMPUTE_OPTIONS[option]}
        )  # which is rejected
        if not any(axis in strategy for axis in UNSUPPORTED_STRATEGIES.get(option, ()))
        if not ("dpo" in option and ("pipeline" in strategy or "context" in strategy))  # as is this
        for is_default in [
            (shape, option) == ("llama", "none") and strategy not in EXHAUSTIVE_STRATEGIES
        ]
        for runs_in_ci in [is_default or (shape, strategy, option) in CI_CASES]
    ]
    + [
        pytest.param(
            strategy, "llama", "muon", marks=() if strategy == "ddp" else pytest.mark.exhaustive
        )
        for strategy in MUON
    ],
)
def test_collectives_of_each_strategy_equal_prediction(
    strategy: str, shape: str, option: str, tmp_path: Path, shared_cache: Path
) -> None:
    overrides = (
        *TINY_DECODER,
        *THIRD_STEP,
        *SHAPES[shape],
        *STRATEGIES[strategy],
        *RUN_OPTIONS[option],
    )
    assert_collectives_equal(overrides, JobRunner(tmp_path, shared_cache))


PIPELINE_PRODUCTS = {
    f"{schedule}, {axis}, tensor": (
        *mesh(pipeline=2, tensor=2, **{axis: 2}),
        f"parallelism.pipeline_schedule={schedule}",
    )
    for schedule in PipelineSchedule.__members__
    for axis in ("shards", "replicate", "context")
} | {
    f"{schedule}, shards, {option}": (
        *mesh(pipeline=2, shards=2),
        f"parallelism.pipeline_schedule={schedule}",
        f"parallelism.{option}",
    )
    for schedule in ("one_f_one_b", "zbv_zero_bubble")
    for option in ("reduce_each_micro_batch=false", "shard=optimizer", "shard=gradients")
}


@pytest.mark.parametrize(
    "product",
    [
        pytest.param(
            product,
            marks=()
            if product in ("one_f_one_b, shards, tensor", "one_f_one_b, shards, shard=optimizer")
            else pytest.mark.exhaustive,
        )
        for product in PIPELINE_PRODUCTS
    ],
)
def test_collectives_of_pipeline_products_equal_prediction(
    product: str, tmp_path: Path, shared_cache: Path
) -> None:
    """The schedule runs twice per step, each time with four micro-batches."""
    overrides = (*TINY_DECODER, *THIRD_STEP, *LLAMA, *PIPELINE_PRODUCTS[product])
    ranks = compose([*overrides, "trainer.micro_batch=4"]).parallelism.data_parallel_size
    overrides = (*overrides, "trainer.micro_batch=4", f"trainer.global_batch={8 * ranks}")
    run = compose(overrides)
    assert run.accumulation == 2
    folder = JobRunner(tmp_path, shared_cache).without_defaults(*overrides)
    for rank in range(run.world_size):
        expected, actual = predicted_collectives(run, rank), recorded_collectives(folder, rank)
        assert actual == expected, f"rank {rank}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", ["none", "full", "lora"])
@pytest.mark.parametrize(
    "strategy", ["tensor", "tensor_no_sequence_parallel", "shard_tensor", "context_gather"]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_collectives_of_other_architectures_equal_prediction(
    architecture: str, strategy: str, option: str, tmp_path: Path, shared_cache: Path
) -> None:
    options = (*ARCHITECTURES[architecture], *STRATEGIES[strategy], *RUN_OPTIONS[option])
    assert_collectives_equal(
        (*TINY_DECODER, *THIRD_STEP, *options), JobRunner(tmp_path, shared_cache)
    )


@pytest.mark.parametrize(
    ("family", "strategy", "option"),
    [
        pytest.param(family, strategy, option, marks=() if runs_in_ci else pytest.mark.exhaustive)
        for family in ("llama", "qwen2", "qwen3", "gemma2")
        for strategy in ("tensor", "tensor_no_sequence_parallel", "shard_tensor")
        for option in ("none", "full", "selective", "mixture", "loss")
        for runs_in_ci in [(family, strategy, option) == ("qwen2", "tensor", "full")]
    ],
)
def test_collectives_of_transformers_models_equal_prediction(
    family: str,
    strategy: str,
    option: str,
    hf_checkpoint: HFCheckpoints,
    tmp_path: Path,
    shared_cache: Path,
) -> None:
    base_overrides = (
        override for override in (*TINY_DECODER, *THIRD_STEP) if not override.startswith("model")
    )
    model = ("model=hf", f"model.path={hf_checkpoint(family)}")
    overrides = (
        *base_overrides,
        *model,
        *STRATEGIES[strategy],
        *RUN_OPTIONS[option],
    )
    assert_collectives_equal(overrides, JobRunner(tmp_path, shared_cache))


def assert_collectives_equal(overrides: tuple[str, ...], run_job: JobRunner) -> None:
    ranks = compose([*overrides, "trainer.micro_batch=8"]).parallelism.data_parallel_size
    splits_backward = any("zero_bubble" in override for override in overrides)  # 4 micro-batches
    micro_batch = 4 if splits_backward else max(4 // ranks, 1)
    overrides = (*overrides, f"trainer.micro_batch={micro_batch}")
    run = compose(overrides)
    folder = run_job.without_defaults(*overrides)
    for rank in range(run.world_size):
        expected, actual = predicted_collectives(run, rank), recorded_collectives(folder, rank)
        if "parallelism=ddp" in overrides:  # buckets end at parameter boundaries
            expected, actual = merge_sizes(expected), merge_sizes(actual)
        assert actual == expected, f"rank {rank}"


GROUPS: list[dist.ProcessGroup | None] = []
"""Groups of this process. A reducer's future may hold the last reference to one in gloo's own
thread, which would wait for itself to end, and the process would abort."""


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """Process group with this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    GROUPS.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_powersgd_collectives_equal_torch_statistics(rank: int) -> None:
    """A thread of the process group sends the factors, which the counter does not record."""
    hook = ("parallelism.comm_hook=powersgd", f"parallelism.powersgd_rank={rank}")
    run = compose([*TINY_DECODER, *LLAMA, *STRATEGIES["ddp"], *hook])
    module = DistributedDataParallel(build_model(run.model, seed=1), **CONSTANT_BUFFERS)
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    state_bytes = []
    for _ in range(4):
        module(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        state_bytes.append(state.compression_stats()[2])
    num_elements = (
        sum(collective.bytes for collective in list_collectives(run.parallelism, run)) / 4
    )
    assert [state_bytes[2], state_bytes[3] - state_bytes[2]] == [num_elements, num_elements]


def merge_sizes(messages: CollectiveCounts) -> CollectiveCounts:
    """Bytes of each kind as one collective."""
    sums: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for (kind, ranks, size), count in messages.items():
        sums[kind, ranks] += size * count
    return Counter({(kind, ranks, size): 1 for (kind, ranks), size in sums.items()})
