"""Optimizers: convergence, state bytes, every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import same_weights
from fixtures.decoder_configs import GPT2
from fixtures.job_runner import JobRunner
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER, marks
from torch import Tensor, nn

from scalewise import compose
from scalewise.config import paths
from scalewise.models.base import Weight
from scalewise.models.build import build_model
from scalewise.optimizers import AdamWConfig, OptimizerConfig
from scalewise.optimizers.build import build_from_groups, build_optimizer
from scalewise.optimizers.config import (
    AdafactorConfig,
    AdamW4bitConfig,
    AdamW8bitConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeConfig,
    SGDConfig,
)
from scalewise.strategies.optimizer_state_dict import allocate_state, put_state, state_tensors

SPECS = (
    SGDConfig(),
    LionConfig(),
    AdamWConfig(),
    AdamW8bitConfig(),
    AdamW4bitConfig(),
    AdafactorConfig(),
    MuonConfig(),
    ScheduleFreeConfig(),
)
SPECS += (AdamWConfig(offload=True),)


@pytest.fixture
def run_job(tmp_path: Path, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path, shared_cache)


def weights_with_parameters(seed: int = 1) -> list[tuple[Weight, nn.Parameter]]:
    """Weights of a small decoder and their parameters, each with a gradient."""
    module = build_model(GPT2, seed)
    census = {weight.name: weight for weight in GPT2.weight_census()}
    weights_and_parameters = [
        (census[name], parameter) for name, parameter in module.named_parameters()
    ]
    torch.manual_seed(seed)
    for _, parameter in weights_and_parameters:
        parameter.grad = torch.randn_like(parameter)
    return weights_and_parameters


def tensors_of(value: Tensor) -> Iterator[Tensor]:
    """Tensors of an optimizer state: codes, scales and a table in torchao."""
    inner = getattr(value, "tensor_attrs", None)
    yield from [value] if inner is None else [getattr(value, name) for name in inner]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_optimizer_state_bytes_equal_prediction(spec: OptimizerConfig) -> None:
    parameters = weights_with_parameters()
    optimizer = build_optimizer(spec, parameters)
    optimizer.step()
    for weight, parameter in parameters:
        state = [
            value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)
        ]
        real = sum(t.nbytes for value in state if value.ndim for t in tensors_of(value))
        assert real == spec.state_bytes(weight, 1, 4), weight


def test_lion_step_equals_the_paper() -> None:
    spec = LionConfig(lr=0.01, weight_decay=0.1)
    parameters = weights_with_parameters()
    optimizer = build_optimizer(spec, parameters)
    reference_state = [
        (parameter.detach().clone(), torch.zeros_like(parameter)) for _, parameter in parameters
    ]
    for step in range(3):
        for (weight, parameter), (x, m) in zip(parameters, reference_state, strict=True):
            torch.manual_seed(step)
            parameter.grad = g = torch.randn_like(parameter)
            decay = 0.1 if len(weight.shape) > 1 else 0.0
            update = torch.sign(0.9 * m + (1 - 0.9) * g)
            x -= 0.01 * (update + decay * x)
            m.mul_(0.99).add_(0.01 * g)
        optimizer.step()
    for (_, parameter), (x, _) in zip(parameters, reference_state, strict=True):
        torch.testing.assert_close(parameter.detach(), x)


def test_muon_equals_torch_muon_and_adamw() -> None:
    spec, parameters, peers = (
        MuonConfig(lr=0.01),
        weights_with_parameters(),
        weights_with_parameters(),
    )
    actual = build_optimizer(spec, parameters)
    hidden = [p for w, p in peers if spec.is_hidden(w)]
    matrices = [p for w, p in peers if not spec.is_hidden(w) and len(w.shape) > 1]
    vectors = [p for w, p in peers if len(w.shape) == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    expected = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    ]
    for _ in range(3):
        for optimizer in (actual, *expected):
            optimizer.step()
    for (weight, actual_weight), (_, peer) in zip(parameters, peers, strict=True):
        assert torch.equal(actual_weight, peer), weight


CORPUS_TRAINING = (
    "model=decoder_nano",
    "data=corpus",
    "data.sequence=64",
    "tracking=none",
    "checkpoint=none",
    "trainer.max_steps=60",
    "trainer.global_batch=16",
    "trainer.micro_batch=16",
    "trainer.validate_every=60",
    "trainer.validation_rows=32",
    "schedule=constant",
    "schedule.warmup_steps=5",
)
EXPECTED_LOSSES = {
    "adafactor": 6.7,
    "adamw": 7.1,
    "adamw_4bit": 7.3,
    "adamw_8bit": 7.1,
    "adamw_paged": 7.1,
    "lion": 7.7,
    "muon": 6.7,
    "schedule_free": 6.4,
    "sgd": 7.0,
}
"""Validation loss after 60 steps in nats, slightly above the measured one; it starts at 9.0."""


def test_optimizers_all_have_an_expected_loss() -> None:
    optimizer_names = set(paths.option_names("optimizer")) - {
        "module"
    }  # requires a user-defined class
    assert set(EXPECTED_LOSSES) == optimizer_names


TRAINED_ONLY = ("lion",)
"""Optimizers that CI trains here: AdamW trains in most other tests."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in TRAINED_ONLY else pytest.mark.exhaustive)
        for n in EXPECTED_LOSSES
    ],
)
def test_optimizer_reaches_its_expected_loss(name: str, run_job: JobRunner) -> None:
    run = run_job.without_defaults(*CORPUS_TRAINING, f"optimizer={name}")
    final_loss = run.column("val/loss")[-1]
    print(f"{name}: {final_loss:.3f}")
    assert final_loss < EXPECTED_LOSSES[name]


