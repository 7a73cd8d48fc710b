"""Packing: placement of texts in sequences, positions and notes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalewise.data.chat import ChatData
from scalewise.data.dataloader import BatchShare, ValidationLoader, as_batch
from scalewise.data.datasets import PackedTextDataset, PaddedDataset, Seq2SeqDataset, best_fit_pack
from scalewise.data.prepare import FIRST_TOKEN_OFFSET, prepare_splits
from scalewise.data.synthetic_datasets import RandomDataset
from scalewise.objectives import IGNORED

DATA_OPTIONS: dict[str, Any] = {"vocabulary": 300, "sequence": 64, "validation_fraction": 0.2}


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10, 10], [[0], [1]]),
        ([4, 6, 3, 7], [[0, 1], [2, 3]]),
        ([5, 4, 7, 3, 1], [[0, 1, 4], [2, 3]]),  # 3 fits 7 with less remaining space than 5
        ([1] * 25, [list(range(10)), list(range(10, 20)), list(range(20, 25))]),
        ([], []),
    ],
)
def test_packing_is_best_fit(lengths: list[int], expected: list[list[int]]) -> None:
    assert best_fit_pack(np.array(lengths, dtype=np.int64), 10) == expected


@pytest.mark.parametrize("seed", range(5))
def test_packing_fills_few_sequences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 101, 500)
    bins = best_fit_pack(lengths, 100)
    assert sorted(text for bin_lengths in bins for text in bin_lengths) == list(range(500))
    assert max(int(lengths[bin_lengths].sum()) for bin_lengths in bins) <= 100
    lower_bound = -(-int(lengths.sum()) // 100)
    assert len(bins) <= 11 / 9 * lower_bound + 4  # Johnson, 1973, bound of decreasing fits
    assert bins == best_fit_pack(lengths, 100)


def stored(*texts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *map(len, texts)])
    return np.concatenate(texts).astype(np.int32), starts, np.arange(len(texts))


def test_packed_texts_are_complete_without_first_labels() -> None:
    dataset = PackedTextDataset(
        *stored([~1, 2, 3], [4, 5], [6, ~7, 8, 9, 10, 11]), sequence=5, end_token=0
    )
    assert dataset.gather([1]).tolist() == [[~(6 + FIRST_TOKEN_OFFSET), ~7, 8, 9, 10, 11]]
    assert dataset.gather(np.array([0])).tolist() == [
        [~(1 + FIRST_TOKEN_OFFSET), 2, 3, ~(4 + FIRST_TOKEN_OFFSET), 5, ~0]
    ]
    assert dataset.gather([0, 1]).tolist() == [
        *dataset.gather([0]).tolist(),
        *dataset.gather([1]).tolist(),
    ]


def test_packing_truncates_only_longer_texts() -> None:
    texts = [list(range(1, length + 1)) for length in (9, 6, 5, 1)]
    dataset = PackedTextDataset(*stored(*texts), sequence=5, end_token=0)
    assert (len(dataset), dataset.truncated_texts) == (3, 1)
    batch = as_batch(dataset.gather(range(3)), False, masked=True, packing=True)
    assert batch["inputs"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert batch["labels"].tolist()[2] == [2, 3, 4, 5, IGNORED]


def test_packed_positions_restart_with_each_text() -> None:
    dataset = PackedTextDataset(*stored([1, 2, 3], [4, 5], [6]), sequence=7, end_token=0)
    (batch,) = ValidationLoader(dataset, BatchShare(1, 2))
    assert batch["inputs"].tolist()[0] == [1, 2, 3, 4, 5, 6, 0]
    assert batch["labels"].tolist()[0] == [2, 3, IGNORED, 5, IGNORED, IGNORED, IGNORED]
    assert batch["positions"].tolist()[0] == [0, 1, 2, 0, 1, 0, 1]


def test_padding_sequence_is_one_text() -> None:
    dataset = PackedTextDataset(*stored([1, 2, 3], [4, 5]), sequence=4, end_token=0)
    batch_share = BatchShare(2, 2, ranks=2)
    batches = [
        next(iter(ValidationLoader(dataset, BatchShare(1, 1, rank, 2)))) for rank in range(2)
    ]
    assert batch_share.has_masked_labels(dataset)
    assert batches[1]["positions"].tolist() == [[0, 1, 2, 3]]
    assert (batches[1]["labels"] == IGNORED).all()


def test_sequences_of_one_text_have_no_positions() -> None:
    dataset = PaddedDataset(*stored([1, 2, 3]), sequence=4, end_token=0)
    (batch,) = ValidationLoader(dataset, BatchShare(1, 1))
    assert batch.keys() == {"inputs", "labels"}


def test_packing_reports_the_fraction_without_padding() -> None:
    texts = stored([1, 2, 3], [4, 5], [1, 2, 3, 4, 5, 6, 7])
    assert PaddedDataset(*texts, sequence=4, end_token=0).fill_ratio == pytest.approx(10 / 15)
    assert PackedTextDataset(*texts, sequence=4, end_token=0).fill_ratio == pytest.approx(10 / 10)
    ids_N = np.array([~1, ~2, 3, ~4, 5, 6, 7], np.int32)
    starts, sequence_indices = np.array([0, 3, 7]), np.array([0, 1])
    dataset = Seq2SeqDataset(
        ids_N, starts, sequence_indices, sequence=4, end_token=0, target_length=2
    )
    assert dataset.fill_ratio == pytest.approx((2 + 1 + 1 + 2) / 8)


def test_random_tokens_pack_several_texts() -> None:
    dataset = RandomDataset(3, 50, 0, 20, 128, masked_fraction=0.3, packing=True)
    unpacked = RandomDataset(3, 50, 0, 20, 128)
    batch, expected = (
        as_batch(
            tokens_dataset.gather(range(20)),
            False,
            masked=tokens_dataset.masked,
            packing=tokens_dataset.packing,
        )
        for tokens_dataset in (dataset, unpacked)
    )
    assert (batch["inputs"] == expected["inputs"]).all()
    assert 40 < int((batch["positions"] == 0).sum()) < 160
    masked = batch["labels"] == IGNORED
    assert (batch["labels"] == expected["labels"])[~masked].all()
    assert masked[:, :-1][batch["positions"][:, 1:] == 0].all()


def test_packing_note_reports_the_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.jsonl"
    records = [{"instruction": f"Say {n}.", "output": f"{n} " * (n % 9)} for n in range(1, 40)]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records if record["output"]))
    padded_splits, packed_splits = (
        prepare_splits(ChatData(paths=(str(path),), packing=packing, **DATA_OPTIONS), 300, 0)
        for packing in (False, True)
    )
    assert padded_splits.note == ""
    assert padded_splits.validation is not None
    assert packed_splits.validation is not None
    for before, after in (
        (padded_splits.train, packed_splits.train),
        (padded_splits.validation, packed_splits.validation),
    ):
        assert len(after) < len(before)
        ids, packed_ids = (dataset.gather(range(len(dataset))) for dataset in (before, after))
        note_match, packed_labels = (
            as_batch(it, False, masked=True)["labels"] for it in (ids, packed_ids)
        )
        for labels in (note_match, packed_labels):
            assert (labels != IGNORED).any()
        assert sorted(note_match[note_match >= 0].tolist()) == sorted(
            packed_labels[packed_labels >= 0].tolist()
        )
    note_match = re.fullmatch(
        r"of (\d+) conversations, data.sequence=64: "
        r"packed into (\d+) sequences, ([\d.]+)% full \(one text each: ([\d.]+)%\)",
        packed_splits.note,
    )
    assert note_match is not None
    assert (int(note_match[1]), int(note_match[2])) == (
        len(padded_splits.train),
        len(packed_splits.train),
    )
    gain = len(padded_splits.train) / len(packed_splits.train)
    assert float(note_match[3]) / float(note_match[4]) == pytest.approx(gain, rel=0.01)
    assert float(note_match[3]) <= 100
