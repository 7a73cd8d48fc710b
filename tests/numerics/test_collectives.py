"""Collectives of each strategy equal the prediction, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixtures.cli_runner import RunDir
from fixtures.hf_checkpoints import HFCheckpoints
from fixtures.job_runner import JobRunner
from fixtures.strategies import GEMMA3, GPT2, LLAMA, STRATEGIES, TINY_DECODER, mesh
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scalewise import compose
from scalewise.models.build import build_model
from scalewise.models.decoder.config import DecoderConfig
from scalewise.planner.communication import list_collectives
from scalewise.run_config import RunConfig
from scalewise.strategies.ddp import CONSTANT_BUFFERS

THIRD_STEP = (
    "optimizer=sgd",
    "trainer.max_steps=4",
    "trainer.log_every=100",
    "trainer.validate_every=null",
    "trainer.global_batch=8",
    "checkpoint.at_end=false",
    "trusted_packages=[fixtures]",
    "+callbacks.messages._target_=fixtures.probe_callbacks.CountCollectives",
)
SHAPES = {"llama": LLAMA, "gpt2": GPT2}
ARCHITECTURES = {"gemma3": (*LLAMA, *GEMMA3)}
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


CollectiveCounts = Counter[tuple[str, tuple[int, ...], int]]


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", ["none", "full"])
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


EXPERTS = ("model.experts=4", "model.expert_dim=16", "model.shared_experts=1")
EXPERT_STRATEGIES = {
    "expert": mesh(shards=2, expert=2),
    "expert_shards": mesh(shards=4, expert=2),
    "expert_replicate": mesh(replicate=2, shards=2, expert=2),
    "expert_pipeline": mesh(pipeline=2, shards=2, expert=2),
    "expert_context": mesh(shards=2, context=2, expert=4),
}
EXPERT_OPTIONS = {
    **{name: RECOMPUTE_OPTIONS[name] for name in ("none", "full", "selective", "lora", "loss")},
    "lora, experts": ("adapter=lora", "adapter.targets=[feedforward.experts.*]"),
    "lora, shared": (
        "adapter=lora",
        "adapter.targets=[feedforward.shared.up]",
        "memory=checkpoint_full",
    ),
    "capacity": ("model.capacity_factor=0.75", "memory=checkpoint_full"),
    "lora, all": ("adapter=lora", "adapter.rank=3", "adapter.targets=[.*]"),
}
"""Options of runs with experts. With some, the first block needs no gradient of its experts."""
EXPERT_CI_CASES = (
    ("expert_shards", "none"),
    ("expert_shards", "lora, experts"),
    ("expert_shards", "capacity"),
)


@pytest.mark.parametrize(
    ("strategy", "option"),
    [
        pytest.param(
            strategy,
            option,
            marks=() if (strategy, option) in EXPERT_CI_CASES else pytest.mark.exhaustive,
        )
        for strategy in EXPERT_STRATEGIES
        for option in EXPERT_OPTIONS
    ],
)
def test_collectives_of_expert_parallelism_equal_prediction(
    strategy: str, option: str, tmp_path: Path, shared_cache: Path
) -> None:
    """The router decides how many tokens a rank sends; all ranks together send all.

    With capacity, each expert of each rank has as many, and the prediction is exact.
    """
    overrides = (
        *TINY_DECODER,
        *THIRD_STEP,
        *LLAMA,
        *EXPERTS,
        *EXPERT_STRATEGIES[strategy],
        *EXPERT_OPTIONS[option],
        "trainer.micro_batch=2",
    )
    if option == "none":
        overrides = (*overrides, "model.balance_rate=0.01")
    run = compose(overrides)
    folder = JobRunner(tmp_path, shared_cache).without_defaults(*overrides)
    token_bytes = {"expected": 0, "actual": 0}
    assert isinstance(run.model, DecoderConfig)
    for rank in range(run.world_size):
        expected, actual = predicted_collectives(run, rank), recorded_collectives(folder, rank)
        group = run.parallelism.ranks_along(("expert",), rank)
        if option == "capacity":
            assert any(kind == "all_to_all" for kind, *_ in expected), f"rank {rank}"
            assert actual == expected, f"rank {rank}"
            continue
        counts = {"expected": 0, "actual": 0}
        for name, messages in (("expected", expected), ("actual", actual)):
            for key in [key for key in messages if key[:2] == ("all_to_all", group)]:
                if key[2] > run.model.routed_experts * 4:  # tokens, and not their numbers
                    counts[name] += messages[key]
                    token_bytes[name] += key[2] * messages.pop(key)
        assert actual == expected, f"rank {rank}"
        assert counts["actual"] == counts["expected"], f"rank {rank}"
    assert token_bytes["actual"] >= token_bytes["expected"]
    assert token_bytes["actual"] == pytest.approx(token_bytes["expected"], rel=0.2)


TENSOR_EXPERT_OPTIONS = RECOMPUTE_OPTIONS | {"dense_layers": ("model.dense_layers=1",)}
TENSOR_EXPERT_CASES = [
    (STRATEGIES[strategy], TENSOR_EXPERT_OPTIONS[option], shared_experts)
    for strategy in ("tensor", "tensor_no_sequence_parallel", "shard_tensor", "pipeline_tensor")
    for option in ("none", "full", "selective", "loss", "dense_layers")
    for shared_experts in (0, 1)
]


@pytest.mark.parametrize(
    ("strategy", "options", "shared_experts"),
    [
        pytest.param(*case, marks=() if case == TENSOR_EXPERT_CASES[1] else pytest.mark.exhaustive)
        for case in TENSOR_EXPERT_CASES
    ],
)
def test_collectives_of_tensor_parallel_experts_equal_prediction(
    strategy: tuple[str, ...],
    options: tuple[str, ...],
    shared_experts: int,
    tmp_path: Path,
    shared_cache: Path,
) -> None:
    overrides = (
        *TINY_DECODER,
        *THIRD_STEP,
        *LLAMA,
        *EXPERTS,
        *strategy,
        *options,
        f"model.shared_experts={shared_experts}",
        "model.balance_rate=0.01",
        "trainer.micro_batch=4",
    )
    run = compose(overrides)
    folder = JobRunner(tmp_path, shared_cache).without_defaults(*overrides)
    for rank in range(run.world_size):
        expected, actual = predicted_collectives(run, rank), recorded_collectives(folder, rank)
        assert actual == expected, f"rank {rank}"


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


def predicted_collectives(run: RunConfig, rank: int) -> CollectiveCounts:
    messages: CollectiveCounts = Counter()
    for collective in list_collectives(run.parallelism, run, rank):
        ranks = run.parallelism.ranks_along(collective.axes, rank)
        messages[collective.kind, ranks, collective.bytes] += collective.count
    return messages


def recorded_collectives(folder: RunDir, rank: int) -> CollectiveCounts:
    messages: CollectiveCounts = Counter()
    for kind, ranks, size, count in folder.json(f"messages-{rank}.json"):
        messages[kind, tuple(ranks), size] += count
    return messages
