"""``scalewise evaluate RUN``: how good a trained model is, on held-out text and to the eye."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise import console
from scalewise.commands import trained
from scalewise.console import print_lines
from scalewise.errors import ConfigIssue
from scalewise.evaluation import ALL, AS_TRAINED
from scalewise.hardware import this_machine

if TYPE_CHECKING:
    from scalewise.data.base import DataSplits
    from scalewise.evaluation.captions import CaptionMetrics
    from scalewise.evaluation.evaluate_run import Metrics

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
    wrong = list(_option_issues({**DEFAULTS, **trained.parse_options(arguments)}))
    folder, options = trained.read_arguments("evaluate", arguments, DEFAULTS, wrong)
    told = trained.load_trained(
        folder, options["step"], options, untrained=options["step"] == "0", needs_data=True
    )

    import torch

    from scalewise.evaluation import evaluate_run, load_model
    from scalewise.evaluation.captions import CaptionMetrics
    from scalewise.evaluation.sample import SamplingOptions, sample_text
    from scalewise.evaluation.validation_metrics import ValidationMetrics
    from scalewise.models.base_module import ModelModule

    device, splits = torch.device(this_machine().device.value), told.load_splits()

    def measure(module: ModelModule) -> Metrics:
        with console.get_console().status("evaluating") as status:

            def tell(done: int) -> None:
                status.update(f"{done} rows evaluated")

            return evaluate_run.measure_run(told, module, splits, options["rows"], tell)

    with load_model.autocast_context(told, device):
        module = load_model.load_model(told, device)
        found = measure(module)
        labels = f"{found.labels:,} labels of " if isinstance(found, ValidationMetrics) else ""
        what = "pairs" if told.data.pairs else "rows"
        averaged = ", averaged weights" * told.is_averaged
        counts = f"{labels}{found.rows} held-out {what}"
        print_lines(f"step {told.step} of {folder}{averaged}: {counts}")
        print_lines(*str(found).split("\n"))
        if isinstance(found, CaptionMetrics):
            _print_captions(found, splits)
        costs: dict[str, float] = {}
        for said, figures in evaluate_run.quantization_costs(told, device, found, measure):
            print_lines(said)
            costs |= figures
        _write_evaluation(folder / RECORD, told.step, found, costs)
        if prompt := options["prompt"]:
            drawing = SamplingOptions(
                int(options["tokens"]), float(options["temperature"]), int(options["seed"])
            )
            with console.get_console().status("writing"):
                text = sample_text(told, module, splits, prompt, drawing)
            print_lines("", *text.split("\n"), "")
    print_lines(f"result {folder / RECORD}")
    return 0


def _print_captions(metrics: CaptionMetrics, splits: DataSplits) -> None:
    """Prints some captions as they were to be, and as they are written."""
    from scalewise.evaluation.evaluate_run import run_tokenizer

    tokenizer = run_tokenizer(splits)
    for right, wrote in metrics.told:
        print_lines(f"  {tokenizer.decode(right)!r} is written {tokenizer.decode(wrote)!r}")


def _option_issues(options: dict[str, str]) -> Iterator[ConfigIssue]:
    for key, others in (("rows", (ALL, AS_TRAINED)), ("tokens", ()), ("seed", ("0",))):
        number = options[key].isdecimal() and len(options[key]) < LONGEST and int(options[key]) > 0
        if options[key] not in others and not number:
            fix = f"set {key}={DEFAULTS[key] if key != 'rows' else ALL}"
            yield ConfigIssue(key, options[key], "is no number of 1 or more", fix)
    try:
        temperature = float(options["temperature"])
    except ValueError:
        temperature = -1.0
    if not (isfinite(temperature) and temperature >= 0):
        fix = "set temperature=0 for the likeliest token"
        yield ConfigIssue("temperature", options["temperature"], "is no number of 0 or more", fix)


def _write_evaluation(
    path: Path, step: int, metrics: Metrics, quantization_costs: Mapping[str, float]
) -> None:
    from scalewise.evaluation.validation_metrics import ClassificationMetrics, ValidationMetrics
    from scalewise.tracking.run_files import read_json, write_json

    more = {}
    if isinstance(metrics, ValidationMetrics) and not isinstance(metrics, ClassificationMetrics):
        more = {"perplexity": metrics.perplexity}
    record = {str(step): {**asdict(metrics), **more, **quantization_costs}}
    write_json(path, read_json(path) | record)
