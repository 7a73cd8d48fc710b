"""``scalewise evaluate RUN``: how good a trained model is, on held-out text and to the eye."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise import output
from scalewise.errors import Complaint
from scalewise.evaluation import ALL, AS_TRAINED
from scalewise.hardware import this_machine
from scalewise.output import print_lines
from scalewise.verbs import trained

if TYPE_CHECKING:
    from scalewise.data.base import Splits
    from scalewise.evaluation.captions import Captioned
    from scalewise.evaluation.of_run import Found

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
    told = trained.recorded(
        folder, options["step"], options, beginning=options["step"] == "0", reads_data=True
    )

    import torch

    from scalewise.evaluation import live, of_run
    from scalewise.evaluation.captions import Captioned
    from scalewise.evaluation.held_out import HeldOut
    from scalewise.evaluation.written import Drawing, written
    from scalewise.models.module import ModelModule

    device, splits = torch.device(this_machine().device.value), told.splits()

    def measure(module: ModelModule) -> Found:
        with output.console().status("evaluating") as status:

            def tell(done: int) -> None:
                status.update(f"{done} rows evaluated")

            return of_run.measured(told, module, splits, options["rows"], tell)

    with live.arithmetic(told, device):
        module = live.model(told, device)
        found = measure(module)
        labels = f"{found.labels:,} labels of " if isinstance(found, HeldOut) else ""
        what = "pairs" if told.data.pairs else "rows"
        averaged = ", averaged weights" * told.averaged
        counts = f"{labels}{found.rows} held-out {what}"
        print_lines(f"step {told.step} of {folder}{averaged}: {counts}")
        print_lines(*str(found).split("\n"))
        if isinstance(found, Captioned):
            _tell(found, splits)
        costs: dict[str, float] = {}
        for said, figures in of_run.costs(told, device, found, measure):
            print_lines(said)
            costs |= figures
        _keep(folder / RECORD, told.step, found, costs)
        if prompt := options["prompt"]:
            drawing = Drawing(
                int(options["tokens"]), float(options["temperature"]), int(options["seed"])
            )
            with output.console().status("writing"):
                text = written(told, module, splits, prompt, drawing)
            print_lines("", *text.split("\n"), "")
    print_lines(f"result {folder / RECORD}")
    return 0


def _tell(found: Captioned, splits: Splits) -> None:
    """Prints some captions as they were to be, and as they are written."""
    from scalewise.evaluation.of_run import tokenizer_of

    tokenizer = tokenizer_of(splits)
    for right, wrote in found.told:
        print_lines(f"  {tokenizer.decode(right)!r} is written {tokenizer.decode(wrote)!r}")


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


def _keep(path: Path, step: int, found: Found, costs: Mapping[str, float]) -> None:
    from scalewise.evaluation.held_out import Classified, HeldOut
    from scalewise.tracking.files import read_json, write_json

    more = {}
    if isinstance(found, HeldOut) and not isinstance(found, Classified):
        more = {"perplexity": found.perplexity}
    record = {str(step): {**asdict(found), **more, **costs}}
    write_json(path, read_json(path) | record)
