"""``scalewise evaluate RUN``: how good a trained model is, on held-out text and to the eye."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice, takewhile
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise import output
from scalewise.errors import Complaint, ConfigError
from scalewise.hardware import this_machine
from scalewise.units import bytes_text
from scalewise.verbs import trained

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from scalewise.checkpoints.trained import Trained
    from scalewise.data.base import Splits
    from scalewise.evaluation.captions import Captioned
    from scalewise.evaluation.held_out import HeldOut
    from scalewise.evaluation.preferences import Preferred
    from scalewise.evaluation.rewards import Rewarded
    from scalewise.models.module import ModelModule

    Found = HeldOut | Preferred | Rewarded

ALL, AS_TRAINED = "all", "as trained"
DEFAULTS = {
    "step": "last",
    "rows": AS_TRAINED,
    "prompt": "",
    "tokens": "64",
    "temperature": "0",
    "seed": "1",
}
LONGEST = 19
"""Digits that a number of 64 bits may not have."""
RECORD = "evaluation.json"
"""What was found, by step, in the run's folder."""


def main(arguments: Sequence[str]) -> int:
    """Prints what it finds and keeps it in ``RUN/evaluation.json``; exit code 0."""
    wrong = list(_wrong({**DEFAULTS, **trained.options(arguments)}))
    folder, options = trained.read("evaluate", arguments, DEFAULTS, wrong)
    told = trained.recorded(folder, options["step"], beginning=options["step"] == "0")

    import torch

    from scalewise.evaluation import live
    from scalewise.evaluation.captions import Captioned
    from scalewise.evaluation.held_out import HeldOut

    device, splits = torch.device(this_machine().device.value), told.splits()
    with live.arithmetic(told, device):
        module = live.model(told, device)
        found = _measured(told, module, splits, options["rows"])
        labels = f"{found.labels:,} labels of " if isinstance(found, HeldOut) else ""
        what = "pairs" if told.data.pairs else "rows"
        print(f"step {told.step} of {told.folder.name}: {labels}{found.rows} held-out {what}")
        print(found, flush=True)
        if isinstance(found, Captioned):
            _tell(found, splits)
        costs = _of_packing(told, device, splits, options["rows"], found) if told.packed else {}
        if told.fake_quantized:
            costs |= _of_rounding(told, device, splits, options["rows"], found)
        if told.precision.in_fp8(told.model):
            costs |= _of_fp8(told, device, splits, options["rows"], found)
        _keep(folder / RECORD, told.step, found, costs)
        if options["prompt"]:
            print(f"\n{_written(told, module, splits, options)}\n")
    print(f"result {folder / RECORD}")
    return 0


