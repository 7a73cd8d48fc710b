"""Collectives of each strategy equal the prediction, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixtures.cli_runner import RunDir
from fixtures.hf_checkpoints import NO_SEQUENCE_PARALLEL, HFCheckpoints
from fixtures.job_runner import JobRunner
from fixtures.strategies import GPT2, LLAMA, STRATEGIES, TINY_DECODER
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scalewise import compose
from scalewise.models.build import build_model
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
INEXACT = ("pipeline_shard", "pipeline_replicate", "pipeline_context")
INEXACT += ("pipeline_shard_zbv_zero_bubble", "pipeline_context_interleaved_zero_bubble")
"""A schedule decides how often the weights of a stage are gathered."""

SHAPES = {"llama": LLAMA, "gpt2": GPT2}
AGAIN = {
    "nothing": (),
    "full": ("memory=checkpoint_full",),
    "selective": ("memory=checkpoint_selective",),
    "mixture": ("memory=checkpoint_every_n", "memory.otherwise=selective"),
    "loss": ("objective.loss_chunk=24",),
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
"""What is computed, and perhaps sent, a second time, or not asked for."""
MUON = ("fsdp", "hsdp", "fsdp_zero2", "context", "shard_context")
"""Layouts from whose shards it gathers its updates."""
WAYS = {**AGAIN, "muon": ("optimizer=muon",)}
USUAL = (
    ("gpt2", "tensor", "full"),
    ("llama", "fsdp", "lora, full"),
    ("llama", "fsdp", "prompt"),
)
SELDOM = ("ddp_small_buckets", "fsdp_kept", "fsdp_prefetch", "context_in_order", "pipeline_gpipe")
SELDOM += ("pipeline_interleaved_1f1b", "replicate_shard", "context_tensor", "pipeline_tensor")
SELDOM += ("replicate_tensor", "shard_context", "pipeline_context", "pipeline_replicate", "fsdp_4")
SELDOM += ("fsdp_zero2", "fsdp_offload", "context_gather", "tensor_alone")
SELDOM += ("pipeline_interleaved_zero_bubble",)
"""Layouts that send what one of the others does, otherwise arranged."""
SELECTIVE = {"memory=checkpoint_selective", "memory.otherwise=selective"}
"""What keeps results for one backward, of which zero-bubble schedules make two."""
CUT = {"prompt": ("context", "pipeline"), "prefix": ("context",)}
"""Axes that shard samples, heads or layers, which adapters reject."""

Messages = Counter[tuple[str, tuple[int, ...], int]]


@pytest.mark.parametrize(
    ("strategy", "shape", "again"),
    [
        pytest.param(strategy, shape, again, marks=() if usual else pytest.mark.exhaustive)
        for strategy in STRATEGIES
        if strategy not in INEXACT and not strategy.startswith("deepspeed")  # which declares none
        for shape in SHAPES
        for again in AGAIN
        if not ("zero_bubble" in strategy and SELECTIVE & {*AGAIN[again]})  # which is rejected
        if not any(axis in strategy for axis in CUT.get(again, ()))
        if not ("dpo" in again and ("pipeline" in strategy or "context" in strategy))  # as is this
        for plain in [(shape, again) == ("llama", "nothing") and strategy not in SELDOM]
        for usual in [plain or (shape, strategy, again) in USUAL]
    ]
    + [pytest.param(strategy, "llama", "muon", marks=pytest.mark.exhaustive) for strategy in MUON],
)
def test_collectives_of_each_strategy_equal_prediction(
    strategy: str, shape: str, again: str, tmp_path: Path, shared_cache: Path
) -> None:
    parts = (
        *TINY_DECODER,
        *THIRD_STEP,
        *SHAPES[shape],
        *STRATEGIES[strategy],
        *WAYS[again],
    )
    assert_sent(parts, JobRunner(tmp_path, shared_cache))


@pytest.mark.parametrize(
    ("family", "strategy", "again"),
    [
        pytest.param(family, strategy, again, marks=() if usual else pytest.mark.exhaustive)
        for family in ("llama", "qwen2", "gemma2")
        for strategy in ("tensor", "tensor_alone", "shard_tensor")
        for again in ("nothing", "full", "selective", "mixture", "loss")
        for usual in [(family, strategy, again) == ("qwen2", "tensor", "full")]
    ],
)
def test_collectives_of_transformers_models_equal_prediction(
    family: str,
    strategy: str,
    again: str,
    hf_checkpoint: HFCheckpoints,
    tmp_path: Path,
    shared_cache: Path,
) -> None:
    own = (each for each in (*TINY_DECODER, *THIRD_STEP) if not each.startswith("model"))
    model = ("model=hf", f"model.path={hf_checkpoint(family)}")
    parts = (*own, *model, *STRATEGIES[strategy], NO_SEQUENCE_PARALLEL, *WAYS[again])
    assert_sent(parts, JobRunner(tmp_path, shared_cache))


def assert_sent(parts: tuple[str, ...], run_job: JobRunner) -> None:
    ranks = compose([*parts, "trainer.micro_batch=8"]).parallelism.data_parallel_size
    parts = (*parts, f"trainer.micro_batch={max(4 // ranks, 1)}")
    run = compose(parts)
    folder = run_job.without_defaults(*parts)
    for rank in range(run.world_size):
        expected, got = declared(run, rank), sent(folder, rank)
        if "parallelism=ddp" in parts:  # buckets are cut where parameters end
            expected, got = whole(expected), whole(got)
        assert got == expected, f"rank {rank}"


KEPT: list[dist.ProcessGroup | None] = []
"""Groups of this process. A reducer's future may hold the last reference to one in gloo's own
thread, which would wait for itself to end, and the process would abort."""


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_powersgd_collectives_equal_torch_statistics(rank: int) -> None:
    """Its factors leave from a thread of the process group's, where no counter hears of them."""
    hook = ("parallelism.comm_hook=powersgd", f"parallelism.powersgd_rank={rank}")
    run = compose([*TINY_DECODER, *LLAMA, *STRATEGIES["ddp"], *hook])
    module = DistributedDataParallel(build_model(run.model, seed=1), **CONSTANT_BUFFERS)
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    told = []
    for _ in range(4):
        module(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        told.append(state.compression_stats()[2])
    numbers = sum(each.bytes for each in list_collectives(run.parallelism, run)) / 4
    assert [told[2], told[3] - told[2]] == [numbers, numbers]


def whole(messages: Messages) -> Messages:
    """The bytes of each kind as one message."""
    sums: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for (kind, ranks, size), count in messages.items():
        sums[kind, ranks] += size * count
    return Counter({(kind, ranks, size): 1 for (kind, ranks), size in sums.items()})


def declared(run: RunConfig, rank: int) -> Messages:
    messages: Messages = Counter()
    for each in list_collectives(run.parallelism, run, rank):
        ranks = run.parallelism.ranks_along(each.axes, rank)
        messages[each.kind, ranks, each.bytes] += each.count
    return messages


def sent(folder: RunDir, rank: int) -> Messages:
    messages: Messages = Counter()
    for kind, ranks, size, count in folder.json(f"messages-{rank}.json"):
        messages[kind, tuple(ranks), size] += count
    return messages
