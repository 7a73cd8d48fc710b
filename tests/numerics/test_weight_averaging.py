"""Moving average of the weights: torch as the reference, every strategy, resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir, same_weights
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import SGD, TOLERANCE, assert_tensors_close
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER, marks, needs_deepspeed
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from scalewise import compose
from scalewise.checkpoints import store
from scalewise.commands.run_arguments import load_trained

DECAY, STEPS = 0.6, 4
AVERAGED_TRAINING = (
    *(override for override in SGD if not override.startswith("+callbacks")),
    f"trainer.max_steps={STEPS}",
    "trainer.global_batch=12",
    "trainer.validate_every=1",
    "checkpoint.every=1",
    "checkpoint.keep=0",
)
RUN_OVERRIDES = (*TINY_DECODER, *LLAMA, *AVERAGED_TRAINING)
EMA = ("callbacks=[ema]", f"callbacks.ema.decay={DECAY}")
TIED_WEIGHTS = ("model.tied=true",)
CI_STRATEGIES = ("fsdp", "pipeline_one_f_one_b", "deepspeed_zero3")
EXHAUSTIVE_STRATEGIES = (
    *("ddp", "fsdp_zero2", "fsdp_offload", "fsdp_4", "hsdp", "tensor", "shard_tensor", "context"),
    *("pipeline_zbv_zero_bubble", "pipeline_shard", "pipeline_shard_zbv_zero_bubble"),
    *("shard_context", "context_tensor"),
    *("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3_default"),
    "deepspeed_zero3_hierarchical",
)
ADAMW_OVERRIDES = (
    *(override for override in RUN_OVERRIDES if not override.startswith("optimizer")),
    "optimizer.epsilon=1e-3",  # DeepSpeed has no SGD for the host
)
OFFLOAD = "parallelism.offload_optimizer=cpu"
ZERO_MASTERS: dict[str, tuple[str, ...]] = {
    "zero2_bf16_mixed": ("deepspeed_zero2", "precision=bf16_mixed"),
    "zero3_bf16_mixed": ("deepspeed_zero3", "precision=bf16_mixed"),
    "zero3_bf16_true": ("deepspeed_zero3", "precision=bf16_true"),
    "zero2_offload": ("deepspeed_zero2", OFFLOAD),
    "zero3_offload": ("deepspeed_zero3", OFFLOAD, "parallelism.offload_parameters=cpu"),
}


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("averaging"), shared_cache)


@pytest.fixture(scope="module")
def plain_run(run_job: JobRunner) -> RunDir:
    """Run on one device without averaging, with a checkpoint of each step."""
    return run_job.without_defaults(*RUN_OVERRIDES, "trainer.micro_batch=12")


@pytest.fixture(scope="module")
def averaged_run(run_job: JobRunner) -> RunDir:
    return run_job.without_defaults(*RUN_OVERRIDES, *EMA, "trainer.micro_batch=12")


def average(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    return store.full_tensors(run.checkpoint(step), store.AVERAGE)


def averaged_by_torch(steps: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Weights that ``AveragedModel`` averages after each step."""
    module = torch.nn.ParameterDict({name.replace(".", "/"): it for name, it in steps[0].items()})
    averaged = AveragedModel(module, avg_fn=get_ema_avg_fn(DECAY))
    for weights in steps:
        with torch.no_grad():
            for name, tensor in weights.items():
                module[name.replace(".", "/")].copy_(tensor)
        averaged.update_parameters(module)
    return {name.replace("/", "."): it.detach() for name, it in averaged.module.items()}


def test_ema_equals_torch_on_one_device(plain_run: RunDir, averaged_run: RunDir) -> None:
    raw = [plain_run.weights(step + 1) for step in range(STEPS)]
    assert same_weights(averaged_run.weights(), raw[-1])
    assert averaged_run.column("train/loss") == plain_run.column("train/loss")
    assert_tensors_close(average(averaged_run, STEPS), averaged_by_torch(raw), "average")


def test_ema_weights_are_loaded_from_a_run(averaged_run: RunDir) -> None:
    trained_run = load_trained(averaged_run.path)
    assert trained_run.is_averaged
    loaded_weights = {
        f"model.{name}": tensor for name, tensor in trained_run.read_state_dict().items()
    }
    expected_weights = average(averaged_run, STEPS)
    assert same_weights({name: loaded_weights[name] for name in expected_weights}, expected_weights)
    assert not same_weights(loaded_weights, averaged_run.weights())


