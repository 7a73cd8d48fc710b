"""Training metrics: equal losses under every strategy, exact memory, step phases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import UNTRACKED, RunDir, largest_difference
from fixtures.job_runner import JobRunner
from fixtures.probe_callbacks import DELAY_S
from fixtures.strategies import STRATEGIES, TINY_DECODER

from scalewise import compose
from scalewise.metric_names import STEP_PHASES
from scalewise.models.build import build_model

FP32_BYTES = 4
EXHAUSTIVE = pytest.mark.exhaustive
EXHAUSTIVE_CASES = (("single", 4), ("single", 3), ("single", 2), ("ddp", 4), ("ddp", 2), ("ddp", 1))


@pytest.fixture
def run_job(tmp_path: Path, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path, shared_cache)


@pytest.fixture(scope="module")
def one_device_run(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> RunDir:
    """Run on one rank with the global batch in one micro-batch."""
    return JobRunner(tmp_path_factory.mktemp("alone"), shared_cache)("trainer.micro_batch=8")


@pytest.mark.parametrize(
    ("strategy", "micro_batch"),
    [
        ("ddp", 3),
        *(pytest.param(*case, marks=EXHAUSTIVE) for case in EXHAUSTIVE_CASES),
    ],
)
def test_global_batch_trains_the_same_for_every_split(
    strategy: str, micro_batch: int, one_device_run: RunDir, run_job: JobRunner
) -> None:
    run = run_job(f"parallelism={strategy}", f"trainer.micro_batch={micro_batch}")
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert run.column(key) == pytest.approx(one_device_run.column(key), rel=1e-4), key
    difference = largest_difference(run.weights(), one_device_run.weights())
    print(f"{strategy}, micro batch {micro_batch}: weights differ by at most {difference:.2e}")
    for name, weight in run.weights().items():
        torch.testing.assert_close(weight, one_device_run.weights()[name], rtol=1e-3, atol=1e-4)


def test_sgd_shows_the_gradient_scale(run_job: JobRunner) -> None:
    """AdamW would hide a scaled gradient."""
    sgd = ("optimizer=sgd", "optimizer.lr=0.5", "trainer.clip_norm=null")
    single_run, ddp_run = run_job(*sgd), run_job(*sgd, "parallelism=ddp", "trainer.micro_batch=1")
    assert ddp_run.column("train/grad_norm") == pytest.approx(
        single_run.column("train/grad_norm"), rel=1e-4
    )
    assert largest_difference(single_run.weights(), ddp_run.weights()) < 1e-5


@pytest.mark.parametrize(
    ("strategy", "optimizer", "slots"),
    [
        pytest.param("single", "sgd", 1, marks=EXHAUSTIVE),
        pytest.param("single", "adamw", 2, marks=EXHAUSTIVE),
        ("ddp", "adamw", 2),
    ],
)
def test_state_memory_metrics_are_exact(
    strategy: str, optimizer: str, slots: int, run_job: JobRunner
) -> None:
    overrides = (f"parallelism={strategy}", f"optimizer={optimizer}", "optimizer.lr=1e-3")
    metrics = run_job(*overrides).summary["metrics"]
    model = compose(UNTRACKED).model
    module = build_model(model, 1)
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    weights = model.num_parameters * FP32_BYTES
    tensors = len(model.weight_census())
    assert metrics["memory/parameters_bytes"] == weights + buffers
    assert metrics["memory/gradients_bytes"] == weights
    steps = tensors * FP32_BYTES if optimizer == "adamw" else 0  # AdamW counts per tensor
    assert metrics["memory/optimizer_bytes"] == slots * weights + steps
    expected_bytes = weights + buffers + weights + slots * weights
    assert metrics["memory/peak_bytes"] >= expected_bytes
    assert (
        metrics["memory/peak_bytes"]
        >= expected_bytes - weights + metrics["memory/activations_bytes"]
    )
    assert metrics["memory/host_peak_bytes"] > metrics["memory/peak_bytes"]


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("fsdp_4", 4), pytest.param("tensor", 2, marks=EXHAUSTIVE)]
)
def test_sharded_rank_stores_its_shards_only(strategy: str, ranks: int, run_job: JobRunner) -> None:
    overrides = (
        *TINY_DECODER,
        "trainer.max_steps=3",
        "trainer.global_batch=8",
        "trainer.micro_batch=2",
    )
    full_run = run_job.without_defaults(*overrides).summary["metrics"]
    shard = run_job.without_defaults(*overrides, *STRATEGIES[strategy]).summary["metrics"]
    for name in ("parameters", "gradients", "optimizer"):
        key = f"memory/{name}_bytes"
        assert shard[key] == pytest.approx(full_run[key] / ranks, rel=0.04), key  # norms, positions
    assert shard["memory/peak_bytes"] < full_run["memory/peak_bytes"]


def test_activation_memory_grows_with_the_micro_batch(run_job: JobRunner) -> None:
    small_batch, large_batch = (
        run_job(f"trainer.micro_batch={micro_batch}").summary["metrics"]["memory/activations_bytes"]
        for micro_batch in (2, 8)
    )
    assert large_batch == pytest.approx(4 * small_batch, rel=0.1)


def test_step_time_is_the_sum_of_its_phases(run_job: JobRunner) -> None:
    run = run_job("trainer.max_steps=30")
    for row in run.metrics:
        phases_s = sum(float(row[f"time/{name}_s"] or 0) for name in STEP_PHASES)
        assert float(row["time/step_s"]) == pytest.approx(phases_s), row
        rate = float(row["throughput/tokens_per_s"]) * float(row["time/step_s"])
        assert rate == pytest.approx(8 * 32), row
    assert sum(run.column("time/step_s")) < run.status["seconds"]


DELAYED_RANKS = (
    *TINY_DECODER,
    "callbacks=[none]",
    "trusted_packages=[fixtures]",
    "+callbacks.turns._target_=fixtures.probe_callbacks.DelayRanksInTurn",
    "trainer.max_steps=30",
    "trainer.global_batch=8",
    "trainer.log_every=10",
    "trainer.validate_every=null",
    "checkpoint=none",
)


@pytest.mark.parametrize(
    ("strategy", "micro_batch"),
    [
        ("pipeline_replicate", 4),
        *(
            pytest.param(*case, marks=EXHAUSTIVE)
            for case in [("ddp", 4), ("fsdp_4", 2), ("pipeline_one_f_one_b", 8)]
        ),
    ],
)
def test_step_phases_of_several_ranks_sum_to_the_wall_time(
    strategy: str, micro_batch: int, run_job: JobRunner
) -> None:
    """Each rank in turn is the slowest of a step, while the others wait in another phase."""
    run = run_job.without_defaults(
        *DELAYED_RANKS, *STRATEGIES[strategy], f"trainer.micro_batch={micro_batch}"
    )
    ranks = compose([*DELAYED_RANKS, *STRATEGIES[strategy]]).world_size
    end_times = [run.json(f"turns-{rank}.json")["ended"] for rank in range(ranks)]
    seconds = run.column("time/step_s")
    for first in (0, 10, 20):  # logging after every tenth step is not part of a step
        recorded_s = sum(seconds[first + 1 : first + 9])
        wall_s = [times[first + 8] - times[first] for times in end_times]
        nearest_s = min(wall_s, key=lambda candidate_s: abs(candidate_s - recorded_s))
        assert recorded_s == pytest.approx(nearest_s, rel=0.02), wall_s
    for row in run.metrics:
        phases_s = sum(float(row[f"time/{name}_s"] or 0) for name in STEP_PHASES)
        assert float(row["time/step_s"]) == pytest.approx(phases_s), row


def test_pipeline_step_has_no_separate_forward_and_backward_time(run_job: JobRunner) -> None:
    run = run_job.without_defaults(
        *DELAYED_RANKS, *STRATEGIES["pipeline_one_f_one_b"], "trainer.micro_batch=8"
    )
    for row in run.metrics:
        assert (row["time/forward_s"], row["time/backward_s"]) == ("", ""), row
    for key in ("time/forward_backward_s", "time/optimizer_s"):
        seconds = run.column(key)
        for first in (0, 10, 20):  # window of one rank: it is delayed in every other step
            own_s = [delay for delay in seconds[first : first + 10] if delay >= DELAY_S]
            assert len(own_s) >= 5, key  # a late rank waits less than the delay of another
    metrics = run.summary["metrics"]
    assert (metrics["time/forward_s"], metrics["time/backward_s"]) == (None, None)


def test_memory_metrics_are_those_of_the_fullest_rank(run_job: JobRunner) -> None:
    """The last stage stores the logits."""
    run = run_job.without_defaults(
        *DELAYED_RANKS, *STRATEGIES["pipeline_gpipe"], "trainer.micro_batch=8"
    )
    first, last = (run.json(f"turns-{rank}.json")["memory"] for rank in range(2))
    assert first["memory/peak_bytes"] < last["memory/peak_bytes"]
    metrics = run.summary["metrics"]
    assert {key: metrics[key] for key in last} == last


def test_pipeline_stages_store_what_one_rank_stores(run_job: JobRunner) -> None:
    """GPipe runs all forward micro-batches before backward and stores all logits."""
    run = run_job.without_defaults(
        *DELAYED_RANKS, *STRATEGIES["pipeline_gpipe"], "trainer.micro_batch=8"
    )
    single_rank_metrics = run_job.without_defaults(*DELAYED_RANKS, "trainer.micro_batch=8").summary[
        "metrics"
    ]
    key = "memory/activations_bytes"
    stored_bytes = sum(run.json(f"turns-{rank}.json")["memory"][key] for rank in range(2))
    logits = 8 * 32 * 256 * FP32_BYTES
    assert stored_bytes == pytest.approx(single_rank_metrics[key] + logits, rel=0.02)


def test_token_counts_and_learning_rates_follow_the_schedule(run_job: JobRunner) -> None:
    run = run_job("schedule=linear", "schedule.warmup_steps=2", "optimizer.lr=1e-3")
    assert run.column("train/tokens") == [step * 8 * 32 for step in range(1, 9)]
    rates = run.column("train/lr")
    assert max(rates) == pytest.approx(1e-3)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
