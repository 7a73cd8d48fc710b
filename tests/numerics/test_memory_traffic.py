"""Memory traffic of elementwise kernels in plans, compared with torch's eager operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from scalewise import compose
from scalewise.compat.torch import TorchDispatchMode
from scalewise.models.linear_ops import EAGER_FP8_CAST_BYTES
from scalewise.models.op_graph import OpWork
from scalewise.objectives.config import CausalLM
from scalewise.objectives.losses import chunked_loss
from scalewise.planner.activation_liveness import model_op_graphs
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.precision.config import ScalingRecipe

CAST_OPERATORS = ("abs", "max", "amax", "clamp", "mul", "_to_copy")
"""Operators of torchao's casts; others emulate the fp8 matmul on the CPU."""


class TrafficCounter(TorchDispatchMode):
    """Counts the bytes that operators read and write, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any("Float8" in each.__name__ for each in types):
            return NotImplemented  # its operators on plain tensors follow
        output = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, output)) if isinstance(x, torch.Tensor)]
        self.traffic[function.overloadpacket.__name__] += sum(x.nbytes for x in tensors)
        return output

    def count(self, *names: str) -> int:
        """Bytes of the operators with these names."""
        return sum(self.traffic[name] for name in names)


@pytest.mark.parametrize("recipe", ScalingRecipe)
def test_eager_fp8_casts_move_the_planned_bytes(recipe: ScalingRecipe) -> None:
    tokens, inputs, outputs = 1024, 256, 512
    config = replace(Float8LinearConfig.from_recipe_name(recipe.value), emulate=True)
    module = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    convert_to_float8_training(module, config=config)
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
    forward, backward = TrafficCounter(), TrafficCounter()
    with torch.autocast("cpu", torch.bfloat16), forward:
        y = module(x)
    with backward:
        y.backward(torch.ones_like(y))
    operands = x.numel() + inputs * outputs
    counted = forward.count(*CAST_OPERATORS), backward.count(*CAST_OPERATORS)
    assert counted[0] == pytest.approx(EAGER_FP8_CAST_BYTES * operands, rel=0.02)
    gradient_cast = 6 * inputs * outputs  # bf16 weight gradient to fp32
    planned = EAGER_FP8_CAST_BYTES * (operands + 2 * y.numel()) + gradient_cast
    assert counted[1] == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_chunked_loss_moves_the_planned_bytes(chunk: int) -> None:
    run = compose(
        [
            *("model=llama_160m", "model.width=64", "model.heads=2", "model.feedforward=64"),
            *("model.vocabulary=4096", "data=synthetic", "data.sequence=512", "compile=none"),
            *("trainer.micro_batch=1", f"objective.loss_chunk={chunk}", "precision=bf16_mixed"),
            *("tracking=none", "hardware=h100"),
        ],
        check_machine=False,
    )
    (planned,) = (
        operator.elementwise_bytes
        for operator in model_op_graphs(
            run.model, build_rank_memory(run.parallelism, run).forward_spec
        ).head.operators
        if operator.work is OpWork.matmul
    )
    head = nn.Linear(64, 4096, bias=False)
    x = torch.randn(1, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(4096, (1, 512))
    forward, backward = TrafficCounter(), TrafficCounter()
    with torch.autocast("cpu", torch.bfloat16), forward:
        loss = chunked_loss(CausalLM(chunk), head.parameters)(head, x, labels)
    with backward:
        loss.backward()
    names = ("_to_copy", "add_", "_log_softmax", "_log_softmax_backward_data")
    # The kernel writes a gradient, but does not read the probabilities that it is given.
    counted = forward.count(*names) + forward.count("nll_loss_backward") / 2
    assert planned[0] == pytest.approx(counted, rel=0.02)
    assert planned[1] == pytest.approx(backward.count("mul_"), rel=0.02)
