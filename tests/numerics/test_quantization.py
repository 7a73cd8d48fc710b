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
CI_STRATEGIES = {
    "nf4": ("fsdp",),
    "fp4": (),
    "int8": (),
}
QUANTIZATION_PARAMS = [
    "nf4",
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("fp4", "int8")),
]
TEXT = ("data=corpus", "data.vocabulary=300", "model.vocabulary=300", "data.megabytes=0.5")
UNSUPPORTED_STRATEGIES = ("tensor", "deepspeed")
"""Strategies that reject quantized matrices."""
CASES = [
    pytest.param(
        name,
        strategy,
        marks=(
            *marks(strategy),
            *(() if strategy in CI_STRATEGIES[name] else (pytest.mark.exhaustive,)),
        ),
    )
    for name in QUANTIZATIONS
    for strategy in (STRATEGIES if name == "nf4" else ("ddp", "fsdp", "pipeline_one_f_one_b"))
    if not any(unsupported in strategy for unsupported in UNSUPPORTED_STRATEGIES)
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


@pytest.mark.parametrize("name", QUANTIZATION_PARAMS)
def test_quantized_weights_stay_and_the_adapter_trains(
    name: str, reference_run: ReferenceRun
) -> None:
    overrides = (*LORA, *QUANTIZATIONS[name])
    run, spec = (
        reference_run("accumulated", *overrides),
        compose([*TINY_DECODER, *LLAMA, *overrides]),
    )
    weights = {key.removeprefix("model."): tensor for key, tensor in run.weights().items()}
    assert weights.keys() == {weight.name for weight in spec.weight_census()}
    trainable_names = {weight.name for weight in spec.weight_census() if weight.trainable}
    assert {key.removeprefix("model.") for key in load_gradients(run, 2)} == trainable_names
    first = SingleDevice(DeviceKind.cpu).build(spec)
    for key, tensor in first.named_parameters():
        key = key.replace(".base_layer.", ".")
        assert torch.equal(weights[key], tensor) == (key not in trainable_names), key


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_quantized_parameter_shapes_equal_the_module(name: str, shape: tuple[str, ...]) -> None:
    spec = compose([*TINY_DECODER, *shape, *LORA, *QUANTIZATIONS[name]])
    actual = {
        key.replace(".base_layer.", "."): (
            tuple(parameter.shape),
            parameter.nbytes,
            parameter.requires_grad,
        )
        for key, parameter in SingleDevice(DeviceKind.cpu).build(spec).named_parameters()
    }
    assert actual == {
        w.name: (w.shape, w.shard_bytes(4), w.trainable) for w in spec.weight_census()
    }


def bitsandbytes_layer(
    packing: FourBitConfig | Int8Config, matrix: Tensor, bias: Tensor | None
) -> torch.nn.Linear:
    """bitsandbytes layer of a matrix."""
    out_features, in_features = matrix.shape
    layer: torch.nn.Linear
    if isinstance(packing, Int8Config):
        layer = bnb.nn.Linear8bitLt(
            in_features,
            out_features,
            bias=bias is not None,
            has_fp16_weights=False,
            threshold=packing.threshold,
        )
        layer.weight = bnb.nn.Int8Params(matrix, requires_grad=False, has_fp16_weights=False)
    else:
        kind = {"quant_type": packing.code, "compress_statistics": packing.double}
        layer = bnb.nn.Linear4bit(
            in_features, out_features, bias=bias is not None, compute_dtype=torch.float32, **kind
        )
        layer.weight = bnb.nn.Params4bit(matrix, requires_grad=False, **kind)
    layer = layer.to("cpu")
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


QUANTIZATION_CONFIGS = [
    NF4Config(),
    NF4Config(double=False),
    FP4Config(),
    FP4Config(double=False),
    Int8Config(),
]


def packed_layer(
    packing: FourBitConfig | Int8Config, matrix: Tensor, bias: Tensor | None = None
) -> PackedLinear:
    out_features, in_features = matrix.shape
    layer = build_packed_linear(packing, in_features, out_features, bias=bias is not None).to_empty(
        device="cpu"
    )
    layer.pack(matrix)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


@pytest.fixture
def matrix() -> Tensor:
    """Matrix whose size is no multiple of the block sizes."""
    return torch.randn(136, 250, generator=torch.Generator().manual_seed(7)) / 16


@pytest.mark.parametrize("packing", QUANTIZATION_CONFIGS, ids=str)
def test_quantized_matmuls_and_gradients_equal_bitsandbytes(
    packing: FourBitConfig | Int8Config, matrix: Tensor
) -> None:
    bias, x = torch.randn(136), torch.randn(3, 5, 250)
    results = []
    for layer in (packed_layer(packing, matrix, bias), bitsandbytes_layer(packing, matrix, bias)):
        input_tensor = x.clone().requires_grad_()
        product = layer(input_tensor)
        product.pow(2).sum().backward()
        assert input_tensor.grad is not None
        results.append((product.detach(), input_tensor.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", QUANTIZATION_CONFIGS, ids=str)
def test_quantized_bytes_equal_bitsandbytes(
    packing: FourBitConfig | Int8Config, matrix: Tensor
) -> None:
    layer = bitsandbytes_layer(packing, matrix, None)
    stored_tensors = [
        tensor for key, tensor in layer.state_dict().items() if not key.endswith("_map")
    ]
    stored_tensors = [tensor for tensor in stored_tensors if tensor.numel() > 1]
    if isinstance(packing, FourBitConfig):  # non-tensor state is packed as text
        stored_tensors = [
            stored_tensors[0],
            *(t for k, t in layer.state_dict().items() if k.endswith("absmax")),
        ]
        offset = 4 * packing.double
    else:
        offset = 0
    actual = sum(parameter.nbytes for parameter in packed_layer(packing, matrix).parameters())
    assert actual == sum(tensor.nbytes for tensor in stored_tensors) + offset


def test_quantization_error_decreases_with_bits(matrix: Tensor) -> None:
    """NF4 assumes normal values: error of a tenth of their deviation (QLoRA, section 3)."""
    errors = {
        name: float(
            (packed_layer(packing, matrix).unpack(torch.float32) - matrix).norm() / matrix.norm()
        )
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


@pytest.mark.parametrize("packing", QUANTIZATION_CONFIGS, ids=str)
def test_unpacking_creates_no_tensor_per_block(packing: FourBitConfig | Int8Config) -> None:
    """A tensor that is iterated is unbound into views, which took 2 ms of host time per matrix."""
    layer = packed_layer(packing, torch.randn(1024, 512))
    with LargestResult() as results:
        layer.unpack(torch.float32)
    assert results.tensors == 1


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_int8_matmul_equals_bitsandbytes(threshold: float, matrix: Tensor) -> None:
    """Runs the CUDA path with operators that replace its kernels."""
    packing = Int8Config(threshold=threshold)
    actual, expected = (
        packed_layer(packing, matrix),
        bitsandbytes_layer(packing, matrix, None).eval(),
    )
    assert isinstance(actual, Int8Linear)
    x = torch.randn(2, 8, 250, generator=torch.Generator().manual_seed(3))
    x[..., 11] *= 30  # a feature of outliers
    with torch.no_grad():
        product = actual.int8_matmul(x)
        torch.testing.assert_close(product, expected(x), rtol=1e-5, atol=1e-5)
        error = float((product - x @ matrix.T).norm() / (x @ matrix.T).norm())
    assert (error < 0.02) == (threshold > 0)


def test_quantized_matmul_uses_the_autocast_dtype(matrix: Tensor) -> None:
    layer, x = packed_layer(NF4Config(), matrix), torch.randn(4, 250, requires_grad=True)
    assert isinstance(layer, FourBitLinear)
    with torch.autocast("cpu", torch.bfloat16):
        product = layer(x)
    assert product.dtype == torch.bfloat16
    product.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    expected = x @ layer.unpack(torch.float32).T
    torch.testing.assert_close(product.float(), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("name", QUANTIZATION_PARAMS)
def test_quantized_evaluation_reports_the_fp32_loss(
    name: str, reference_run: ReferenceRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = reference_run("accumulated", *LORA, *QUANTIZATIONS[name], *TEXT)
    losses = {}
    for step in ("3", "0"):
        assert cli.main(["evaluate", str(run.path), f"step={step}"]) == 0, step
        losses[step] = json.loads((run.path / "evaluation.json").read_text("utf-8"))[step]
    assert "quantized weights: " in capsys.readouterr().out
    assert losses["3"]["loss"] == pytest.approx(float(run.metrics[-1]["val/loss"]), rel=1e-5)
    census = compose([*TINY_DECODER, *LLAMA, *LORA, *QUANTIZATIONS[name]]).weight_census()
    assert losses["3"]["packed_bytes"] == sum(
        weight.shard_bytes(4) for weight in census if weight.element_bytes
    )
    unquantized_run = reference_run("accumulated", *LORA, *TEXT)
    assert cli.main(["evaluate", str(unquantized_run.path), "step=0"]) == 0
    untrained = json.loads((unquantized_run.path / "evaluation.json").read_text("utf-8"))["0"]
    assert losses["0"]["loss_in_fp32"] == pytest.approx(untrained["loss"], rel=1e-6)
    assert losses["0"]["loss"] != untrained["loss"]
