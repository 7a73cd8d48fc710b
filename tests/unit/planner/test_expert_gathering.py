"""Plans of experts that FSDP does not shard further: nothing is gathered ahead of use."""

from collections.abc import Callable

import pytest

from scalewise.planner.memory_breakdown import StepPhase
from scalewise.planner.peak_memory import device_breakdown
from scalewise.planner.rank_memory import rank_memory_of
from scalewise.run_config import RunConfig

Compose = Callable[..., RunConfig]
EXPERTS = ("model=moe_nano", "model.layers=4", "data=synthetic", "parallelism=fsdp")


@pytest.mark.parametrize("shards", [2, 4])
def test_prefetched_block_contains_experts_of_several_shards_only(
    compose: Compose, shards: int
) -> None:
    run = compose(*EXPERTS, f"parallelism.shards={shards}", "parallelism.expert=2")
    weights = rank_memory_of(run).block_weights
    block = sum(weight.numel for weight in weights)
    others = sum(weight.numel for weight in weights if weight.role != "experts")
    prefetched = others if shards == 2 else block
    (entry,) = (
        it for it in device_breakdown(run).entries if it.name == "gathered weights of blocks"
    )
    assert entry.bytes[StepPhase.backward_last] == 4 * (block + prefetched)
    assert entry.bytes[StepPhase.forward] == 4 * (block + prefetched)  # and its buffer
