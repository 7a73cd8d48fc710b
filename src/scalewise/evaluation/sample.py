"""What the model of a run makes of a prompt: a text, an answer, a caption, or its classes."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

import torch

from scalewise.checkpoints.trained import TrainedRun
from scalewise.data import image_io
from scalewise.data.base import DataSplits
from scalewise.data.chat import ChatData
from scalewise.data.chat_cache import chat_template
from scalewise.data.chat_templates import prompt_text
from scalewise.data.encoding import special_ids
from scalewise.data.seq2seq import Seq2SeqData
from scalewise.errors import ConfigError
from scalewise.evaluation import captions
from scalewise.evaluation.evaluate_run import end_tokens, run_tokenizer
from scalewise.evaluation.generation import generate, generate_answer
from scalewise.models.base_module import ModelModule


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn, and how many at the most; ``temperature`` 0: the likeliest."""

    tokens: int
    temperature: float
    seed: int


def sample_text(
    told: TrainedRun, module: ModelModule, splits: DataSplits, prompt: str, drawing: SamplingOptions
) -> str:
    """Returns the prompt and what the model makes of it, until it ends the text, or its classes.

    A model of conversations is asked as it was trained to be; a decoder's answer stands alone. Of a
    model that reads pictures the prompt is the file of one.
    """
    if splits.tokenizer is None:
        reason, cure = "the run's data were token ids, not text", "leave out prompt"
        raise ConfigError.one("prompt", prompt, reason, cure)
    tokenizer = run_tokenizer(splits)
    last = end_tokens(tokenizer)
    text = prompt.encode("utf-8", "replace").decode("utf-8")
    if told.data.classes:
        return _class_probabilities(told, module, tokenizer.encode(text).ids)
    drawn, count = (drawing.temperature, drawing.seed), drawing.tokens
    if told.data.image_size:
        pixels = _read_pixels(prompt, told.data.image_size)
        tokens = (int(each) for each in captions.generate_captions(module, pixels, *drawn))
        return str(tokenizer.decode(_take_until_end(last, tokens, min(count, told.model.context))))
    if isinstance(told.data, Seq2SeqData):
        question = tokenizer.encode(text + told.data.end_of_text, add_special_tokens=False).ids
        found = generate_answer(
            module, question[: told.data.sequence - told.data.target_length], *drawn
        )
        return str(tokenizer.decode(_take_until_end(last, found, count)))
    if isinstance(told.data, ChatData):
        template = chat_template(told.data)
        text = prompt_text(template, text)
        template.close()
    begun = tokenizer.encode(text, add_special_tokens=False).ids
    if not isinstance(told.data, ChatData) and getattr(told.data, "special_tokens", True):
        begun = special_ids(tokenizer)[0] + begun
    found = generate(
        module,
        begun,
        told.model.context - told.adapter.ahead - told.adapter.before,
        *drawn,
    )
    return str(tokenizer.decode([*begun, *_take_until_end(last, found, count)]))


def _read_pixels(file: str, side: int) -> torch.Tensor:
    """Returns the picture of a file; raises ``ConfigError`` where there is none."""
    try:
        found_CHW = image_io.resize_image(image_io.read_image(Path(file).expanduser()), side)
    except ValueError as error:
        cure = "give prompt=FILE of a picture, such as .png, .jpg or .npy"
        raise ConfigError.one("prompt", file, str(error), cure) from error
    return torch.from_numpy(found_CHW.copy())[None]


def _take_until_end(last: Container[int], tokens: Iterator[int], count: int) -> list[int]:
    """Returns up to so many tokens, and none of what ends a text."""
    return list(takewhile(lambda token: token not in last, islice(tokens, count)))


def _class_probabilities(told: TrainedRun, module: ModelModule, ids: list[int]) -> str:
    """Returns how likely a text is of each class, the likeliest first."""
    if not ids:
        raise ConfigError.one("prompt", "", "has no words", "set 'prompt=some text'")
    tokens_1T = torch.tensor([ids[: told.data.sequence]], device=next(module.parameters()).device)
    with torch.no_grad():
        shares = module(tokens_1T)[0, -1].float().softmax(-1).tolist()
    ranked = sorted(zip(shares, told.data.classes, strict=True), reverse=True)
    return ", ".join(f"{name} {share:.1%}" for share, name in ranked)
