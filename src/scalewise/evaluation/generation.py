"""What a model writes: one token after the other, each read with all that came before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from scalewise.models.base_module import ModelModule


@torch.no_grad()
def generate(
    module: ModelModule, tokens: Sequence[int], context: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yields the tokens that follow ``tokens``, for as long as it is asked.

    A ``temperature`` of 0 takes the likeliest; others draw from the softmax of the logits over it.
    Of more than ``context`` tokens the last are read.
    """
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    read = list(tokens)
    while True:
        tokens_1T = torch.tensor([read[-context:]], device=device)
        read.append(sample_token(module(tokens_1T)[0, -1].float().cpu(), temperature, generator))
        yield read[-1]


@torch.no_grad()
def generate_answer(
    module: ModelModule, question: Sequence[int], temperature: float, seed: int
) -> Iterator[int]:
    """Yields the tokens of a decoder's answer to a question, as ``continued`` does."""
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    question_1S, written, module.loss = torch.tensor([question], device=device), [0], None
    while True:
        answer_1T = torch.tensor([written], device=device)  # the decoder does not read its last
        written[-1] = sample_token(
            module(question_1S, answer_1T)[0, -1].float().cpu(), temperature, generator
        )
        yield written[-1]
        written.append(0)


def sample_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Returns a token: the likeliest at a ``temperature`` of 0, else from the softmax over it."""
    if temperature == 0:
        return int(logits_V.argmax())
    shares_V = ((logits_V - logits_V.max()) / temperature).softmax(-1)
    return int(torch.multinomial(shares_V, 1, generator=generator))
