"""Quantized base weights: bitsandbytes as the reference, adapters under every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    ReferenceRun,
    assert_same_training,
    load_gradients,
    train_strategy,
)
from fixtures.strategies import GPT2, LLAMA, STRATEGIES, TINY_DECODER, marks
from torch import Tensor

from scalewise import cli, compose
from scalewise.compat.torch import TorchDispatchMode, tree_leaves
from scalewise.hardware import DeviceKind
from scalewise.quantization.config import FourBitConfig, FP4Config, Int8Config, NF4Config
from scalewise.quantization.packed_linear import (
    FourBitLinear,
    Int8Linear,
    PackedLinear,
    build_packed_linear,
)
from scalewise.strategies.single import SingleDevice

LORA = ("adapter=lora", "adapter.rank=4", "adapter.targets=[attention.query,feedforward.down]")
QUANTIZATIONS = {
    "nf4": ("quantization=nf4",),
    "fp4": ("quantization=fp4", "quantization.double=false"),
    "int8": ("quantization=int8",),
}
USUAL = {
    "nf4": ("fsdp",),
    "fp4": (),
    "int8": (),
}
EACH = ["nf4", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("fp4", "int8"))]
TEXT = ("data=corpus", "data.vocabulary=300", "model.vocabulary=300", "data.megabytes=0.5")
NEVER = ("tensor", "deepspeed")
"""Options that reject quantized matrices."""
CASES = [
    pytest.param(
        name,
        strategy,
        marks=(*marks(strategy), *(() if strategy in USUAL[name] else (pytest.mark.exhaustive,))),
    )
    for name in QUANTIZATIONS
    for strategy in (STRATEGIES if name == "nf4" else ("ddp", "fsdp", "pipeline_one_f_one_b"))
    if not any(never in strategy for never in NEVER)
]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_quantized_training_under_each_strategy_equals_one_device(
    name: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    overrides = (*LORA, *QUANTIZATIONS[name])
    run = train_strategy(
        STRATEGIES[strategy], "accumulated", JobRunner(tmp_path, shared_cache), *overrides
    )
    assert_same_training(run, reference_run("accumulated", *overrides))


@pytest.mark.parametrize("name", EACH)
def test_quantized_weights_stay_and_the_adapter_trains(
    name: str, reference_run: ReferenceRun
) -> None:
    overrides = (*LORA, *QUANTIZATIONS[name])
    run, spec = (
        reference_run("accumulated", *overrides),
        compose([*TINY_DECODER, *LLAMA, *overrides]),
    )
    held = {key.removeprefix("model."): tensor for key, tensor in run.weights().items()}
    assert held.keys() == {weight.name for weight in spec.weight_census()}
    trained = {weight.name for weight in spec.weight_census() if weight.trainable}
    assert {key.removeprefix("model.") for key in load_gradients(run, 2)} == trained
    first = SingleDevice(DeviceKind.cpu).build(spec)
    for key, tensor in first.named_parameters():
        key = key.replace(".base_layer.", ".")
        assert torch.equal(held[key], tensor) == (key not in trained), key


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_quantized_parameter_shapes_equal_the_module(name: str, shape: tuple[str, ...]) -> None:
    spec = compose([*TINY_DECODER, *shape, *LORA, *QUANTIZATIONS[name]])
    found = {
        key.replace(".base_layer.", "."): (tuple(held.shape), held.nbytes, held.requires_grad)
        for key, held in SingleDevice(DeviceKind.cpu).build(spec).named_parameters()
    }
    assert found == {w.name: (w.shape, w.shard_bytes(4), w.trainable) for w in spec.weight_census()}


def theirs(
    packing: FourBitConfig | Int8Config, matrix: Tensor, bias: Tensor | None
) -> torch.nn.Linear:
    """Returns bitsandbytes' own layer of a matrix."""
    out, into = matrix.shape
    layer: torch.nn.Linear
    if isinstance(packing, Int8Config):
        layer = bnb.nn.Linear8bitLt(
            into, out, bias=bias is not None, has_fp16_weights=False, threshold=packing.threshold
        )
        layer.weight = bnb.nn.Int8Params(matrix, requires_grad=False, has_fp16_weights=False)
    else:
        kind = {"quant_type": packing.code, "compress_statistics": packing.double}
        layer = bnb.nn.Linear4bit(
            into, out, bias=bias is not None, compute_dtype=torch.float32, **kind
        )
        layer.weight = bnb.nn.Params4bit(matrix, requires_grad=False, **kind)
    layer = layer.to("cpu")
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


PACKINGS = [
    NF4Config(),
    NF4Config(double=False),
    FP4Config(),
    FP4Config(double=False),
    Int8Config(),
]


def packed(
    packing: FourBitConfig | Int8Config, matrix: Tensor, bias: Tensor | None = None
) -> PackedLinear:
    out, into = matrix.shape
    layer = build_packed_linear(packing, into, out, bias=bias is not None).to_empty(device="cpu")
    layer.pack(matrix)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