def strategy_overrides(name: str) -> tuple[str, ...]:
    strategy = STRATEGIES[name]
    spec = compose([*RUN_OVERRIDES, *strategy, "trainer.micro_batch=12"]).parallelism
    micro_batch = 12 // spec.data_parallel_size
    chunks = [f"parallelism.pipeline_micro_batches={micro_batch}"] * name.startswith("pipeline")
    return (*strategy, f"trainer.micro_batch={micro_batch}", *chunks)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=marks(name)) for name in CI_STRATEGIES),
        *(
            pytest.param(name, marks=(*marks(name), pytest.mark.exhaustive))
            for name in EXHAUSTIVE_STRATEGIES
        ),
    ],
)
def test_ema_under_each_strategy_equals_one_device(
    name: str, tied: bool, run_job: JobRunner, averaged_run: RunDir
) -> None:
    """Training continues from the weights after the average is validated."""
    tied_overrides = TIED_WEIGHTS * tied
    reference = (
        run_job.without_defaults(*RUN_OVERRIDES, *EMA, *tied_overrides, "trainer.micro_batch=12")
        if tied
        else averaged_run
    )
    run = run_job.without_defaults(*RUN_OVERRIDES, *EMA, *tied_overrides, *strategy_overrides(name))
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert run.column(key) == pytest.approx(reference.column(key), rel=TOLERANCE), key
    assert_tensors_close(run.weights(), reference.weights(), "weights")
    assert_tensors_close(average(run, STEPS), average(reference, STEPS), "average")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),
        pytest.param("fsdp", "fsdp", marks=pytest.mark.exhaustive),
        pytest.param("fsdp", "tensor", marks=pytest.mark.exhaustive),
        pytest.param("pipeline_one_f_one_b", "ddp", marks=pytest.mark.exhaustive),
        *(
            pytest.param(*pair, marks=(needs_deepspeed, pytest.mark.exhaustive))
            for pair in (
                ("deepspeed_zero3", "fsdp"),
                ("fsdp", "deepspeed_zero3"),
                ("deepspeed_zero2", "deepspeed_zero3_hierarchical"),
                ("ddp", "deepspeed_zero1"),
            )
        ),
    ],
)
def test_ema_run_resumed_after_its_end_trains_from_the_weights(
    before: str | None, after: str | None, run_job: JobRunner, averaged_run: RunDir
) -> None:
    first = strategy_overrides(before) if before else ("trainer.micro_batch=12",)
    resumed_overrides = strategy_overrides(after) if after else ("trainer.micro_batch=12",)
    half = run_job.without_defaults(*RUN_OVERRIDES, *EMA, *first, "trainer.max_steps=2")
    resumed = run_job.without_defaults(
        *RUN_OVERRIDES, *EMA, *resumed_overrides, resume=half.checkpoint(2)
    )
    if before is None:
        assert same_weights(resumed.weights(), averaged_run.weights())
        assert same_weights(average(resumed, STEPS), average(averaged_run, STEPS))
    assert_tensors_close(resumed.weights(), averaged_run.weights(), "weights")
    assert_tensors_close(average(resumed, STEPS), average(averaged_run, STEPS), "average")
    assert resumed.column("val/loss") == pytest.approx(
        averaged_run.column("val/loss"), rel=TOLERANCE
    )


def test_ema_starts_at_the_configured_step(run_job: JobRunner, plain_run: RunDir) -> None:
    delayed_ema = (
        "+callbacks.ema.update_starting_at_step=1",
        "+callbacks.ema.update_every_n_steps=2",
    )
    run = run_job.without_defaults(*RUN_OVERRIDES, *EMA, *delayed_ema, "trainer.micro_batch=12")
    has_average = [store.has_tensors(run.checkpoint(step), store.AVERAGE) for step in (1, 2, 3)]
    assert has_average == [False, False, True]
    assert same_weights(average(run, 3), plain_run.weights(3))
    assert run.column("val/loss")[:2] == plain_run.column("val/loss")[:2]


@needs_deepspeed
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "zero2_bf16_mixed" else pytest.mark.exhaustive)
        for kind in ZERO_MASTERS
    ],
)
def test_ema_of_deepspeed_masters_equals_torch_and_resumes_bitwise(
    kind: str, run_job: JobRunner, request: pytest.FixtureRequest
) -> None:
    """The average of the masters is in fp32, also if these are bf16 or on the host."""
    strategy, *options = ZERO_MASTERS[kind]
    if OFFLOAD in options:
        request.getfixturevalue("compiled_extensions")
    overrides = (*ADAMW_OVERRIDES, *EMA, *strategy_overrides(strategy), *options)
    run = run_job.without_defaults(*overrides)
    masters = [run.weights(step + 1) for step in range(STEPS)]
    raw = [{name: weight.float() for name, weight in step.items()} for step in masters]
    assert_tensors_close(average(run, STEPS), averaged_by_torch(raw), "average")
    resumed = run_job.without_defaults(*overrides, resume=run.checkpoint(2))
    assert same_weights(resumed.weights(), run.weights())
    assert same_weights(average(resumed, STEPS), average(run, STEPS))
    assert resumed.column("val/loss")[-2:] == run.column("val/loss")[-2:]