TESTED_STRATEGIES = {
    "lion": ("ddp", "fsdp", "tensor", "pipeline_one_f_one_b", "deepspeed_zero2"),
    "adamw_8bit": ("ddp", "fsdp", "tensor"),
    "adamw_4bit": ("fsdp",),
    "adamw_paged": ("ddp", "pipeline_one_f_one_b"),
    "schedule_free": ("ddp", "fsdp", "tensor"),
    "adafactor": ("ddp", "pipeline_one_f_one_b"),
    "muon": ("ddp", "pipeline_one_f_one_b", "fsdp", "hsdp", "context", "pipeline_shard", "fsdp_4"),
}
TOLERANCES = {("adamw_8bit", "tensor"): 1e-4}
"""Column sharding changes the elements that share a scale, and thus their rounding."""
STEPS = (
    *TINY_DECODER,
    *LLAMA,
    "schedule=constant",
    "schedule.warmup_steps=0",
    "trainer.max_steps=4",
    "trainer.global_batch=8",
    "trainer.micro_batch=2",
    "trainer.log_every=1",
    "trainer.validate_every=2",
    "trainer.validation_rows=4",
)
"""Four steps, validated twice: schedule-free AdamW switches weights for validation."""


CI_STRATEGIES = {
    "lion": (),
    "adamw_8bit": ("fsdp",),
    "adamw_4bit": (),
    "adamw_paged": (),
    "schedule_free": (),
    "adafactor": (),
    "muon": ("fsdp",),
}
"""Strategies that CI runs: the others use the same code or less."""


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(
            name,
            strategy,
            marks=(
                *marks(strategy),
                *(() if strategy in CI_STRATEGIES[name] else (pytest.mark.exhaustive,)),
            ),
        )
        for name, strategies in TESTED_STRATEGIES.items()
        for strategy in strategies
    ],
)
def test_optimizer_under_each_strategy_equals_one_device(
    name: str, strategy: str, run_job: JobRunner
) -> None:
    overrides = (*STEPS, *(WIDE_MODEL if name.endswith("bit") else ()), f"optimizer={name}")
    single_run, run = (
        run_job.without_defaults(*overrides),
        run_job.without_defaults(
            *overrides, *STRATEGIES.get(strategy, (f"parallelism={strategy}",))
        ),
    )
    for key in ("train/loss", "val/loss"):
        tolerance = TOLERANCES.get((name, strategy), 1e-5)
        assert run.column(key) == pytest.approx(single_run.column(key), rel=tolerance), key


WIDE_MODEL = ("model.width=128", "model.feedforward=384", "model.heads=4")
"""Matrices whose shards are large enough to be quantized."""


RESUMED_OPTIMIZERS = ("lion", "adafactor", "muon", "schedule_free")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "muon" else pytest.mark.exhaustive)
        for n in RESUMED_OPTIMIZERS
    ],
)
def test_optimizer_resumes_from_a_checkpoint(name: str, run_job: JobRunner) -> None:
    overrides = (*STEPS, f"optimizer={name}", "checkpoint.every=2")
    full_run = run_job.without_defaults(*overrides)
    resumed = run_job.without_defaults(*overrides, resume=full_run.checkpoint(2))
    assert resumed.column("train/loss") == full_run.column("train/loss")
    assert same_weights(resumed.weights(), full_run.weights())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_4bit"])
def test_low_bit_moments_resume_under_another_strategy(name: str, run_job: JobRunner) -> None:
    """Checkpoints store dequantized moments, which every strategy can shard."""
    overrides = (*STEPS, *WIDE_MODEL, f"optimizer={name}", "checkpoint.every=2")
    full_run = run_job.without_defaults(*overrides)
    resumed = run_job.without_defaults(
        *overrides, "parallelism=fsdp", resume=full_run.checkpoint(2)
    )
    assert resumed.column("train/loss") == pytest.approx(full_run.column("train/loss"), rel=1e-4)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", [AdamW8bitConfig(), AdamW4bitConfig()], ids=["8bit", "4bit"])
