"""Tests that require a CUDA device; run by ``make gpu``."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.strategies import marks

import scalewise
from scalewise.bench import calibrate, profile
from scalewise.data.prepare import prepare_splits
from scalewise.measure.step_timer import StepTimer
from scalewise.models.attention_backends import attend
from scalewise.models.attention_segments import AttentionSegments, packed_segments
from scalewise.models.build import build_model
from scalewise.models.decoder import state_dict_adapter
from scalewise.optimizers.build import build_from_groups
from scalewise.precision.config import FIRST_CAPABILITY
from scalewise.run_config import RunConfig
from scalewise.training.device_setup import device_cores

pytestmark = pytest.mark.gpu

SUPPORTS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FIRST_CAPABILITY
needs_fp8 = pytest.mark.skipif(not SUPPORTS_FP8, reason="no fp8 products before Ada")
SMOKE_RUN = (
    *("experiment=smoke", "tracking=none", "hardware=auto", "trainer.validate_every=null"),
    "compile=none",  # compilation takes longer than these runs
)


def train_metrics(run: RunConfig, folder: Path) -> dict[str, Any]:
    """Metrics of a run, which must end without an error."""
    result = scalewise.train(run, folder)
    assert result.status == "ok", result.reason
    return result.summary["metrics"]


@pytest.mark.parametrize(
    "precision",
    ["fp32", "bf16_mixed", "bf16_true", "fp16_mixed", pytest.param("fp8", marks=needs_fp8)],
)
def test_cuda_run_trains_and_records_metrics(precision: str, tmp_path: Path) -> None:
    run = scalewise.compose([*SMOKE_RUN, f"precision={precision}"])
    metrics = train_metrics(run, tmp_path / "run")
    assert metrics["train/loss"] < metrics["train/loss_first"]
    assert metrics["memory/peak_bytes"] >= metrics["memory/parameters_bytes"]
    assert metrics["memory/activations_bytes"] > 0
    assert metrics["time/step_s"] > 0


def test_cuda_fp32_losses_equal_cpu_losses(tmp_path: Path) -> None:
    """Starts from weights on disk, because random numbers differ by device."""
    run = scalewise.compose(SMOKE_RUN)
    state_dict_adapter.export_folder(
        build_model(run.model, 1).state_dict(), run.model, tmp_path / "start"
    )
    tokenizer = prepare_splits(run.data, run.model.vocabulary, run.seed).tokenizer
    losses = []
    for hardware in ("cpu", "auto"):
        start_overrides = [f"model.weights={tmp_path / 'start'}", f"data.tokenizer={tokenizer}"]
        overrides = [*SMOKE_RUN, f"hardware={hardware}", *start_overrides]
        metrics = train_metrics(scalewise.compose(overrides), tmp_path / hardware)
        losses.append(metrics["train/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "compiled"),
    [
        pytest.param(strategy, compiled, marks=marks(strategy))
        for strategy in ("ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3")
        for compiled in ("none", "auto")
        if (strategy, compiled) != ("deepspeed_zero3", "auto")  # where auto is none
    ],
)
def test_strategy_trains_on_one_cuda_rank(strategy: str, compiled: str, tmp_path: Path) -> None:
    overrides = [
        *SMOKE_RUN,
        f"parallelism={strategy}",
        f"compile={compiled}",
        "launch.isolation=process",
    ]
    run = scalewise.compose(overrides)
    assert run.is_compiled == (compiled == "auto")
    result = scalewise.train(run, tmp_path / "run")
    assert result.status == "ok", result.reason


@pytest.mark.parametrize(
    "overrides", [(), ("precision=bf16_mixed",), ("compile=block",)], ids=" ".join
)
def test_fsdp_on_a_mesh_of_one_rank_equals_single_device(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    losses = []
    for parallelism in (
        ("parallelism=single",),
        ("parallelism=fsdp", "parallelism.one_rank_mesh=true"),
    ):
        run = scalewise.compose([*SMOKE_RUN, *overrides, *parallelism])
        losses.append(train_metrics(run, tmp_path / parallelism[0])["train/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_cuda_state_memory_equals_parameter_shapes(tmp_path: Path) -> None:
    run = scalewise.compose(SMOKE_RUN)
    metrics = train_metrics(run, tmp_path / "run")
    weights = 4 * run.model.num_parameters
    assert metrics["memory/gradients_bytes"] == pytest.approx(weights, rel=0.02)
    assert metrics["memory/optimizer_bytes"] == pytest.approx(2 * weights, rel=0.02)


def test_activation_offload_changes_only_the_peak(tmp_path: Path) -> None:
    options = {
        "none": ("memory=none",),
        "blocks": ("memory=offload_activations",),
        "all": ("memory=offload_activations", "memory.recompute=nothing"),
    }
    metrics = {}
    for name, overrides in options.items():
        run = scalewise.compose([*SMOKE_RUN, "precision=fp32", *overrides])
        metrics[name] = train_metrics(run, tmp_path / name)
    losses = {name: values["train/loss"] for name, values in metrics.items()}
    assert losses == pytest.approx(dict.fromkeys(options, losses["none"]), rel=1e-4)
    assert metrics["blocks"]["memory/peak_bytes"] < metrics["none"]["memory/peak_bytes"]


def test_optimizer_offload_changes_only_the_peak(tmp_path: Path) -> None:
    metrics = {}
    for offload in ("false", "true"):
        overrides = [
            *SMOKE_RUN,
            "precision=fp32",
            f"optimizer.offload={offload}",
            "optimizer.fused=true",
        ]
        metrics[offload] = train_metrics(scalewise.compose(overrides), tmp_path / offload)
    device, host = metrics["false"], metrics["true"]
    assert host["train/loss"] == pytest.approx(device["train/loss"], rel=1e-4)
    assert device["memory/peak_bytes"] - host["memory/peak_bytes"] == pytest.approx(
        device["memory/optimizer_bytes"], rel=0.1
    )


def test_paged_optimizer_changes_only_the_peak(tmp_path: Path) -> None:
    """State read from a checkpoint is paged again."""
    overrides = [*SMOKE_RUN, "precision=fp32", "checkpoint.every=2"]
    default_metrics = train_metrics(scalewise.compose(overrides), tmp_path / "plain")
    run = scalewise.compose([*overrides, "optimizer=adamw_paged"])
    paged = train_metrics(run, tmp_path / "paged")
    assert paged["train/loss"] == pytest.approx(default_metrics["train/loss"], rel=1e-4)
    assert default_metrics["memory/peak_bytes"] - paged["memory/peak_bytes"] == pytest.approx(
        default_metrics["memory/optimizer_bytes"], rel=0.1
    )
    parameter = torch.nn.Parameter(torch.ones(8, 8, device="cuda"))
    adamw = build_from_groups(run.optimizer, [{"params": [parameter], "weight_decay": 0.0}])
    parameter.grad = torch.ones_like(parameter)
    adamw.step()
    adamw.wait_for_state()
    moment_before = adamw.state[parameter]["exp_avg"]
    adamw.encode(parameter)
    moment_after = adamw.state[parameter]["exp_avg"]
    assert moment_after.is_paged
    assert torch.equal(moment_before, moment_after)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.005), (torch.float32, 1e-4)]
)
@pytest.mark.parametrize("prefix_tokens", [0, 16])
@pytest.mark.parametrize("window", [None, 100])
def test_cuda_attention_of_segments_equals_cpu(
    dtype: torch.dtype, tolerance: float, prefix_tokens: int, window: int | None
) -> None:
    torch.set_float32_matmul_precision("highest")  # a run in this process may have changed it
    generator = torch.Generator().manual_seed(1)
    lengths, outputs = (700, 1, 300, 23), []
    key_lengths = [prefix_tokens + length for length in lengths]
    tensors = [
        torch.randn(1, tokens, heads, 64, generator=generator).to(dtype)
        for tokens, heads in ((1024, 8), (sum(key_lengths), 2), (sum(key_lengths), 2))
    ]
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        segments = AttentionSegments.from_lengths(
            lengths, key_lengths, torch.device(device), window
        )
        leaves = [x.clone().to(device, kind).requires_grad_() for x in tensors]
        attention = attend(*leaves, segments)
        attention.float().square().sum().backward()
        outputs.append(
            [x.detach().cpu().float() for x in (attention, *(leaf.grad for leaf in leaves))]
        )
    for expected, actual in zip(*outputs, strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("texts", [1, 8])
def test_grouped_query_attention_stores_no_scores(dtype: torch.dtype, texts: int) -> None:
    tokens = 8192
    query, key = (
        torch.randn(1, tokens, heads, 64, device="cuda", dtype=dtype, requires_grad=True)
        for heads in (8, 1)
    )
    positions = torch.arange(tokens)[None] % (tokens // texts)
    segments = packed_segments(positions, query.device) if texts > 1 else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(query, key, key, segments).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < tokens**2 * dtype.itemsize


def test_phase_timer_measures_device_time() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    clock = StepTimer(device)
    for phase in ("data", "forward", "backward", "optimizer"):
        clock.mark(phase)
        if phase == "forward":
            for _ in range(20):
                matrix = matrix @ matrix / 64
    clock.end_step()
    (seconds,) = clock.drain()
    assert seconds["forward"] > 10 * seconds["backward"]


@pytest.mark.parametrize(
    "case_overrides",
    [
        (),
        ("precision=bf16_mixed",),
        ("precision=bf16_mixed", "memory=checkpoint_full"),
        ("precision=bf16_true", "memory=checkpoint_selective"),
        ("precision=bf16_mixed", "adapter=lora"),
        ("precision=bf16_mixed", "objective.loss_chunk=1024"),
        ("precision=bf16_mixed", "compile=block"),
        ("precision=bf16_mixed", "compile=block", "objective.loss_chunk=1024"),
        ("precision=bf16_mixed", "memory=offload_activations"),
        ("precision=bf16_mixed", "adapter=lora", "quantization=nf4"),
        ("precision=bf16_true", "adapter=lora", "quantization=nf4", "memory=checkpoint_full"),
        ("precision=bf16_mixed", "adapter=lora", "quantization=int8"),
        ("precision=bf16_mixed", "quantization=qat_8da4w", "quantization.group=16"),
        ("precision=bf16_mixed", "adapter=prefix", "model.context=2048"),
        ("precision=bf16_true", "optimizer=adamw_8bit"),
        ("optimizer.in_backward=true", "trainer.clip_norm=null", "trainer.global_batch=null"),
        pytest.param(("precision=fp8",), marks=needs_fp8),
        pytest.param(("precision=fp8", "precision.recipe=rowwise"), marks=needs_fp8),
    ],
    ids=" ".join,
)
def test_cuda_peak_memory_is_near_prediction(
    case_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """The plan omits kernel workspaces, which are small compared with this model."""
    size = ("model=llama_160m", "data=synthetic", "data.sequence=1024", "trainer.micro_batch=8")
    shape = ("trainer.global_batch=8", "trainer.max_steps=3", "schedule.warmup_steps=1")
    run = scalewise.compose([*SMOKE_RUN, *size, *shape, *case_overrides])
    metrics = train_metrics(run, tmp_path / "run")
    assert metrics["plan/peak_bytes"] == pytest.approx(metrics["memory/peak_bytes"], rel=0.1)


def test_calibrate_writes_a_profile_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = calibrate.calibrate(
        scalewise.compose(SMOKE_RUN), calibrate.CalibrateOptions(seconds=0.2)
    )
    figures = profile.measured_figures(file)
    for name in ("bf16_reached_tflops", "bandwidth_share", "launch_us", "host_link_gb_per_s"):
        value = figures[name]
        assert isinstance(value, float), name
        assert value > 0, name


def test_allocator_has_expandable_segments(tmp_path: Path) -> None:
    code = (
        "import os; from scalewise.torch_environment import set_torch_variables;"
        "set_torch_variables(os.environ); import torch; torch.ones(1, device='cuda');"
        "print({segment['is_expandable'] for segment in torch.cuda.memory_snapshot()})"
    )
    environment = {key: os.environ[key] for key in os.environ if "ALLOC_CONF" not in key}
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert output.stdout.strip() == "{True}"


def test_rank_runs_on_cores_next_to_its_device() -> None:
    cores = device_cores(0)
    assert cores
    assert cores <= set(range(os.cpu_count() or 0))


def test_hung_rank_leaves_a_flight_recorder_dump(tmp_path: Path) -> None:
    """On one device NCCL has one rank, whose collectives cannot hang: the dump needs two."""
    if torch.cuda.device_count() < 2:
        pytest.skip("requires two CUDA devices")
    overrides = ["parallelism=ddp", "launch.collective_timeout=10", "+inject=hang"]
    run = scalewise.compose([*SMOKE_RUN, *overrides, "callbacks.inject.rank=1"])
    result = scalewise.train(run, tmp_path / "run")
    assert result.status == "failed"
    assert f"NCCL Flight Recorder: {tmp_path / 'run'}/flight_recorder_rank_*" in result.reason
    assert (tmp_path / "run" / "flight_recorder_rank_0").exists()


def test_out_of_memory_at_the_limit_ends_all_ranks(tmp_path: Path) -> None:
    ranks = min(2, torch.cuda.device_count())
    overrides = ["launch.isolation=process", "launch.memory_limit_gib=0.05", "model.width=1024"]
    if ranks == 2:
        overrides.append("parallelism=ddp")
    result = scalewise.train(scalewise.compose([*SMOKE_RUN, *overrides]), tmp_path / "run")
    assert result.status == "out_of_memory", result.reason
