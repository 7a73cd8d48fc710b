"""Notes on padded and repeated samples equal the counts of the loaders."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalewise import compose
from scalewise.data.dataloader import BatchShare, TrainLoader, ValidationLoader
from scalewise.data.datasets import PackedDataset
from scalewise.data.prepare import DataSplits
from scalewise.planner.plan import padding_notes
from scalewise.run_config import RunConfig

SEQUENCE = 2
BASE = compose(["experiment=smoke", "parallelism=ddp"])
PADDING_NOTE = re.compile(
    r"([\d,]+) samples? padded to ([\d,]+) \(([\d,]+) (empty|repeated), (.*?)\)"
)


def numbered(num_samples: int) -> PackedDataset:
    """Dataset in which the first token of each sample is its index."""
    return PackedDataset([np.arange(num_samples * SEQUENCE + 1, dtype=np.uint32)], SEQUENCE)


def of(
    ranks: int, micro_batch: int, global_batch: int, validation: int, epochs: float
) -> RunConfig:
    trainer = replace(
        BASE.trainer,
        micro_batch=micro_batch,
        global_batch=global_batch,
        validation_rows=validation,
        max_steps=None,
        max_epochs=epochs,
    )
    return replace(BASE, trainer=trainer, parallelism=replace(BASE.parallelism, replicas=ranks))


def amounts(run: RunConfig, splits: DataSplits | None) -> dict[str, tuple[int, int, int, str]]:
    """Samples, padded samples, their difference and its fraction, by subject of the note."""
    counts = {}
    for note in padding_notes(run, splits):
        match = PADDING_NOTE.search(note)
        assert match, note
        samples, num_read, more = (int(number.replace(",", "")) for number in match.groups()[:3])
        counts[note.partition(":")[0]] = (samples, num_read, more, match[5])
    return counts


def labelled(loader: TrainLoader | ValidationLoader) -> tuple[int, int]:
    """Number of samples that a loader yields, and number of those with labels."""
    batches = list(loader)
    real = sum(int((batch["labels"] >= 0).all(1).sum()) for batch in batches)
    return sum(len(batch["labels"]) for batch in batches), real


@settings(deadline=None, max_examples=200)
@given(
    num_samples=st.integers(1, 40),
    held_out=st.integers(1, 20),
    ranks=st.integers(1, 5),
    micro_batch=st.integers(1, 5),
    global_batch=st.integers(1, 24),
    validation=st.integers(1, 24),
    epochs=st.sampled_from([0.5, 1.0, 2.0, 2.5]),
)
def test_padding_notes_equal_loader_counts(
    num_samples: int,
    held_out: int,
    ranks: int,
    micro_batch: int,
    global_batch: int,
    validation: int,
    epochs: float,
) -> None:
    run = of(ranks, micro_batch, global_batch, validation, epochs)
    splits = DataSplits(numbered(num_samples), numbered(held_out))
    steps = run.num_steps(num_samples)
    batch_shares = [BatchShare(global_batch, micro_batch, rank, ranks) for rank in range(ranks)]
    validation_shares = [
        replace(batch_share, global_batch=validation) for batch_share in batch_shares
    ]
    step = [labelled(TrainLoader(splits.train, it, seed=1, steps=1)) for it in batch_shares]
    checks = [labelled(ValidationLoader(numbered(held_out), it)) for it in validation_shares]
    expected = {}
    for interval, counts in (("each step", step), ("each validation", checks)):
        num_read, real = (sum(column) for column in zip(*counts, strict=True))
        if num_read > real:
            expected[interval] = (
                real,
                num_read,
                num_read - real,
                f"{(num_read - real) / num_read:.1%}",
            )
    num_epoch_read = sum(
        labelled(TrainLoader(splits.train, it, seed=1, steps=steps))[1] for it in batch_shares
    )
    samples = int(np.ceil(epochs * num_samples))
    if num_epoch_read > samples:
        more = num_epoch_read - samples
        expected["all epochs"] = (samples, num_epoch_read, more, f"{more / num_epoch_read:.1%}")
    assert amounts(run, splits) == expected


def test_padding_has_no_note_without_padding() -> None:
    run = of(ranks=2, micro_batch=3, global_batch=12, validation=6, epochs=1)
    assert list(padding_notes(run, DataSplits(numbered(24), numbered(6)))) == []
    assert list(padding_notes(run)) == []


def test_padding_notes_of_a_plan_cover_steps_and_validation() -> None:
    """A plan reads no data, so that the number of samples per epoch is unknown."""
    run = of(ranks=2, micro_batch=3, global_batch=10, validation=16, epochs=1)
    assert list(amounts(run, None)) == ["each step", "each validation"]


def test_padding_note_suggests_a_batch_without_padding() -> None:
    run = of(ranks=2, micro_batch=3, global_batch=10, validation=6, epochs=1)
    (note,) = padding_notes(run)
    suggested_batch = int(note.partition("trainer.global_batch=")[2].split()[0])
    assert list(padding_notes(of(2, 3, suggested_batch, 6, 1))) == []


def test_padding_note_omits_absent_validation() -> None:
    run = of(ranks=2, micro_batch=3, global_batch=6, validation=16, epochs=1)
    run_without_validation = replace(run, trainer=replace(run.trainer, validate_every=None))
    assert list(padding_notes(run_without_validation)) == []
    assert list(padding_notes(run, DataSplits(numbered(6)))) == []
