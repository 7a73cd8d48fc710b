"""``scalewise evaluate RUN``: evaluate a trained model on held-out data, or generate text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise import plain_console
from scalewise.commands import run_arguments
from scalewise.console import print_lines
from scalewise.errors import ConfigIssue
from scalewise.evaluation import ALL, AS_TRAINED
from scalewise.hardware import this_machine

if TYPE_CHECKING:
    from scalewise.data.prepare import DataSplits
    from scalewise.evaluation.evaluate_run import Metrics
    from scalewise.evaluation.validation_metrics import CaptionMetrics

DEFAULTS = {
    "step": "last",
    "rows": AS_TRAINED,
    "prompt": "",
    "tokens": "64",
    "temperature": "0",
    "seed": "1",
}
MAX_DIGITS = 19
"""Numbers with this many digits may exceed int64."""
RECORD = "evaluation.json"
"""File in the run folder with the metrics by step."""


def main(arguments: Sequence[str]) -> int:
    """Print the metrics and write them to ``RUN/evaluation.json``; exit code 0."""
    issues = list(_option_issues({**DEFAULTS, **run_arguments.parse_options(arguments)}))
    folder, options = run_arguments.read_arguments("evaluate", arguments, DEFAULTS, issues)
    trained_run = run_arguments.load_trained(
        folder, options["step"], options, untrained=options["step"] == "0", needs_data=True
    )

    import torch

    from scalewise.checkpoints.trained_run import autocast_context, load_model
    from scalewise.evaluation import evaluate_run
    from scalewise.evaluation.sample import SamplingOptions, sample_text
    from scalewise.evaluation.validation_metrics import CaptionMetrics, ValidationMetrics
    from scalewise.models.base_module import ModelModule

    device, splits = torch.device(this_machine().device.value), trained_run.load_splits()

    def measure(module: ModelModule) -> Metrics:
        with plain_console.get_console().status("evaluating") as status:

            def show_progress(done: int) -> None:
                status.update(f"{done} samples evaluated")

            return evaluate_run.measure_run(
                trained_run, module, splits, options["rows"], show_progress
            )

    with autocast_context(trained_run, device):
        module = load_model(trained_run, device)
        metrics = measure(module)
        labels = f"{metrics.labels:,} labels of " if isinstance(metrics, ValidationMetrics) else ""
        noun = "pairs" if trained_run.data.pairs else "samples"
        averaged = ", averaged weights" * trained_run.is_averaged
        counts = f"{labels}{metrics.rows} held-out {noun}"
        print_lines(f"step {trained_run.step} of {folder}{averaged}: {counts}")
        print_lines(*str(metrics).split("\n"))
        if isinstance(metrics, CaptionMetrics):
            _print_captions(metrics, splits)
        costs: dict[str, float] = {}
        for sentence, figures in evaluate_run.quantization_costs(
            trained_run, device, metrics, measure
        ):
            print_lines(sentence)
            costs |= figures
        _write_evaluation(folder / RECORD, trained_run.step, metrics, costs)
        if prompt := options["prompt"]:
            sampling = SamplingOptions(
                int(options["tokens"]), float(options["temperature"]), int(options["seed"])
            )
            with plain_console.get_console().status("writing"):
                text = sample_text(trained_run, module, splits, prompt, sampling)
            print_lines("", *text.split("\n"), "")
    print_lines(f"result {folder / RECORD}")
    return 0


def _print_captions(metrics: CaptionMetrics, splits: DataSplits) -> None:
    """Print some reference captions next to the generated ones."""
    from scalewise.evaluation.evaluate_run import run_tokenizer

    tokenizer = run_tokenizer(splits)
    for reference, generated in metrics.told:
        texts = tokenizer.decode(reference), tokenizer.decode(generated)
        print_lines("  reference {!r}, generated {!r}".format(*texts))


def _option_issues(options: dict[str, str]) -> Iterator[ConfigIssue]:
    for key, keywords in (("rows", (ALL, AS_TRAINED)), ("tokens", ()), ("seed", ("0",))):
        is_number = (
            options[key].isdecimal() and len(options[key]) < MAX_DIGITS and int(options[key]) > 0
        )
        if options[key] not in keywords and not is_number:
            fix = f"set {key}={DEFAULTS[key] if key != 'rows' else ALL}"
            yield ConfigIssue(key, options[key], "must be an integer of 1 or more", fix)
    try:
        temperature = float(options["temperature"])
    except ValueError:
        temperature = -1.0
    if not (isfinite(temperature) and temperature >= 0):
        fix = "set temperature=0 for greedy decoding"
        yield ConfigIssue(
            "temperature", options["temperature"], "must be a number of 0 or more", fix
        )


def _write_evaluation(
    path: Path, step: int, metrics: Metrics, quantization_costs: Mapping[str, float]
) -> None:
    from scalewise.evaluation.validation_metrics import ClassificationMetrics, ValidationMetrics
    from scalewise.path_lock import PathLock
    from scalewise.run_files import read_json, write_json

    derived = {}
    if isinstance(metrics, ValidationMetrics) and not isinstance(metrics, ClassificationMetrics):
        derived = {"perplexity": metrics.perplexity}
    record = {str(step): {**asdict(metrics), **derived, **quantization_costs}}
    with PathLock(path.parent, wait=True):  # another evaluation may add its step
        write_json(path, read_json(path) | record)
