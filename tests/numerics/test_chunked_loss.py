"""Head and loss in chunks of tokens, compared with both of all tokens at once.

Shape suffixes: B rows, T tokens, W width, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from scalewise.measure.memory import LiveBytes
from scalewise.objectives.config import IGNORED, CausalLM
from scalewise.objectives.losses import chunked_loss, sum_over_tokens

ROWS, WIDTH = 2, 128


@dataclass
class Case:
    """What a model ends in, and what is asked of it."""

    head: nn.Linear
    x_BTW: Tensor  # noqa: N815
    labels_BT: Tensor  # noqa: N815

    def take(self, *, chunk: int | None, in_forward: bool = True, smoothing: float = 0.0) -> Tensor:
        """The loss, gone backward from."""
        objective = CausalLM(chunk, label_smoothing=smoothing)
        if chunk is None:
            loss = sum_over_tokens(objective, self.head(self.x_BTW), self.labels_BT)
        else:
            weights = self.head.parameters if in_forward else None
            loss = chunked_loss(objective, weights)(self.head, self.x_BTW, self.labels_BT)
        (loss / 7).backward()
        return loss.detach()

    def taken(self) -> list[Tensor | None]:
        """The gradients, and leaves none."""
        leaves = [self.x_BTW, self.head.weight]
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found


@pytest.fixture
def make_case() -> Callable[[int, int], Case]:
    def made(tokens: int, vocabulary: int) -> Case:
        generator = torch.Generator().manual_seed(1)
        head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(head.weight, 0, 0.05, generator=generator)
        x_BTW = torch.randn(ROWS, tokens, WIDTH, generator=generator).requires_grad_()
        labels_BT = torch.randint(vocabulary, (ROWS, tokens), generator=generator)
        labels_BT[0, :3] = IGNORED
        return Case(head, x_BTW, labels_BT)

    return made


@pytest.fixture
def one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", [1, 24, 40, 1000])
@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunked_loss_gradients_equal_full_loss(
    make_case: Callable[[int, int], Case], chunk: int, in_forward: bool, smoothing: float
) -> None:
    asked = make_case(50, 300)
    expected, gradients = asked.take(chunk=None, smoothing=smoothing), asked.taken()
    loss = asked.take(chunk=chunk, in_forward=in_forward, smoothing=smoothing)
    torch.testing.assert_close((loss, asked.taken()), (expected, gradients))


@pytest.mark.parametrize("frozen", ["head", "x"])
def test_chunked_loss_leaves_frozen_parameters_without_gradient(
    make_case: Callable[[int, int], Case], frozen: str
) -> None:
    asked = make_case(50, 300)
    {"head": asked.head.weight, "x": asked.x_BTW}[frozen].requires_grad_(False)
    expected, gradients = asked.take(chunk=None), asked.taken()
    assert [gradient is None for gradient in gradients] == [frozen == "x", frozen == "head"]
    torch.testing.assert_close((asked.take(chunk=24), asked.taken()), (expected, gradients))


def test_chunked_loss_without_grad_computes_no_gradient(
    make_case: Callable[[int, int], Case],
) -> None:
    asked = make_case(50, 300)
    objective, weights = CausalLM(24), asked.head.parameters
    with torch.no_grad():
        loss = chunked_loss(objective, weights)(asked.head, asked.x_BTW, asked.labels_BT)
    torch.testing.assert_close(loss, asked.take(chunk=None))
    assert not loss.requires_grad


def test_chunked_loss_rejects_a_second_backward(make_case: Callable[[int, int], Case]) -> None:
    """Backward scales what forward kept in place; a second time would do so twice."""
    asked = make_case(50, 300)
    weights = asked.head.parameters
    loss = chunked_loss(CausalLM(24), weights)(asked.head, asked.x_BTW, asked.labels_BT)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_chunked_loss_in_mixed_precision_is_close(make_case: Callable[[int, int], Case]) -> None:
    asked = make_case(50, 300)
    asked.take(chunk=None)
    exact = asked.taken()
    errors = []
    for chunk in (None, 24):
        with torch.autocast("cpu", torch.bfloat16):
            asked.take(chunk=chunk)
        pairs = zip(asked.taken(), exact, strict=True)
        errors.append([float((a - b).norm() / b.norm()) for a, b in pairs])
    whole, chunks = errors
    assert max(whole) < 0.01
    assert all(chunk < 1.05 * error for chunk, error in zip(chunks, whole, strict=True))


TOKENS, VOCABULARY, CHUNK = 2048, 32_000, 128


def test_chunked_loss_stores_few_logits_at_a_time(make_case: Callable[[int, int], Case]) -> None:
    """Beside the gradients that any way ends with, at most a fifth of the logits."""
    asked = make_case(TOKENS, VOCABULARY)
    logits = ROWS * TOKENS * VOCABULARY * 4
    most = {}
    for chunk in (None, CHUNK):
        with LiveBytes() as live:
            asked.take(chunk=chunk)
            gradients = sum(gradient.nbytes for gradient in asked.taken() if gradient is not None)
            most[chunk] = (live.take_peak() - gradients) / logits
    print(f"beside gradients {most[None]:.2f} of the logits, in chunks {most[CHUNK]:.2f}")
    assert most[None] > 2
    assert most[CHUNK] < 0.2


@pytest.mark.timed
@pytest.mark.usefixtures("one_core")
def test_chunked_loss_is_as_fast_as_the_full_loss(make_case: Callable[[int, int], Case]) -> None:
    asked = make_case(TOKENS, VOCABULARY)
    ratios = []
    for _ in range(5):  # by turns
        seconds = []
        for chunk in (None, CHUNK):
            start = time.process_time()
            asked.take(chunk=chunk)
            seconds.append(time.process_time() - start)
            asked.taken()
        ratios.append(seconds[1] / seconds[0])
    print(f"{statistics.median(ratios):.2f} of the time, {min(ratios):.2f} to {max(ratios):.2f}")
    assert statistics.median(ratios) <= 1.10
