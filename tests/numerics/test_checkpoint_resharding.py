"""Checkpoints resume under every other strategy, and bitwise equal under their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir, same_weights
from fixtures.job_runner import JobRunner
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER

from scalewise.checkpoints import store
from scalewise.checkpoints.store import BackgroundWriter

TOLERANCE = 1e-5
STEPS = (
    "optimizer.lr=1e-2",
    "optimizer.epsilon=1e-3",  # first steps of AdamW would amplify rounding of zero gradients
    "schedule=constant",
    "schedule.warmup_steps=0",
    "trainer.max_steps=4",
    "trainer.global_batch=8",
    "trainer.validate_every=null",
    "trainer.log_every=1",
    "checkpoint.every=2",
)
KINDS = {
    "single": ("parallelism=single", "trainer.micro_batch=8"),
    "ddp": (*STRATEGIES["ddp"], "trainer.micro_batch=4"),
    "fsdp": (*STRATEGIES["fsdp"], "trainer.micro_batch=2"),
    "fsdp_4": (*STRATEGIES["fsdp_4"], "trainer.micro_batch=2"),
    "tensor": (*STRATEGIES["tensor"], "trainer.micro_batch=8"),
    "pipeline": (*STRATEGIES["pipeline_one_f_one_b"], "trainer.micro_batch=4"),
    "shard_tensor": (*STRATEGIES["shard_tensor"], "trainer.micro_batch=4"),
}
CI_PAIRS = {("shard_tensor", "single")}

TrainedRun = Callable[[str], RunDir]


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> TrainedRun:
    """Function that returns the complete run of a kind, with a checkpoint in the middle."""
    run_job = JobRunner(tmp_path_factory.mktemp("written"), shared_cache)
    runs: dict[str, RunDir] = {}

    def run(kind: str) -> RunDir:
        if kind not in runs:
            runs[kind] = run_job.without_defaults(*TINY_DECODER, *LLAMA, *STEPS, *KINDS[kind])
        return runs[kind]

    return run


@pytest.mark.parametrize(
    "strategy",
    [
        "pipeline_zbv_zero_bubble",
        pytest.param("pipeline_shard_zbv_zero_bubble", marks=pytest.mark.exhaustive),
    ],
)
def test_resharding_reads_both_ends_of_a_folded_pipeline(
    strategy: str, tmp_path: Path, shared_cache: Path
) -> None:
    """Rank 0 has the first and the last stage, which both store the tied embedding."""
    run_job = JobRunner(tmp_path, shared_cache)
    tied = (
        *TINY_DECODER,
        *LLAMA,
        *STEPS,
        "model.tied=true",
        *STRATEGIES[strategy],
        "trainer.micro_batch=4",
    )
    full_run = run_job.without_defaults(*tied)
    resumed = run_job.without_defaults(*tied, resume=full_run.checkpoint(2))
    assert resumed.column("train/loss") == full_run.column("train/loss")
    assert same_weights(resumed.weights(), full_run.weights())


@pytest.mark.parametrize(
    ("saved_kind", "loaded_kind"),
    [
        pytest.param(
            saved, loaded, marks=() if (saved, loaded) in CI_PAIRS else pytest.mark.exhaustive
        )
        for saved in KINDS
        for loaded in KINDS
    ],
)
def test_checkpoint_resumes_under_another_strategy(
    saved_kind: str, loaded_kind: str, trained_run: TrainedRun, tmp_path: Path, shared_cache: Path
) -> None:
    start, reference = trained_run(saved_kind), trained_run(loaded_kind)
    run_job = JobRunner(tmp_path, shared_cache)
    resumed = run_job.without_defaults(
        *TINY_DECODER, *LLAMA, *STEPS, *KINDS[loaded_kind], resume=start.checkpoint(2)
    )
    assert resumed.steps == reference.steps
    if saved_kind == loaded_kind:
        assert resumed.column("train/loss") == reference.column("train/loss")
        assert same_weights(resumed.weights(), reference.weights())
        return
    for key in ("train/loss", "train/grad_norm"):
        assert resumed.column(key) == pytest.approx(reference.column(key), rel=TOLERANCE), key
    for name, weight in reference.weights().items():
        scale = float(weight.abs().max())
        assert float((resumed.weights()[name] - weight).abs().max()) <= TOLERANCE * scale, name


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("single", "shard_tensor")]
    + ["fsdp"],
)
def test_async_checkpoint_equals_sync_checkpoint(
    kind: str, trained_run: TrainedRun, tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    overrides = (*TINY_DECODER, *LLAMA, *STEPS, *KINDS[kind])
    background_run = run_job.without_defaults(
        *overrides, "checkpoint.background=true", "checkpoint.every=1"
    )
    reference = trained_run(kind)
    for step in (2, 4) if 2 in background_run.checkpoints else (4,):
        assert same_weights(background_run.weights(step), reference.weights(step)), step
    resumed = run_job.without_defaults(
        *overrides, "trainer.max_steps=5", resume=background_run.checkpoint(3)
    )
    assert resumed.column("train/loss")[:4] == reference.column("train/loss")


@pytest.fixture
def one_core() -> Iterator[None]:
    """Restrict the process to one core: copies by several threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.timed
@pytest.mark.usefixtures("one_core")
def test_async_checkpoint_blocks_training_for_a_copy_only(tmp_path: Path) -> None:
    """Training is blocked for at most 15 % of the write time."""
    model = {f"w{index}": torch.randn(1 << 21) for index in range(8)}
    slots = {f"{slot}/{name}": w.clone() for slot in ("a", "b") for name, w in model.items()}
    tensors, packed_state = (
        {"model": model, "optimizer": slots},
        store.pack_state({"global_step": 1}),
    )
    blocked: dict[bool, list[float]] = {False: [], True: []}
    writers = {
        is_background: BackgroundWriter(
            background=is_background, device=torch.device("cpu"), collective=False
        )
        for is_background in blocked
    }
    for index in range(4):  # alternating, because the disk is shared
        for is_background, writer in writers.items():
            path = tmp_path / f"{is_background}-{index}"
            start = time.perf_counter()
            staged_checkpoint = writer.stage(tensors)
            writer.submit(partial(store.save_checkpoint, path, staged_checkpoint, packed_state))
            blocked[is_background].append(time.perf_counter() - start)
            writer.finish()
    ratio = min(blocked[True][1:]) / min(
        blocked[False][1:]
    )  # the first write allocates the buffers
    print(f"training is blocked for {ratio:.1%} of a save")
    assert ratio <= 0.15
