"""User modules compared with plain Lightning, under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir, same_weights
from fixtures.job_runner import JobRunner
from fixtures.quiet_trainer import QUIET_TRAINER
from fixtures.strategies import needs_deepspeed
from fixtures.user_module import MyData, MyModule
from lightning.pytorch import Trainer, seed_everything

from scalewise import compose
from scalewise.checkpoints import store
from scalewise.errors import ConfigError
from scalewise.run_files import write_json
from scalewise.tracing import user_module_trace

EXHAUSTIVE = pytest.mark.exhaustive
STEPS, BATCH_SIZE = 12, 8
USER_MODULE = (
    "objective=module",
    "objective.target=fixtures.user_module.MyModule",
    "data.target=fixtures.user_module.MyData",
    "trusted_packages=[fixtures]",
    f"trainer.max_steps={STEPS}",
    "trainer.validate_every=4",
    "trainer.log_every=4",
    "tracking=none",
    "hardware=cpu",
    "launch.timeout=120",
)

SHUFFLE = ("+data.arguments.shuffle=true",)
FSDP = ("parallelism=fsdp",)


@pytest.fixture
def run_job(tmp_path: Path, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path, shared_cache)


@pytest.fixture(scope="module")
def one_device_run(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> RunDir:
    """Run on one device with all samples of a step in one batch."""
    return JobRunner(tmp_path_factory.mktemp("alone"), shared_cache).without_defaults(
        *USER_MODULE, *SHUFFLE
    )


@pytest.mark.filterwarnings("ignore:The `srun` command", "ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*Checkpoint directory")
def test_user_module_is_bitwise_equal_to_plain_lightning(
    run_job: JobRunner, tmp_path: Path
) -> None:
    random_overrides = (*SHUFFLE, "+objective.arguments.dropout=0.3")
    actual = run_job.without_defaults(
        *USER_MODULE, *random_overrides, "trainer.max_epochs=2", "trainer.max_steps=null"
    )
    seed_everything(1, workers=True, verbose=False)
    module, data = MyModule(dropout=0.3), MyData(shuffle=True)
    trainer = Trainer(
        **QUIET_TRAINER,
        max_epochs=2,
        gradient_clip_val=1.0,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, datamodule=data)
    assert len(actual.metrics) == trainer.global_step == 16
    assert actual.column("train/loss")[-1] == float(trainer.callback_metrics["own/loss"])
    assert actual.column("val/loss")[-1] == float(trainer.callback_metrics["val_loss"])
    for name, weight in module.state_dict().items():
        assert torch.equal(actual.weights()[name], weight), name


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param(("parallelism=ddp",), 2, marks=EXHAUSTIVE),
        (FSDP, 2),
        pytest.param(
            ("parallelism=fsdp", "parallelism.reshard_after_forward=false"), 2, marks=EXHAUSTIVE
        ),
        pytest.param(("parallelism=hsdp",), 4, marks=EXHAUSTIVE),
        *(
            pytest.param(
                (f"parallelism=deepspeed_zero{stage}",), 2, marks=(EXHAUSTIVE, needs_deepspeed)
            )
            for stage in (1, 2)
        ),
        pytest.param(("parallelism=deepspeed_zero3",), 2, marks=needs_deepspeed),
    ],
)
def test_user_module_under_each_strategy_equals_one_device(
    strategy: tuple[str, ...], ranks: int, one_device_run: RunDir, run_job: JobRunner
) -> None:
    """Each of N ranks reads every N-th sample of one order, so that steps have the same samples."""
    run = run_job.without_defaults(
        *USER_MODULE, *SHUFFLE, *strategy, f"+data.arguments.batch_size={BATCH_SIZE // ranks}"
    )
    for key in ("train/loss", "train/grad_norm", "val/loss", "train/lr", "train/tokens"):
        assert run.column(key) == pytest.approx(one_device_run.column(key), rel=1e-5), key
    for name, weight in one_device_run.weights().items():
        torch.testing.assert_close(run.weights()[name], weight, rtol=1e-5, atol=1e-6)


@EXHAUSTIVE
@pytest.mark.parametrize(
    "strategy",
    [
        FSDP,
        pytest.param(("parallelism=deepspeed_zero2",), marks=needs_deepspeed),
        pytest.param(("parallelism=deepspeed_zero3",), marks=needs_deepspeed),
    ],
)
def test_average_of_a_user_module_equals_one_device(
    strategy: tuple[str, ...], run_job: JobRunner
) -> None:
    overrides = (*USER_MODULE, *SHUFFLE, "callbacks=[ema]", "callbacks.ema.decay=0.6")
    single_run = run_job.without_defaults(*overrides)
    run = run_job.without_defaults(*overrides, *strategy, "+data.arguments.batch_size=4")
    for key in ("train/loss", "val/loss"):
        assert run.column(key) == pytest.approx(single_run.column(key), rel=1e-5), key
    average, expected = (
        store.full_tensors(each.checkpoint(each.checkpoints[-1]), store.AVERAGE)
        for each in (run, single_run)
    )
    assert average.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(average[name], tensor, rtol=1e-5, atol=1e-6)
        assert not torch.equal(tensor, single_run.weights()[name]), name


@pytest.mark.parametrize(
    ("strategy", "ranks", "shuffle"),
    [
        (("parallelism=ddp",), 2, True),
        pytest.param(("parallelism=ddp", "parallelism.replicas=4"), 4, False, marks=EXHAUSTIVE),
        pytest.param(FSDP, 2, True, marks=EXHAUSTIVE),
        pytest.param(("parallelism=hsdp",), 4, True, marks=EXHAUSTIVE),
        pytest.param(
            ("parallelism=deepspeed_zero2",), 2, False, marks=(EXHAUSTIVE, needs_deepspeed)
        ),
    ],
)
def test_user_module_ranks_share_an_iterable_dataset(
    strategy: tuple[str, ...], ranks: int, shuffle: bool, run_job: JobRunner
) -> None:
    """Shuffled in each epoch, or in order."""
    stream = (f"+data.arguments.shuffle={shuffle}", "+data.arguments.stream=true")
    stream += (
        "+data.arguments.rows=24",
        "callbacks=none",
    )  # the guard receives two samples per rank
    single_run = run_job.without_defaults(*USER_MODULE, *stream)
    run = run_job.without_defaults(
        *USER_MODULE, *stream, *strategy, f"+data.arguments.batch_size={BATCH_SIZE // ranks}"
    )
    for key in ("train/loss", "train/grad_norm", "val/loss", "train/tokens"):
        assert run.column(key) == pytest.approx(single_run.column(key), rel=1e-5), key
    for name, weight in single_run.weights().items():
        torch.testing.assert_close(run.weights()[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", [("parallelism=ddp",), pytest.param(FSDP, marks=EXHAUSTIVE)])
def test_user_module_uneven_validation_samples_count_once(
    strategy: tuple[str, ...], run_job: JobRunner
) -> None:
    """Of 65 samples, one rank has 33 in 9 batches and the other 32 in 8."""
    overrides = (*USER_MODULE, "+data.arguments.rows=65", "+objective.arguments.lr=0.0")
    single_run, run = (
        run_job.without_defaults(*overrides),
        run_job.without_defaults(*overrides, *strategy, "+data.arguments.batch_size=4"),
    )
    assert run.column("val/loss") == pytest.approx(single_run.column("val/loss"), rel=1e-6)
    (note,) = run.summary["notes"]
    assert note.startswith("each epoch: 65 samples padded to 66 (1 repeated, 1.5%)")
    assert single_run.summary["notes"] == []


@pytest.mark.parametrize(
    "step", [3, pytest.param(8, marks=EXHAUSTIVE), pytest.param(11, marks=EXHAUSTIVE)]
)
def test_user_module_resume_is_bitwise_equal(step: int, run_job: JobRunner) -> None:
    """In the first epoch, at its end (8 batches), and in the second."""
    overrides = (*USER_MODULE, *SHUFFLE, "+objective.arguments.dropout=0.3")
    full_run = run_job.without_defaults(*overrides, f"checkpoint.every={step}", "checkpoint.keep=0")
    resumed_run = run_job.without_defaults(*overrides, resume=full_run.checkpoint(step))
    assert resumed_run.column("train/loss") == full_run.column("train/loss")
    for name, weight in full_run.weights().items():
        assert torch.equal(resumed_run.weights()[name], weight), name


def test_user_module_resumed_after_its_last_step_repeats_none(run_job: JobRunner) -> None:
    full_run = run_job.without_defaults(*USER_MODULE)
    write_json(full_run.path / "status.json", {**full_run.status, "status": "running"})
    resumed_run = run_job.without_defaults(*USER_MODULE, "resume=auto")
    assert resumed_run.status["resumed_from"] == str(full_run.checkpoint(STEPS))
    assert resumed_run.column("train/loss") == full_run.column("train/loss")
    assert resumed_run.summary["metrics"]["val/loss"] == full_run.summary["metrics"]["val/loss"]
    assert same_weights(resumed_run.weights(), full_run.weights())


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("WithoutLoss", (), "returns no loss"),
        ("TwoOptimizers", (), "has 2 optimizers"),
        ("ManualOptimization", ("+objective.arguments.steps=2",), "one optimizer step per batch"),
        ("FailingConstructor", (), "no such table"),
    ],
)
def test_user_module_that_cannot_be_trained_is_rejected(
    name: str, changes: tuple[str, ...], reason: str, run_job: JobRunner
) -> None:
    more = (f"objective.target=fixtures.user_module.{name}", "trainer.clip_norm=null")
    base_overrides = [
        override for override in USER_MODULE if not override.startswith("objective.target")
    ]
    run = run_job.without_defaults(*base_overrides, *more, *changes, status="refused")
    assert reason in run.status["reason"]
    assert run.status["exit_code"] == 2


def test_user_module_with_manual_optimization_trains(run_job: JobRunner) -> None:
    base_overrides = [
        override for override in USER_MODULE if not override.startswith("objective.target")
    ]
    run = run_job.without_defaults(
        *base_overrides,
        "objective.target=fixtures.user_module.ManualOptimization",
        "trainer.clip_norm=null",
    )
    losses = run.column("train/loss")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "strategy",
    [
        ("parallelism=single",),
        pytest.param(("parallelism=ddp",), marks=EXHAUSTIVE),
        pytest.param(FSDP, marks=EXHAUSTIVE),
        pytest.param(("parallelism=hsdp",), marks=EXHAUSTIVE),
    ],
)
def test_user_module_trace_predicts_memory(strategy: tuple[str, ...], run_job: JobRunner) -> None:
    overrides = (
        *USER_MODULE,
        *strategy,
        "+objective.arguments.width=256",
        "+data.arguments.batch_size=16",
    )
    metrics = run_job.without_defaults(*overrides).summary["metrics"]
    predicted = user_module_trace.trace_user_module(compose(overrides))
    for name in ("parameters", "gradients", "optimizer", "activations", "peak"):
        key = f"memory/{name}_bytes"
        print(f"{key}: {predicted[key]:,} traced, {metrics[key]:,} measured")
    for name in ("parameters", "gradients", "optimizer"):
        assert predicted[f"memory/{name}_bytes"] == metrics[f"memory/{name}_bytes"], name
    assert predicted["memory/peak_bytes"] == pytest.approx(metrics["memory/peak_bytes"], rel=0.05)
    assert predicted["rows"] == 16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("objective.target=fixtures.user_module.ManualOptimization",), "automatic optimization"),
        (
            ("objective.target=fixtures.user_module.DataDependentStep",),
            "cannot trace a training step",
        ),
        (("parallelism=deepspeed_zero1",), "requires real memory"),
    ],
)
def test_user_module_that_cannot_be_traced_is_rejected(
    changes: tuple[str, ...], reason: str
) -> None:
    replaced = {override.partition("=")[0] for override in changes}
    base_overrides = [
        override for override in USER_MODULE if override.partition("=")[0] not in replaced
    ]
    with pytest.raises(ConfigError, match=reason):
        user_module_trace.trace_user_module(
            compose([*base_overrides, *changes], check_machine=False)
        )
