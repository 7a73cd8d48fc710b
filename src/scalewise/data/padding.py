"""How many samples a run reads beyond those that it was given: padding and repetition, in notes."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

from scalewise.data.base import DataSplits

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


def padding_notes(run: RunConfig, splits: DataSplits | None = None) -> Iterator[str]:
    """Yields one line for each kind of samples that a run pads or repeats.

    Args:
        run: the run, its micro-batch size chosen.
        splits: its prepared data. None where a plan does not read them: then epochs are left out,
            and a validation has as many samples as it may have.
    """
    ranks, micro_batch = run.parallelism.data_parallel_size, run.micro_batch

    def padded(what: str, samples: int, cure: str) -> Iterator[str]:
        accumulation = ceil(samples / (micro_batch * ranks))
        size = accumulation * micro_batch * ranks
        if size > samples:
            yield (
                f"{what}: {amount_text(samples, size, 'empty')}, computed but not counted in the "
                f"loss, to fill {ranks} rank{'s' * (ranks > 1)} x micro-batch {micro_batch} x "
                f"{accumulation} pass{'es' * (accumulation > 1)}{cure}"
            )

    step = run.accumulation * run.samples_per_forward
    yield from padded("each step", run.global_batch, f"; trainer.global_batch={step} pads nothing")
    epochs = run.trainer.max_epochs
    if splits is not None and epochs is not None and not splits.train.streamed:
        samples, steps = ceil(epochs * len(splits.train)), run.num_steps(len(splits.train))
        if (read := steps * run.global_batch) > samples:
            yield (
                f"all epochs: {amount_text(samples, read, 'repeated')}, "
                f"to fill the last of {steps:,} steps of {run.global_batch} samples"
            )
    if run.trainer.validate_every is not None:
        held_out = run.trainer.validation_rows
        if splits is not None:
            held_out = min(held_out, len(splits.validation or ()))
        yield from padded("each validation", held_out, "")


def amount_text(samples: int, padded: int, kind: str) -> str:
    """Returns how many samples are read, and how many of these are ``kind`` (empty, repeated)."""
    more = padded - samples
    share = f"{more / padded:.1%}" if more / padded >= 0.0005 else "less than 0.1%"
    return (
        f"{samples:,} sample{'s' * (samples != 1)} padded to {padded:,} ({more:,} {kind}, {share})"
    )
