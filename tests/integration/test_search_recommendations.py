"""What a search recommends can be trained: its runs, shrunk to a tiny model on CPU ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fixtures.job_runner import JobRunner
from fixtures.strategies import LLAMA, TINY_DECODER

from scalewise import compose
from scalewise.parallelism.mesh import AXES
from scalewise.planner.search import search_runs

TINY_RUN = (
    *(*TINY_DECODER, *LLAMA, "trainer.max_steps=2", "schedule.warmup_steps=0"),
    *("trainer.validate_every=null", "trainer.micro_batch=4", "trainer.log_every=1"),
)
REQUESTS = {
    "8B on 8 GPUs, all": ("model=llama3_8b", "hardware=h100_8", "plan.search=all"),
    "8B on 8 GPUs, least memory": (
        *("model=llama3_8b", "hardware=a100_80g_8", "plan.search=all", "plan.rank_by=memory"),
    ),
    "70B on 32 GPUs": ("model=llama3_70b", "hardware=h100_8x4", "precision=bf16_mixed"),
    "70B on 8 GPUs, all": ("model=llama3_70b", "hardware=h100_8", "plan.search=all"),
    "7B on one GPU": ("model=openllama_7b", "hardware=rtx4090", "plan.search=memory"),
    "13B on one GPU": ("model=openllama_13b", "hardware=a100_40g", "plan.search=memory"),
    "1B on one GPU": ("model=tinyllama_1b", "hardware=t4", "plan.search=memory"),
    "160M on 2 GPUs, all": (
        *("model=llama_160m", "hardware=h100", "hardware.devices_per_node=2", "plan.search=all"),
    ),
    "160M in bf16 on a GPU, all": (
        *("model=llama_160m", "hardware=a100_80g", "precision=bf16_true", "trainer.clip_norm=null"),
        *("trainer.global_batch=8", "plan.search=all"),
    ),
    "160M on 8 GPUs": ("model=llama_160m", "hardware=v100", "hardware.devices_per_node=8"),
}
NUM_TRAINED = 7
"""Number of distinct runs on the Pareto fronts of a request that are trained, besides one run for
each option that the second stage of a search has changed, on a front or not."""


def shrunk(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides of the same strategy on at most two ranks per mesh axis, without batch sizes."""
    kept = []
    for override in overrides:
        key, value = override.split("=")
        group, _, name = key.partition(".")
        if name in ("micro_batch", "global_batch"):
            continue
        if group == "parallelism" and name in (*AXES, "replicas"):
            value = str(min(int(value), 2))
        elif name == "pipeline_micro_batches":
            value = "4"
        elif name == "loss_chunk":
            value = "32"
        kept.append(f"{key}={value}")
    return tuple(kept)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "request_name",
    [
        pytest.param(name, marks=() if name == "7B on one GPU" else pytest.mark.exhaustive)
        for name in REQUESTS
    ],
)
def test_recommended_runs_train(request_name: str, tmp_path: Path, shared_cache: Path) -> None:
    request = REQUESTS[request_name]
    base = ("data=synthetic", "data.sequence=1024", "trainer.global_batch=64", "plan.search=layout")
    requested = compose([*base, *request], check_machine=False)
    result = search_runs(requested)
    front = (*result.pareto_front, *result.changed_training_front)
    assert front, "nothing fits"
    distinct = list(dict.fromkeys(shrunk(candidate.overrides) for candidate in front))
    spread = distinct[:: max(1, len(distinct) // NUM_TRAINED)]  # from the fastest to the smallest
    by_option = {
        one.refinement[:1] or one.training_overrides: shrunk(one.overrides)
        for one in reversed(result.candidates)
        if one.is_acceptable and (one.refinement or len(one.training_overrides) == 1)
    }
    typed = [text for text in request if text.split("=")[0] in ("precision", "trainer.clip_norm")]
    run_job = JobRunner(tmp_path, shared_cache)
    for overrides in dict.fromkeys((*spread, *by_option.values())):
        run = run_job.without_defaults(*TINY_RUN, *typed, *overrides)
        losses = run.column("train/loss")
        assert len(losses) == 2, overrides
        assert all(math.isfinite(loss) for loss in losses), overrides