def test_low_bit_moments_round_trip(spec: OptimizerConfig, kind: torch.dtype) -> None:
    """For all gradients, and for every aligned slice of a weight."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    weight, small_weight = (nn.Parameter(torch.randn(n, 256).to(kind)) for n in (96, 3))
    optimizer = build_from_groups(spec, [{"params": [weight, small_weight], "weight_decay": 0.0}])
    for _ in range(5):
        for parameter in (weight, small_weight):
            sizes = 10.0 ** torch.randint(-12, 4, (len(parameter), 1), generator=generator)
            gradient = torch.randn(parameter.shape, generator=generator) * sizes
            parameter.grad = gradient.to(kind)
        optimizer.step()
    saved_state = state_tensors([optimizer], {weight: "w", small_weight: "s"})
    for weight_rows in (slice(0, 96), slice(0, 48), slice(64, 96)):
        shard = nn.Parameter(weight.detach()[weight_rows].clone())
        loaded_optimizer = build_from_groups(
            spec, [{"params": [shard, small_weight], "weight_decay": 0.0}]
        )
        state_shapes = {key: value.shape for key, value in saved_state.items()}
        state_shapes |= {f"{slot}/w": shard.shape for slot in ("exp_avg", "exp_avg_sq")}
        allocated = allocate_state(
            [loaded_optimizer], {shard: "w", small_weight: "s"}, state_shapes
        )
        for key, value in allocated.items():
            saved_tensor = saved_state[key]
            value.copy_(
                saved_tensor[weight_rows] if saved_tensor.shape == weight.shape else saved_tensor
            )
        put_state([loaded_optimizer], {shard: "w", small_weight: "s"}, allocated)
        loaded_state = state_tensors([loaded_optimizer], {shard: "w", small_weight: "s"})
        for key, value in loaded_state.items():
            saved_tensor = saved_state[key]
            assert value.dtype == saved_tensor.dtype, key
            assert torch.equal(
                value,
                saved_tensor[weight_rows] if saved_tensor.shape == weight.shape else saved_tensor,
            ), key


def test_low_bit_moments_are_rounded_once() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 256))
    gradient = torch.randn_like(weight)
    optimizer = build_from_groups(AdamW8bitConfig(), [{"params": [weight], "weight_decay": 0.0}])
    put_state(
        [optimizer],
        {weight: "w"},
        {"exp_avg/w": gradient.clone(), "exp_avg_sq/w": gradient.square()},
    )
    first_state = state_tensors([optimizer], {weight: "w"})
    torch.testing.assert_close(first_state["exp_avg/w"], gradient, rtol=0.1, atol=0.02)
    put_state(
        [optimizer], {weight: "w"}, {key: value.clone() for key, value in first_state.items()}
    )
    second_state = state_tensors([optimizer], {weight: "w"})
    assert all(torch.equal(second_state[key], first_state[key]) for key in first_state)


@pytest.mark.parametrize(
    "offload_overrides",
    [
        (),
        *(
            pytest.param(offload_overrides, marks=pytest.mark.exhaustive)
            for offload_overrides in (
                ("parallelism=ddp",),
                ("parallelism=ddp", "optimizer.shard=true"),
                ("optimizer.in_backward=true", "trainer.clip_norm=null", "trainer.micro_batch=8"),
                ("adapter=lora",),
            )
        ),
    ],
)
def test_cpu_offload_step_equals_device_step(
    offload_overrides: tuple[str, ...], run_job: JobRunner
) -> None:
    """Tests the arithmetic: on CPU, host and device share memory."""
    device_run = run_job.without_defaults(*STEPS, *offload_overrides, "checkpoint.every=2")
    full_run = run_job.without_defaults(
        *STEPS, *offload_overrides, "optimizer.offload=true", "checkpoint.every=2"
    )
    resumed = run_job.without_defaults(
        *STEPS, *offload_overrides, "optimizer.offload=true", resume=device_run.checkpoint(2)
    )
    for run in (full_run, resumed):
        assert run.column("train/loss") == device_run.column("train/loss"), run
        assert same_weights(run.weights(), device_run.weights()), run


@pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("bf16_true", marks=pytest.mark.exhaustive)]
)
def test_paged_adamw_equals_torch(precision: str, run_job: JobRunner) -> None:
    """Moments of bf16 weights are fp32."""
    overrides = (*STEPS, f"precision={precision}", "checkpoint.every=2")
    paged = (*overrides, "optimizer=adamw_paged")
    torch_run, paged_run = (
        run_job.without_defaults(*overrides, "optimizer=adamw"),
        run_job.without_defaults(*paged),
    )
    tolerance = 1e-6 if precision == "fp32" else 1e-3
    assert paged_run.column("train/loss") == pytest.approx(
        torch_run.column("train/loss"), rel=tolerance
    )
    resumed = run_job.without_defaults(*paged, resume=paged_run.checkpoint(2))
    assert same_weights(resumed.weights(), paged_run.weights())


def test_parameter_groups_have_separate_rates(run_job: JobRunner) -> None:
    """A factor of 0 leaves weights unchanged."""
    overrides = (*STEPS, "+optimizer.lr_factors.embedding=0.0")
    run = run_job.without_defaults(*overrides, *STRATEGIES["fsdp"])
    initial_weights = build_model(compose(overrides).model, 1).state_dict()
    start = {f"model.{name}": weight for name, weight in initial_weights.items()}
    unchanged_names = [
        name for name, weight in run.weights().items() if torch.equal(weight, start[name])
    ]
    assert unchanged_names == ["model.embedding.weight"]
