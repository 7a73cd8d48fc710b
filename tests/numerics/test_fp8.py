"""FP8 matmuls: torchao as the reference, error bounds, every strategy."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    BATCHES,
    SGD,
    TOLERANCE,
    assert_same_training,
    assert_tensors_close,
    load_gradients,
    train_strategy,
)
from fixtures.strategies import GPT2, LLAMA, STRATEGIES, TINY_DECODER
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from scalewise import cli, compose
from scalewise.hardware import DeviceKind
from scalewise.models.base import StageSlice
from scalewise.models.build import build_meta, build_model
from scalewise.models.op_graph import Recompute
from scalewise.precision.build import apply_precision
from scalewise.precision.config import Float8, ScalingRecipe
from scalewise.strategies.activation_checkpointing import checkpoint_block
from scalewise.strategies.single import SingleDevice

EXHAUSTIVE = pytest.mark.exhaustive
FP8 = ("precision=fp8", "precision.compute=fp32")
ROWWISE = (*FP8, "precision.recipe=rowwise")
TEXT = ("data=corpus", "data.vocabulary=300", "model.vocabulary=300", "data.megabytes=0.5")
E4M3_STEP, E5M2_STEP = 2.0**-4, 2.0**-3
"""Largest relative rounding errors with 3 and with 2 mantissa bits."""
SMALLEST_SCALED = {E4M3_STEP: 2.0**-10 / 448, E5M2_STEP: 2.0**-17 / 57344}
"""Largest rounding errors near 0, relative to the largest value of the scale."""


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_fp8_converts_linear_layers_of_blocks(shape: tuple[str, ...]) -> None:
    run = compose([*TINY_DECODER, *shape, *FP8])
    module = SingleDevice(DeviceKind.cpu).build(run)
    converted = {name for name, layer in module.named_modules() if isinstance(layer, Float8Linear)}
    linear = {name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    assert converted == {name for name in linear if name.startswith("blocks.")}
    assert len(converted) == len(run.precision.fp8_layers(run.model)) * run.model.layers
    parameter_shapes = {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters()
    }
    assert parameter_shapes == {weight.name: weight.shape for weight in run.weight_census()}


def test_fp8_skips_layers_not_divisible_by_16() -> None:
    run = compose([*TINY_DECODER, *LLAMA, *FP8, "model.feedforward=40"])
    block = SingleDevice(DeviceKind.cpu).build(run).get_submodule("blocks.0")
    assert not isinstance(block.get_submodule("feedforward.down"), Float8Linear)
    assert isinstance(block.get_submodule("attention.output"), Float8Linear)


@pytest.mark.parametrize("recipe", ScalingRecipe)
@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_fp8_losses_and_gradients_equal_torchao(
    recipe: ScalingRecipe, shape: tuple[str, ...]
) -> None:
    run = compose([*TINY_DECODER, *shape, *FP8, f"precision.recipe={recipe}"])
    reference_model = build_model(run.model, 1)
    config = replace(Float8LinearConfig.from_recipe_name(recipe.value), emulate=True)
    reference = convert_to_float8_training(
        deepcopy(reference_model), config=config, module_filter_fn=lambda _, name: "blocks." in name
    )
    apply_precision(run.precision, reference_model, run.model, DeviceKind.cpu)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(5))
    for module in (reference_model, reference):
        module(tokens).logsumexp(-1).sum().backward()
    for (name, actual), expected in zip(
        reference_model.named_parameters(), reference.parameters(), strict=True
    ):
        assert actual.grad is not None
        assert torch.equal(actual.grad, expected.grad), name


def largest_error(a: Tensor, b: Tensor, step_of_a: float, step_of_b: float) -> Tensor:
    """Error bound of ``a @ b`` if each element is rounded separately."""
    a, b = a.abs(), b.abs()
    small_a, small_b = (x.max() * SMALLEST_SCALED[of] for x, of in ((a, step_of_a), (b, step_of_b)))
    off_a, off_b = a * step_of_a + small_a, b * step_of_b + small_b
    return off_a @ b + a @ off_b + off_a @ off_b


@pytest.mark.parametrize("recipe", ScalingRecipe)
def test_fp8_matmul_error_matches_the_format(recipe: ScalingRecipe) -> None:
    generator = torch.Generator().manual_seed(7)
    x, output_gradient = (torch.randn(64, n, generator=generator) for n in (96, 48))
    x.requires_grad_()
    spec = compose([*TINY_DECODER, *LLAMA, "model.width=96", "model.feedforward=48"]).model
    module = build_meta(spec, StageSlice(range(1))).to_empty(device="cpu")
    apply_precision(Float8(recipe=recipe), module, spec, DeviceKind.cpu)
    layer = module.get_submodule("blocks.0.feedforward.up")
    assert isinstance(layer, Float8Linear)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(48, 96, generator=generator) / 8)
    y = layer(x)
    y.backward(output_gradient)
    assert x.grad is not None
    assert layer.weight.grad is not None
    weight, output_gradient_step = (
        layer.weight.detach(),
        E5M2_STEP if recipe is ScalingRecipe.tensorwise else E4M3_STEP,
    )
    for product, a, b, step_of_a in (
        (y.detach(), x.detach(), weight.T, E4M3_STEP),
        (x.grad, output_gradient, weight, output_gradient_step),
        (layer.weight.grad, output_gradient.T, x.detach(), output_gradient_step),
    ):
        error = (product - a @ b).abs()
        assert (error <= largest_error(a, b, step_of_a, E4M3_STEP) + 1e-5).all(), step_of_a
        assert error.norm() > 0.005 * product.norm(), step_of_a


def micro_batched(
    run: RunDir, recipe: tuple[str, ...], run_job: JobRunner, chunk: int | None
) -> RunDir:
    """The same steps on one device, with scales over the same number of samples."""
    micro_batch = chunk or run.resolved["trainer"]["micro_batch"]
    overrides = (
        *TINY_DECODER,
        *SGD,
        *BATCHES["accumulated"],
        *recipe,
        f"trainer.micro_batch={micro_batch}",
    )
    return run_job.without_defaults(*overrides)


@pytest.mark.parametrize(
    ("strategy", "recipe"),
    [
        ("fsdp", ROWWISE),
        *(
            pytest.param(strategy, recipe, marks=EXHAUSTIVE)
            for strategy in ("ddp", "fsdp", "fsdp_offload", "hsdp", "pipeline_one_f_one_b")
            for recipe in (FP8, ROWWISE)
            if (strategy, recipe) != ("fsdp", ROWWISE)
        ),
    ],
)
def test_fp8_under_each_strategy_equals_one_device(
    strategy: str, recipe: tuple[str, ...], tmp_path: Path, shared_cache: Path
) -> None:
    """Rounding differences accumulate, so that only the first step is compared."""
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy(STRATEGIES[strategy], "accumulated", run_job, *recipe)
    single_run = micro_batched(run, recipe, run_job, 1 if "pipeline" in strategy else None)
    if recipe == ROWWISE:
        assert_same_training(run, single_run)
        return
    assert_tensors_close(
        load_gradients(run, 0), load_gradients(single_run, 0), "gradients of step 0"
    )
    losses = run.column("train/loss"), single_run.column("train/loss")
    assert losses[0][0] == pytest.approx(losses[1][0], rel=TOLERANCE)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scope", ["block", "whole"])
def test_fp8_compiled_equals_eager(scope: str, tmp_path: Path, shared_cache: Path) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    overrides = (
        *TINY_DECODER,
        *SGD,
        *BATCHES["one_micro_batch"],
        *ROWWISE,
        "trainer.micro_batch=12",
    )
    compiled = run_job.without_defaults(*overrides, f"compile={scope}", "compile.backend=aot_eager")
    assert_same_training(compiled, run_job.without_defaults(*overrides))


def test_fp8_evaluation_reports_the_fp32_loss(
    tmp_path: Path, shared_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Padding samples affect tensorwise scales, but not rowwise scales."""
    overrides = (*TINY_DECODER, *SGD, *BATCHES["one_micro_batch"], *TEXT, "trainer.micro_batch=4")
    run = JobRunner(tmp_path, shared_cache).without_defaults(*overrides, *ROWWISE)
    assert cli.main(["evaluate", str(run.path)]) == 0
    record = json.loads((run.path / "evaluation.json").read_text("utf-8"))["3"]
    assert "fp8 matmuls: the loss is " in capsys.readouterr().out
    assert record["loss"] == pytest.approx(run.column("val/loss")[-1], rel=1e-5)
    assert record["loss_in_fp32"] != record["loss"]
    assert record["loss_in_fp32"] == pytest.approx(record["loss"], rel=0.01)


@pytest.mark.parametrize("recipe", ScalingRecipe)
def test_selective_checkpointing_repeats_no_fp8_matmul(
    recipe: ScalingRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the operator that CUDA runs, which the emulation replaces by a matmul in fp32."""
    calls: list[torch.Size] = []
    scaled_mm = torch._scaled_mm

    def counted(a: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(a.shape)
        return scaled_mm(a, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    config = replace(Float8LinearConfig.from_recipe_name(recipe.value), emulate=False)
    counts = {}
    for recompute in Recompute:
        layers = [nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32, bias=False)]
        block = convert_to_float8_training(nn.Sequential(*layers).bfloat16(), config=config)
        if recompute is not Recompute.nothing:
            checkpoint_block(block, save_matmuls=recompute is Recompute.selective)
        x = torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)
        calls.clear()
        block(x).sum().backward()
        counts[recompute] = len(calls)
    assert counts[Recompute.selective] == counts[Recompute.nothing] == 6
    assert counts[Recompute.full] > 6
