"""Autoregressive generation of text and image captions, without a KV cache.

Shape suffixes: B samples, C channels, H and W pixels, T tokens of a caption, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from scalewise.models.base_module import ModelModule
from scalewise.models.hf.vision_language import VisionLanguageModule


@torch.no_grad()
def generate(
    module: ModelModule, tokens: Sequence[int], context: int, temperature: float, seed: int
) -> Iterator[int]:
    """Generate the tokens that follow ``tokens``, without end.

    Args:
        module: Decoder-only model.
        tokens: Prompt.
        context: Maximum number of tokens in the context; earlier tokens are dropped.
        temperature: Temperature of the softmax from which tokens are sampled; 0: greedy decoding.
        seed: Seed of the random generator.
    """
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(tokens)
    while True:
        tokens_1T = torch.tensor([text[-context:]], device=device)
        text.append(sample_token(module(tokens_1T)[0, -1].float().cpu(), temperature, generator))
        yield text[-1]


@torch.no_grad()
def generate_answer(
    module: ModelModule, question: Sequence[int], temperature: float, seed: int
) -> Iterator[int]:
    """Generate the tokens of an encoder-decoder model's answer, without end; see ``generate``."""
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    question_1S, answer, module.loss = torch.tensor([question], device=device), [0], None
    while True:
        answer_1T = torch.tensor([answer], device=device)  # the last position is not read
        answer[-1] = sample_token(
            module(question_1S, answer_1T)[0, -1].float().cpu(), temperature, generator
        )
        yield answer[-1]
        answer.append(0)


def sample_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Sample a token from ``softmax(logits / temperature)``; 0: the most likely token."""
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = ((logits_V - logits_V.max()) / temperature).softmax(-1)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


@torch.no_grad()
def generate_captions(
    module: ModelModule, pixels_BCHW: Tensor, temperature: float, seed: int
) -> Iterator[Tensor]:
    """Generate the next token of each caption, ``tokens_B``, without end.

    Args:
        module: Vision-language model.
        pixels_BCHW: Images.
        temperature: Temperature of the softmax from which tokens are sampled; 0: greedy decoding.
        seed: Seed of the random generator.
    """
    model = cast(VisionLanguageModule, module)
    generator = torch.Generator().manual_seed(seed)
    image_features = model.encode_images(pixels_BCHW.to(next(model.parameters()).device))
    text_BT = torch.zeros((len(image_features), 0), dtype=torch.long, device=image_features.device)
    while True:
        padded_BT = torch.nn.functional.pad(text_BT, (0, 1))  # the last position is not read
        logits_BV = model.decode_text(image_features, padded_BT)[:, -1].float().cpu()
        tokens_B = torch.tensor([sample_token(each, temperature, generator) for each in logits_BV])
        yield tokens_B
        text_BT = torch.cat([text_BT, tokens_B[:, None].to(text_BT.device)], dim=1)
