"""Head and loss in chunks of tokens, compared with the full loss.

Shape suffixes: B batch, T tokens, W width, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalewise.compat.torch import TorchDispatchMode
from scalewise.measure.allocated_bytes import LiveBytes
from scalewise.objectives.config import IGNORED, CausalLM
from scalewise.objectives.losses import chunked_loss, sum_over_tokens

BATCH_SIZE, WIDTH = 2, 128


@dataclass
class Case:
    """Input, head and labels of a loss."""

    head: nn.Linear
    x_BTW: Tensor  # noqa: N815
    labels_BT: Tensor  # noqa: N815

    def take(self, *, chunk: int | None, in_forward: bool = True, **options: float) -> Tensor:
        """Compute the loss and its gradients, and return the loss."""
        objective = CausalLM(chunk, **options)
        if chunk is None:
            loss = sum_over_tokens(objective, self.head(self.x_BTW), self.labels_BT)
        else:
            weights = self.head.parameters if in_forward else None
            loss = chunked_loss(objective, weights)(self.head, self.x_BTW, self.labels_BT)
        (loss / 7).backward()
        return loss.detach()

    def taken(self) -> list[Tensor | None]:
        """Return the gradients and clear them."""
        inputs = [self.x_BTW, self.head.weight]
        gradients = [leaf.grad for leaf in inputs]
        for leaf in inputs:
            leaf.grad = None
        return gradients


@pytest.fixture
def make_case() -> Callable[[int, int], Case]:
    def build_case(tokens: int, vocabulary: int) -> Case:
        generator = torch.Generator().manual_seed(1)
        head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(head.weight, 0, 0.05, generator=generator)
        x_BTW = torch.randn(BATCH_SIZE, tokens, WIDTH, generator=generator).requires_grad_()
        labels_BT = torch.randint(vocabulary, (BATCH_SIZE, tokens), generator=generator)
        labels_BT[0, :3] = IGNORED
        return Case(head, x_BTW, labels_BT)

    return build_case


@pytest.fixture
def one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", [1, 24, 40, 1000])
@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1}], ids=str)
def test_chunked_loss_gradients_equal_full_loss(
    make_case: Callable[[int, int], Case], chunk: int, in_forward: bool, options: dict[str, float]
) -> None:
    case = make_case(50, 300)
    expected, gradients = case.take(chunk=None, **options), case.taken()
    loss = case.take(chunk=chunk, in_forward=in_forward, **options)
    torch.testing.assert_close((loss, case.taken()), (expected, gradients))


@pytest.mark.parametrize("frozen", ["head", "x"])
def test_chunked_loss_leaves_frozen_parameters_without_gradient(
    make_case: Callable[[int, int], Case], frozen: str
) -> None:
    case = make_case(50, 300)
    {"head": case.head.weight, "x": case.x_BTW}[frozen].requires_grad_(False)
    expected, gradients = case.take(chunk=None), case.taken()
    assert [gradient is None for gradient in gradients] == [frozen == "x", frozen == "head"]
    torch.testing.assert_close((case.take(chunk=24), case.taken()), (expected, gradients))


def test_chunked_loss_without_grad_computes_no_gradient(
    make_case: Callable[[int, int], Case],
) -> None:
    case = make_case(50, 300)
    objective, weights = CausalLM(24), case.head.parameters
    with torch.no_grad():
        loss = chunked_loss(objective, weights)(case.head, case.x_BTW, case.labels_BT)
    torch.testing.assert_close(loss, case.take(chunk=None))
    assert not loss.requires_grad


def test_chunked_loss_rejects_a_second_backward(make_case: Callable[[int, int], Case]) -> None:
    """Backward scales the saved gradients in place, which a second call would repeat."""
    case = make_case(50, 300)
    weights = case.head.parameters
    loss = chunked_loss(CausalLM(24), weights)(case.head, case.x_BTW, case.labels_BT)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_chunked_loss_in_mixed_precision_is_close(make_case: Callable[[int, int], Case]) -> None:
    case = make_case(50, 300)
    case.take(chunk=None)
    exact_gradients = case.taken()
    errors = []
    for chunk in (None, 24):
        with torch.autocast("cpu", torch.bfloat16):
            case.take(chunk=chunk)
        pairs = zip(case.taken(), exact_gradients, strict=True)
        errors.append([float((a - b).norm() / b.norm()) for a, b in pairs])
    full_loss_error, chunks = errors
    assert max(full_loss_error) < 0.01
    assert all(chunk < 1.05 * error for chunk, error in zip(chunks, full_loss_error, strict=True))


class HeadCasts(TorchDispatchMode):
    """Number of casts of the head to bf16."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape == (300, WIDTH):
            self.count += result.dtype is torch.bfloat16
        return result


@pytest.mark.parametrize("trains", [True, False])
def test_chunked_loss_casts_the_head_once(
    make_case: Callable[[int, int], Case], trains: bool
) -> None:
    """Under the autocast of Lightning, which does not cache casts; gradients are the same."""
    case = make_case(50, 300)
    losses = []
    for chunk in (24, 1000):
        with (
            torch.set_grad_enabled(trains),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
            HeadCasts() as casts,
        ):
            objective, weights = CausalLM(chunk), case.head.parameters
            loss = chunked_loss(objective, weights)(case.head, case.x_BTW, case.labels_BT)
            assert casts.count == 1
            case.head(case.x_BTW)
            assert casts.count == 2
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


TOKENS, VOCABULARY, CHUNK_SIZE = 2048, 32_000, 128


def test_chunked_loss_stores_few_logits_at_a_time(make_case: Callable[[int, int], Case]) -> None:
    """Besides the gradients, at most a fifth of the logits."""
    case = make_case(TOKENS, VOCABULARY)
    logits = BATCH_SIZE * TOKENS * VOCABULARY * 4
    peak_bytes = {}
    for chunk in (None, CHUNK_SIZE):
        with LiveBytes() as live_bytes:
            case.take(chunk=chunk)
            gradients = sum(gradient.nbytes for gradient in case.taken() if gradient is not None)
            peak_bytes[chunk] = (live_bytes.take_peak() - gradients) / logits
    full, chunked = peak_bytes[None], peak_bytes[CHUNK_SIZE]
    print(f"without gradients {full:.2f} of the logits, in chunks {chunked:.2f}")
    assert peak_bytes[None] > 2
    assert peak_bytes[CHUNK_SIZE] < 0.2


@pytest.mark.timed
@pytest.mark.usefixtures("one_core")
def test_chunked_loss_is_as_fast_as_the_full_loss(make_case: Callable[[int, int], Case]) -> None:
    case = make_case(TOKENS, VOCABULARY)
    ratios = []
    for _ in range(5):  # alternating
        seconds = []
        for chunk in (None, CHUNK_SIZE):
            start = time.process_time()
            case.take(chunk=chunk)
            seconds.append(time.process_time() - start)
            case.taken()
        ratios.append(seconds[1] / seconds[0])
    print(f"{statistics.median(ratios):.2f} of the time, {min(ratios):.2f} to {max(ratios):.2f}")
    assert statistics.median(ratios) <= 1.10
