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
    trained_run: TrainedRun,
    module: ModelModule,
    splits: DataSplits,
    prompt: str,
    sampling: SamplingOptions,
) -> str:
    """Returns the prompt and what the model makes of it, until it ends the text, or its classes.

    A model of conversations is asked as it was trained to be; a decoder's answer stands alone. Of a
    model that reads pictures the prompt is the file of one.
    """
    if splits.tokenizer is None:
        reason, fix = "the run's data were token ids, not text", "leave out prompt"
        raise ConfigError.for_key("prompt", prompt, reason, fix)
    tokenizer = run_tokenizer(splits)
    last = end_tokens(tokenizer)
    text = prompt.encode("utf-8", "replace").decode("utf-8")
    if trained_run.data.classes:
        return _class_probabilities(trained_run, module, tokenizer.encode(text).ids)
    drawn, count = (sampling.temperature, sampling.seed), sampling.tokens
    if trained_run.data.image_size:
        pixels = _read_pixels(prompt, trained_run.data.image_size)
        tokens = (int(each) for each in captions.generate_captions(module, pixels, *drawn))
        return str(
            tokenizer.decode(_take_until_end(last, tokens, min(count, trained_run.model.context)))
        )
    if isinstance(trained_run.data, Seq2SeqData):
        question = tokenizer.encode(
            text + trained_run.data.end_of_text, add_special_tokens=False
        ).ids
        found = generate_answer(
            module, question[: trained_run.data.sequence - trained_run.data.target_length], *drawn
        )
        return str(tokenizer.decode(_take_until_end(last, found, count)))
    if isinstance(trained_run.data, ChatData):
        template = chat_template(trained_run.data)
        text = prompt_text(template, text)
        template.close()
    begun = tokenizer.encode(text, add_special_tokens=False).ids
    if not isinstance(trained_run.data, ChatData) and getattr(
        trained_run.data, "special_tokens", True
    ):
        begun = special_ids(tokenizer)[0] + begun
    found = generate(
        module,
        begun,
        trained_run.model.context - trained_run.adapter.ahead - trained_run.adapter.before,
        *drawn,
    )
    return str(tokenizer.decode([*begun, *_take_until_end(last, found, count)]))


def _read_pixels(file: str, image_size: int) -> torch.Tensor:
    """Returns the picture of a file; raises ``ConfigError`` where there is none."""
    try:
        found_CHW = image_io.resize_image(image_io.read_image(Path(file).expanduser()), image_size)
    except ValueError as error:
        fix = "give prompt=FILE of a picture, such as .png, .jpg or .npy"
        raise ConfigError.for_key("prompt", file, str(error), fix) from error
    return torch.from_numpy(found_CHW.copy())[None]


def _take_until_end(end_token_ids: Container[int], tokens: Iterator[int], count: int) -> list[int]:
    """Returns up to so many tokens, and none of what ends a text."""
    return list(takewhile(lambda token: token not in end_token_ids, islice(tokens, count)))


def _class_probabilities(trained_run: TrainedRun, module: ModelModule, ids: list[int]) -> str:
    """Returns how likely a text is of each class, the likeliest first."""
    if not ids:
        raise ConfigError.for_key("prompt", "", "has no words", "set 'prompt=some text'")
    tokens_1T = torch.tensor(
        [ids[: trained_run.data.sequence]], device=next(module.parameters()).device
    )
    with torch.no_grad():
        shares = module(tokens_1T)[0, -1].float().softmax(-1).tolist()
    ranked = sorted(zip(shares, trained_run.data.classes, strict=True), reverse=True)
    return ", ".join(f"{name} {share:.1%}" for share, name in ranked)
