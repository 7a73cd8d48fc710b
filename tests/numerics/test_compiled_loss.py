"""Loss that is compiled, compared with the eager one: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.strategies import LLAMA, TINY_DECODER
from torch import Tensor, nn

from scalewise import compose
from scalewise.compat.torch import (
    iter_allocations,
    start_allocation_profiler,
    stop_allocation_profiler,
)
from scalewise.hardware import DeviceKind
from scalewise.models.loss_ops import cross_entropy_ops
from scalewise.models.op_graph import ForwardSpec
from scalewise.objectives import losses
from scalewise.objectives.config import IGNORED, CausalLM, ObjectiveConfig
from scalewise.objectives.losses import chunked_loss, token_sums_function
from scalewise.planner.activation_liveness import simulate_part
from scalewise.strategies.base import ParallelStrategy, ScaledLoss
from scalewise.strategies.single import SingleDevice
from scalewise.torch_compile import Compile, CompileBackend, CompileScope
from scalewise.training.lightning_module import TrainingModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # raised in Dynamo
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

TRACED = Compile(CompileScope.block, CompileBackend.aot_eager)
BATCH_SIZE, TOKENS, VOCABULARY, WIDTH = 2, 24, 320, 16


@pytest.fixture(autouse=True)
def clear_compiled_functions() -> None:
    """Clear compiled functions: torch runs one eagerly after eight recompilations."""
    torch.compiler.reset()


def sample_labels() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCABULARY, (BATCH_SIZE, TOKENS), generator=generator)
    labels[0, :3] = IGNORED
    return labels


@pytest.mark.parametrize(
    "objective", [CausalLM(), CausalLM(label_smoothing=0.1), CausalLM(z_loss=0.1)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_loss_equals_eager_loss(objective: ObjectiveConfig, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(BATCH_SIZE, TOKENS, VOCABULARY, generator=generator).to(dtype)
    results = []
    for compile_config in (None, TRACED):
        leaf = logits.clone().requires_grad_()
        token_sums_function(objective, compile_config)(leaf, sample_labels()).backward()
        results.append(leaf.grad)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("in_forward", [True, False])
def test_compiled_chunks_equal_eager_chunks(*, in_forward: bool) -> None:
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    x_BTW = torch.randn(BATCH_SIZE, TOKENS, WIDTH)
    results = []
    for compile_config in (None, TRACED):
        leaf_BTW = x_BTW.clone().requires_grad_()
        head.weight.grad = None
        weights = head.parameters if in_forward else None
        loss = chunked_loss(CausalLM(16), weights, compile_config)(head, leaf_BTW, sample_labels())
        loss.backward()
        results.append((loss.detach(), leaf_BTW.grad, head.weight.grad))
    torch.testing.assert_close(results[1], results[0])


def test_loss_is_compiled_once_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_function(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_function)
    token_sums_function.cache_clear()
    logits, labels = torch.randn(BATCH_SIZE, TOKENS, VOCABULARY), sample_labels()
    for factor in (1.0, 2.0):
        ScaledLoss(CausalLM(), factor, TRACED)(logits, {"labels": labels})
        ScaledLoss(CausalLM(), factor)(logits, {"labels": labels})
    token_sums_function.cache_clear()
    assert compiled == [{"backend": "aot_eager", "dynamic": False}]


COMPILED_RUNS = [
    (("compile=block", "hardware=h100"), True),
    (("compile=whole", "hardware=h100"), True),
    (("compile=none", "hardware=h100"), False),
    (("compile=block", "hardware=cpu"), False),
    (("compile=block", "hardware=h100", "parallelism=fsdp"), True),
    (("compile=block", "hardware=h100", "parallelism=tensor", "parallelism.tensor=2"), False),
]


@pytest.mark.parametrize(("overrides", "expected"), COMPILED_RUNS)
def test_loss_is_compiled_on_cuda_with_a_compiled_model(
    overrides: tuple[str, ...], expected: bool
) -> None:
    run = compose([*TINY_DECODER, *LLAMA, *overrides], check_machine=False)
    assert run.loss_compile == (run.compile if expected else None)


def test_training_step_passes_the_config_of_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compose([*TINY_DECODER, *LLAMA, "compile=block", "hardware=h100"], check_machine=False)
    seen: list[ScaledLoss] = []

    class RecordingStrategy(SingleDevice):
        def compute_train_loss(
            self, module: nn.Module, batch: Any, loss: ScaledLoss, *, last: bool
        ) -> Tensor:
            seen.append(loss)
            return torch.zeros(())

    module = TrainingModule(run, steps=1)
    strategy: ParallelStrategy = RecordingStrategy(DeviceKind.cpu)
    monkeypatch.setattr(TrainingModule, "parallel_strategy", strategy)
    module.model = nn.Linear(1, 1)
    module.training_step({"labels": sample_labels()}, 0)
    assert [loss.compile_config for loss in seen] == [run.compile]


def test_chunked_loss_of_a_compiled_run_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("compile=block", "objective.loss_chunk=16", "hardware=h100")
    run = compose([*TINY_DECODER, *LLAMA, *overrides], check_machine=False)
    configs: list[Compile | None] = []
    bind = losses.token_sums_function

    def record(objective: ObjectiveConfig, compile_config: Compile | None) -> Any:
        configs.append(compile_config)
        return bind(objective, None)

    monkeypatch.setattr(losses, "token_sums_function", record)
    module: Any = SingleDevice(DeviceKind.cpu).build(run)
    width = run.model.width
    labels = sample_labels().clamp(max=run.model.vocabulary - 1)
    loss = module.loss(module.logits, torch.randn(2, TOKENS, width), labels)
    assert configs == [run.compile]
    assert loss.ndim == 0


def peak_bytes(events: list[Any]) -> int:
    current = peak = 0
    for _, _, _, size in sorted(iter_allocations(events)):
        current += size
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_loss_memory_equals_prediction(dtype: torch.dtype, z_loss: float) -> None:
    tokens, vocabulary = 256, 4096
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1, tokens, vocabulary, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (1, tokens), generator=generator)
    function = token_sums_function(CausalLM(z_loss=z_loss), Compile(CompileScope.block))
    function(logits, labels).backward()  # compiles
    logits.grad = None
    start_allocation_profiler()
    loss = function(logits, labels)
    forward = peak_bytes(stop_allocation_profiler())
    start_allocation_profiler()
    loss.backward()
    backward = peak_bytes(stop_allocation_profiler())
    spec = ForwardSpec(
        *(1, tokens, 4, dtype.itemsize, 4), autocast=False, on_cpu=False, is_loss_compiled=True
    )
    predicted = simulate_part(cross_entropy_ops(spec, vocabulary), fresh_gradients=True)
    assert predicted.forward_peak == pytest.approx(logits.nbytes + forward, rel=0.01)
    assert predicted.backward_peak == pytest.approx(logits.nbytes + forward + backward, rel=0.01)