@pytest.fixture
def matrix() -> Tensor:
    """A matrix of which neither blocks nor scales come out even."""
    return torch.randn(136, 250, generator=torch.Generator().manual_seed(7)) / 16


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_quantized_matmuls_and_gradients_equal_bitsandbytes(
    packing: FourBitConfig | Int8Config, matrix: Tensor
) -> None:
    bias, x = torch.randn(136), torch.randn(3, 5, 250)
    found = []
    for layer in (packed(packing, matrix, bias), theirs(packing, matrix, bias)):
        given = x.clone().requires_grad_()
        product = layer(given)
        product.pow(2).sum().backward()
        assert given.grad is not None
        found.append((product.detach(), given.grad))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_quantized_bytes_equal_bitsandbytes(
    packing: FourBitConfig | Int8Config, matrix: Tensor
) -> None:
    layer = theirs(packing, matrix, None)
    held = [tensor for key, tensor in layer.state_dict().items() if not key.endswith("_map")]
    held = [tensor for tensor in held if tensor.numel() > 1]
    if isinstance(packing, FourBitConfig):  # what is no tensor lies packed as text
        held = [held[0], *(t for k, t in layer.state_dict().items() if k.endswith("absmax"))]
        offset = 4 * packing.double
    else:
        offset = 0
    actual = sum(parameter.nbytes for parameter in packed(packing, matrix).parameters())
    assert actual == sum(tensor.nbytes for tensor in held) + offset


def test_quantization_error_decreases_with_bits(matrix: Tensor) -> None:
    """NF4 is made for normal numbers: a tenth of their deviation (QLoRA, section 3)."""
    errors = {
        name: float((packed(packing, matrix).unpack(torch.float32) - matrix).norm() / matrix.norm())
        for name, packing in {"nf4": NF4Config(), "fp4": FP4Config(), "int8": Int8Config()}.items()
    }
    assert errors["int8"] < 0.01 < errors["nf4"] < 0.11 < errors["fp4"] < 0.16


class LargestResult(TorchDispatchMode):
    """Number of tensors that the operator with the most results returns."""

    tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors = max(self.tensors, len(tree_leaves(result)))
        return result


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_unpacking_creates_no_tensor_per_block(packing: FourBitConfig | Int8Config) -> None:
    """A tensor that is iterated is unbound into views, which took 2 ms of host time per matrix."""
    layer = packed(packing, torch.randn(1024, 512))
    with LargestResult() as results:
        layer.unpack(torch.float32)
    assert results.tensors == 1


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_int8_matmul_equals_bitsandbytes(threshold: float, matrix: Tensor) -> None:
    """What CUDA runs; here with the operators that stand for its kernels."""
    packing = Int8Config(threshold=threshold)
    actual, expected = packed(packing, matrix), theirs(packing, matrix, None).eval()
    assert isinstance(actual, Int8Linear)
    x = torch.randn(2, 8, 250, generator=torch.Generator().manual_seed(3))
    x[..., 11] *= 30  # a feature of outliers
    with torch.no_grad():
        found = actual.int8_matmul(x)
        torch.testing.assert_close(found, expected(x), rtol=1e-5, atol=1e-5)
        error = float((found - x @ matrix.T).norm() / (x @ matrix.T).norm())
    assert (error < 0.02) == (threshold > 0)


def test_quantized_matmul_uses_the_autocast_dtype(matrix: Tensor) -> None:
    layer, x = packed(NF4Config(), matrix), torch.randn(4, 250, requires_grad=True)
    assert isinstance(layer, FourBitLinear)
    with torch.autocast("cpu", torch.bfloat16):
        product = layer(x)
    assert product.dtype == torch.bfloat16
    product.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    expected = x @ layer.unpack(torch.float32).T
    torch.testing.assert_close(product.float(), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("name", EACH)
def test_quantized_evaluation_reports_the_fp32_loss(
    name: str, reference_run: ReferenceRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = reference_run("accumulated", *LORA, *QUANTIZATIONS[name], *TEXT)
    found = {}
    for step in ("3", "0"):
        assert cli.main(["evaluate", str(run.path), f"step={step}"]) == 0, step
        found[step] = json.loads((run.path / "evaluation.json").read_text("utf-8"))[step]
    assert "quantized weights: " in capsys.readouterr().out
    assert found["3"]["loss"] == pytest.approx(float(run.metrics[-1]["val/loss"]), rel=1e-5)
    held = compose([*TINY_DECODER, *LLAMA, *LORA, *QUANTIZATIONS[name]]).weight_census()
    assert found["3"]["packed_bytes"] == sum(
        weight.shard_bytes(4) for weight in held if weight.element_bytes
    )
    never_packed = reference_run("accumulated", *LORA, *TEXT)
    assert cli.main(["evaluate", str(never_packed.path), "step=0"]) == 0
    began = json.loads((never_packed.path / "evaluation.json").read_text("utf-8"))["0"]
    assert found["0"]["loss_in_fp32"] == pytest.approx(began["loss"], rel=1e-6)
    assert found["0"]["loss"] != began["loss"]