def _ends(tokenizer: Tokenizer) -> set[int]:
    """Returns the tokens that end a text."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {number for number, token in added if token.special}


def _tell(found: Captioned, splits: Splits) -> None:
    """Prints some captions as they were to be, and as they are written."""
    tokenizer = _tokenizer(splits)
    for right, wrote in found.told:
        print(f"  {tokenizer.decode(right)!r} is written {tokenizer.decode(wrote)!r}", flush=True)


def _tokenizer(splits: Splits) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(splits.tokenizer))


def _of_packing(
    told: Trained,
    device: torch.device,
    splits: Splits,
    rows: str,
    found: Found,
) -> dict[str, float]:
    """Returns what packing saves and costs: bytes, and loss beside that of the whole matrices."""
    from scalewise.evaluation import live

    held = told.precision.parameters.bytes
    whole = sum(weight.size(held) for weight in told.packed)
    packed = sum(p.size(held) for weight in told.packed for p in told.quantization.parts(weight))
    exact = _measured(told, live.model(told, device, exact=True), splits, rows).loss
    print(
        f"packed matrices: {bytes_text(packed)} instead of {bytes_text(whole)}; the loss is "
        f"{exact:.4f} with the matrices whole, {found.loss - exact:+.4f} by packing",
        flush=True,
    )
    return {"packed_bytes": packed, "whole_bytes": whole, "loss_of_whole": exact}


def _of_rounding(
    told: Trained,
    device: torch.device,
    splits: Splits,
    rows: str,
    found: Found,
) -> dict[str, float]:
    """Returns what integers will save and cost: bytes, and loss beside that of fp32."""
    import torch

    from scalewise.evaluation import live

    integers, whole = told.bytes_of_integers
    with torch.autocast(device.type, enabled=False):
        exact = _measured(told, live.model(told, device, exact=True).float(), splits, rows).loss
    print(
        f"matrices in 4 bits, once exported: {bytes_text(integers)} instead of "
        f"{bytes_text(whole)}; the loss is {exact:.4f} in fp32, {found.loss - exact:+.4f} by "
        "rounding",
        flush=True,
    )
    return {"packed_bytes": integers, "whole_bytes": whole, "loss_in_fp32": exact}


def _of_fp8(
    told: Trained,
    device: torch.device,
    splits: Splits,
    rows: str,
    found: Found,
) -> dict[str, float]:
    """Returns what products in 8 bits cost: the loss beside that of the same weights in fp32."""
    import torch

    from scalewise.evaluation import live

    with torch.autocast(device.type, enabled=False):
        exact = _measured(told, live.model(told, device, exact=True).float(), splits, rows).loss
    print(
        f"products in fp8: the loss is {exact:.4f} in fp32, {found.loss - exact:+.4f} by fp8",
        flush=True,
    )
    return {"loss_in_fp32": exact}


def _wrong(given: dict[str, str]) -> Iterator[Complaint]:
    for key, others in (("rows", (ALL, AS_TRAINED)), ("tokens", ()), ("seed", ("0",))):
        number = given[key].isdecimal() and len(given[key]) < LONGEST and int(given[key]) > 0
        if given[key] not in others and not number:
            cure = f"set {key}={DEFAULTS[key] if key != 'rows' else ALL}"
            yield Complaint(key, given[key], "is no number of 1 or more", cure)
    try:
        temperature = float(given["temperature"])
    except ValueError:
        temperature = -1.0
    if not (isfinite(temperature) and temperature >= 0):
        cure = "set temperature=0 for the likeliest token"
        yield Complaint("temperature", given["temperature"], "is no number of 0 or more", cure)


def _measured(told: Trained, module: ModelModule, splits: Splits, rows: str) -> Found:
    from scalewise.evaluation import captions, held_out, live, preferences, rewards
    from scalewise.objectives import DPO, GRPO, Captioning, Classification

    if splits.validation is None:
        reason, cure = "the run's data have no held-out rows", "give the folder of another run"
        raise ConfigError.one("", str(told.folder), reason, cure)
    count = {ALL: len(splits.validation), AS_TRAINED: told.trainer.validation_rows}.get(rows)
    count = int(rows) if count is None else count
    given = (splits.validation, count, int(told.trainer.micro_batch))  # auto is settled
    with output.console().status("evaluating") as status:

        def tell(done: int) -> None:
            status.update(f"{done} rows evaluated")

        if isinstance(told.objective, GRPO):
            return rewards.measured(module, told.objective, told.data, *given, tell)
        if isinstance(told.objective, Captioning):
            return captions.measured(module, *given, _ends(_tokenizer(splits)), tell)
        if not isinstance(told.objective, DPO):
            found = held_out.measured(module, *given, tell)
            classes = isinstance(told.objective, Classification)
            return held_out.Classified(**asdict(found)) if classes else found
        reference = live.model(replace(told, checkpoint=None), next(module.parameters()).device)
        return preferences.measured(module, reference, told.objective, *given, tell)


def _written(told: Trained, module: ModelModule, splits: Splits, options: dict[str, str]) -> str:
    """Returns the prompt and what the model makes of it, until it ends the text, or its classes.

    A model of conversations is asked as it was trained to be; a decoder's answer stands alone. Of a
    model that reads pictures the prompt is the file of one.
    """
    if splits.tokenizer is None:
        reason, cure = "the run's data were token ids, not text", "leave out prompt"
        raise ConfigError.one("prompt", options["prompt"], reason, cure)
    from scalewise.data.answers import template_of
    from scalewise.data.chat import Chat
    from scalewise.data.seq2seq import Seq2SeqData
    from scalewise.data.templates import asking
    from scalewise.evaluation import captions
    from scalewise.evaluation.generation import answered, continued

    tokenizer = _tokenizer(splits)
    ends = _ends(tokenizer)
    text = options["prompt"].encode("utf-8", "replace").decode("utf-8")
    if told.data.classes:
        return _classes(told, module, tokenizer.encode(text).ids)
    drawn = (float(options["temperature"]), int(options["seed"]))
    count = int(options["tokens"])
    if told.data.image_size:
        pixels = _pixels(options["prompt"], told.data.image_size)
        tokens = (int(each) for each in captions.written(module, pixels, *drawn))
        return str(tokenizer.decode(_until(ends, tokens, min(count, told.model.context))))
    if isinstance(told.data, Seq2SeqData):
        question = tokenizer.encode(text + told.data.end_of_text, add_special_tokens=False).ids
        found = answered(module, question[: told.data.sequence - told.data.target_length], *drawn)
        return str(tokenizer.decode(_until(ends, found, count)))
    if isinstance(told.data, Chat):
        text = asking(template_of(told.data), text)
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    found = continued(
        module,
        prompt,
        told.model.context - told.adapter.ahead - told.adapter.before,
        *drawn,
    )
    return str(tokenizer.decode([*prompt, *_until(ends, found, count)]))


def _pixels(file: str, side: int) -> torch.Tensor:
    """Returns the picture of a file; raises ``ConfigError`` where there is none."""
    import torch

    from scalewise.data import images

    try:
        found_CHW = images.resized(images.read(Path(file).expanduser()), side)
    except ValueError as error:
        cure = "give prompt=FILE of a picture, .npy, .ppm or .pgm"
        raise ConfigError.one("prompt", file, str(error), cure) from error
    return torch.from_numpy(found_CHW.copy())[None]


def _until(ends: Container[int], tokens: Iterator[int], count: int) -> list[int]:
    """Returns up to so many tokens, and none of what ends a text."""
    with output.console().status("writing"):
        return list(takewhile(lambda token: token not in ends, islice(tokens, count)))


def _classes(told: Trained, module: ModelModule, ids: list[int]) -> str:
    """Returns how likely a text is of each class, the likeliest first."""
    import torch

    if not ids:
        raise ConfigError.one("prompt", "", "has no words", "set prompt='some text'")
    tokens_1T = torch.tensor([ids[: told.data.sequence]], device=next(module.parameters()).device)
    with torch.no_grad():
        shares = module(tokens_1T)[0, -1].float().softmax(-1).tolist()
    ranked = sorted(zip(shares, told.data.classes, strict=True), reverse=True)
    return ", ".join(f"{name} {share:.1%}" for share, name in ranked)


def _keep(path: Path, step: int, found: Found, costs: Mapping[str, float]) -> None:
    from scalewise.evaluation.held_out import Classified, HeldOut
    from scalewise.tracking.files import read_json, write_json

    more = {}
    if isinstance(found, HeldOut) and not isinstance(found, Classified):
        more = {"perplexity": found.perplexity}
    record = {str(step): {**asdict(found), **more, **costs}}
    write_json(path, read_json(path) | record)
