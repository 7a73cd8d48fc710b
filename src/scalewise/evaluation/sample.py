"""Output of the model of a run for a prompt: text, answer, caption or class probabilities."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

import torch

from scalewise import regular_files
from scalewise.checkpoints.trained_run import TrainedRun
from scalewise.data import image_io
from scalewise.data.chat import ChatData, Seq2SeqData
from scalewise.data.chat_cache import chat_template
from scalewise.data.chat_templates import prompt_text
from scalewise.data.encoding import special_ids
from scalewise.data.prepare import DataSplits
from scalewise.errors import ConfigError
from scalewise.evaluation.evaluate_run import end_tokens, run_tokenizer
from scalewise.evaluation.generation import generate, generate_answer, generate_captions
from scalewise.models.base_module import ModelModule


@dataclass(frozen=True)
class SamplingOptions:
    """Options of text generation."""

    tokens: int
    """Maximum number of generated tokens."""
    temperature: float
    """Temperature of the softmax from which tokens are sampled; 0: greedy decoding."""
    seed: int
    """Seed of the random generator."""


def sample_text(
    trained_run: TrainedRun,
    module: ModelModule,
    splits: DataSplits,
    prompt: str,
    sampling: SamplingOptions,
) -> str:
    """Generate the output of the model of a run for a prompt.

    A chat model receives the prompt in its chat template. The prompt of a vision-language model is
    the path of an image.

    Returns:
        The prompt and its continuation up to an end token. The answer alone of an encoder-decoder
        or vision-language model. The class probabilities of a classifier.

    Raises:
        ConfigError: the run was trained on token ids, the prompt is empty, or the image cannot be
            read.
    """
    if splits.tokenizer is None:
        reason, fix = "the training data were token ids, not text", "leave out prompt"
        raise ConfigError.for_key("prompt", prompt, reason, fix)
    tokenizer = run_tokenizer(splits)
    end_ids = end_tokens(tokenizer)
    text = prompt.encode("utf-8", "replace").decode("utf-8")
    if trained_run.data.classes:
        return _class_probabilities(trained_run, module, tokenizer.encode(text).ids)
    random_args, count = (sampling.temperature, sampling.seed), sampling.tokens
    if trained_run.data.image_size:
        pixels = _read_pixels(prompt, trained_run.data.image_size)
        tokens: Iterator[int] = (
            int(each) for each in generate_captions(module, pixels, *random_args)
        )
        count = min(count, trained_run.model.context)
        return str(tokenizer.decode(_take_until_end(end_ids, tokens, count)))
    if isinstance(trained_run.data, Seq2SeqData):
        question = tokenizer.encode(
            text + trained_run.data.end_of_text, add_special_tokens=False
        ).ids
        max_length = trained_run.data.sequence - trained_run.data.target_length
        tokens = generate_answer(module, question[:max_length], *random_args)
        return str(tokenizer.decode(_take_until_end(end_ids, tokens, count)))
    if isinstance(trained_run.data, ChatData):
        template = chat_template(trained_run.data)
        text = prompt_text(template, text)
        template.close()
    prompt_ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not isinstance(trained_run.data, ChatData) and getattr(
        trained_run.data, "special_tokens", True
    ):
        prompt_ids = special_ids(tokenizer)[0] + prompt_ids
    adapter_tokens = trained_run.adapter.prompt_tokens + trained_run.adapter.prefix_tokens
    context = trained_run.model.context - adapter_tokens
    tokens = generate(module, prompt_ids, context, *random_args)
    return str(tokenizer.decode([*prompt_ids, *_take_until_end(end_ids, tokens, count)]))


def _read_pixels(file: str, image_size: int) -> torch.Tensor:
    """Read and resize an image; raise ``ConfigError`` if it cannot be read."""
    try:
        image_CHW = image_io.resize_image(
            image_io.read_image(regular_files.expand_home(file)), image_size
        )
    except ValueError as error:
        fix = "set prompt=FILE to an image file, such as .png, .jpg or .npy"
        raise ConfigError.for_key("prompt", file, str(error), fix) from error
    return torch.from_numpy(image_CHW.copy())[None]


def _take_until_end(end_token_ids: Container[int], tokens: Iterator[int], count: int) -> list[int]:
    """At most ``count`` tokens before the first end token."""
    return list(takewhile(lambda token: token not in end_token_ids, islice(tokens, count)))


def _class_probabilities(trained_run: TrainedRun, module: ModelModule, ids: list[int]) -> str:
    """Probability of each class, in descending order."""
    if not ids:
        raise ConfigError.for_key("prompt", "", "is empty", "set 'prompt=some text'")
    tokens_1T = torch.tensor(
        [ids[: trained_run.data.sequence]], device=next(module.parameters()).device
    )
    with torch.no_grad():
        probabilities = module(tokens_1T)[0, -1].float().softmax(-1).tolist()
    ranked = sorted(zip(probabilities, trained_run.data.classes, strict=True), reverse=True)
    return ", ".join(f"{name} {probability:.1%}" for probability, name in ranked)
