"""Notes on samples that a run pads or repeats."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from scalewise.data.prepare import DataSplits
from scalewise.run_config import RunConfig


def padding_notes(run: RunConfig, splits: DataSplits | None = None) -> Iterator[str]:
    """Yield one line for each kind of samples that a run pads or repeats.

    Args:
        run: Run with a chosen micro-batch size.
        splits: Prepared data. None: epochs are not covered, and validation is assumed to have its
            largest size.
    """
    ranks, micro_batch = run.parallelism.data_parallel_size, run.micro_batch

    def padded(what: str, samples: int, fix: str) -> Iterator[str]:
        accumulation = ceil(samples / (micro_batch * ranks))
        size = accumulation * micro_batch * ranks
        if size > samples:
            yield (
                f"{what}: {amount_text(samples, size, 'empty')}, computed but not counted in the "
                f"loss, to fill {ranks} rank{'s' * (ranks > 1)} x {micro_batch} x "
                f"{accumulation} micro-batch{'es' * (accumulation > 1)}{fix}"
            )

    step = run.accumulation * run.samples_per_forward
    yield from padded(
        "each step", run.global_batch, f"; set trainer.global_batch={step} to avoid padding"
    )
    epochs = run.trainer.max_epochs
    if splits is not None and epochs is not None and not splits.train.streamed:
        samples, steps = ceil(epochs * len(splits.train)), run.num_steps(len(splits.train))
        if (samples_read := steps * run.global_batch) > samples:
            yield (
                f"all epochs: {amount_text(samples, samples_read, 'repeated')}, "
                f"to fill the last of {steps:,} steps of {run.global_batch} samples"
            )
    if run.trainer.validate_every is not None:
        held_out = run.trainer.validation_rows
        if splits is not None:
            held_out = min(held_out, len(splits.validation or ()))
        yield from padded("each validation", held_out, "")


def amount_text(samples: int, total: int, kind: str) -> str:
    """Return the numbers of samples before and after padding; ``kind`` is empty or repeated."""
    added = total - samples
    percentage = f"{added / total:.1%}" if added / total >= 0.0005 else "less than 0.1%"
    return (
        f"{samples:,} sample{'s' * (samples != 1)} padded to {total:,} "
        f"({added:,} {kind}, {percentage})"
    )
