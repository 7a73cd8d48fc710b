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

SMALL: dict[str, Any] = {"vocabulary": 300, "sequence": 64, "validation_fraction": 0.2}


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([10, 10], [[0], [1]]),
        ([4, 6, 3, 7], [[0, 1], [2, 3]]),
        ([5, 4, 7, 3, 1], [[0, 1, 4], [2, 3]]),  # 3 leaves less room beside 7 than beside 5
        ([1] * 25, [list(range(10)), list(range(10, 20)), list(range(20, 25))]),
        ([], []),
    ],
)
def test_packing_is_best_fit(lengths: list[int], rows: list[list[int]]) -> None:
    assert best_fit_pack(np.array(lengths, dtype=np.int64), 10) == rows


@pytest.mark.parametrize("seed", range(5))
def test_packing_fills_few_sequences(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 101, 500)
    rows = best_fit_pack(lengths, 100)
    assert sorted(text for row in rows for text in row) == list(range(500))
    assert max(int(lengths[row].sum()) for row in rows) <= 100
    least = -(-int(lengths.sum()) // 100)
    assert len(rows) <= 11 / 9 * least + 4  # Johnson, 1973, of any decreasing fit
    assert rows == best_fit_pack(lengths, 100)


def stored(*texts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *map(len, texts)])
    return np.concatenate(texts).astype(np.int32), starts, np.arange(len(texts))


def test_packed_texts_are_complete_without_first_labels() -> None:
    rows = PackedTextDataset(
        *stored([~1, 2, 3], [4, 5], [6, ~7, 8, 9, 10, 11]), sequence=5, end_token=0
    )
    assert rows.gather([1]).tolist() == [[~(6 + FIRST_TOKEN_OFFSET), ~7, 8, 9, 10, 11]]
    assert rows.gather(np.array([0])).tolist() == [
        [~(1 + FIRST_TOKEN_OFFSET), 2, 3, ~(4 + FIRST_TOKEN_OFFSET), 5, ~0]
    ]
    assert rows.gather([0, 1]).tolist() == [*rows.gather([0]).tolist(), *rows.gather([1]).tolist()]


def test_packing_truncates_only_longer_texts() -> None:
    texts = [list(range(1, length + 1)) for length in (9, 6, 5, 1)]
    rows = PackedTextDataset(*stored(*texts), sequence=5, end_token=0)
    assert (len(rows), rows.truncated_texts) == (3, 1)
    batch = as_batch(rows.gather(range(3)), False, masked=True, packing=True)
    assert batch["inputs"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert batch["labels"].tolist()[2] == [2, 3, 4, 5, IGNORED]


def test_packed_positions_restart_with_each_text() -> None:
    rows = PackedTextDataset(*stored([1, 2, 3], [4, 5], [6]), sequence=7, end_token=0)
    (batch,) = ValidationLoader(rows, BatchShare(1, 2))
    assert batch["inputs"].tolist()[0] == [1, 2, 3, 4, 5, 6, 0]
    assert batch["labels"].tolist()[0] == [2, 3, IGNORED, 5, IGNORED, IGNORED, IGNORED]
    assert batch["positions"].tolist()[0] == [0, 1, 2, 0, 1, 0, 1]


def test_padding_sequence_is_one_text() -> None:
    rows = PackedTextDataset(*stored([1, 2, 3], [4, 5]), sequence=4, end_token=0)
    share = BatchShare(2, 2, ranks=2)
    batches = [next(iter(ValidationLoader(rows, BatchShare(1, 1, rank, 2)))) for rank in range(2)]
    assert share.has_masked_labels(rows)
    assert batches[1]["positions"].tolist() == [[0, 1, 2, 3]]
    assert (batches[1]["labels"] == IGNORED).all()


def test_sequences_of_one_text_have_no_positions() -> None:
    rows = PaddedDataset(*stored([1, 2, 3]), sequence=4, end_token=0)
    (batch,) = ValidationLoader(rows, BatchShare(1, 1))
    assert batch.keys() == {"inputs", "labels"}


def test_packing_reports_the_fraction_without_padding() -> None:
    texts = stored([1, 2, 3], [4, 5], [1, 2, 3, 4, 5, 6, 7])
    assert PaddedDataset(*texts, sequence=4, end_token=0).fill_ratio == pytest.approx(10 / 15)
    assert PackedTextDataset(*texts, sequence=4, end_token=0).fill_ratio == pytest.approx(10 / 10)
    ids_N = np.array([~1, ~2, 3, ~4, 5, 6, 7], np.int32)
    starts, rows = np.array([0, 3, 7]), np.array([0, 1])
    answered = Seq2SeqDataset(ids_N, starts, rows, sequence=4, end_token=0, target_length=2)
    assert answered.fill_ratio == pytest.approx((2 + 1 + 1 + 2) / 8)


def test_random_tokens_pack_several_texts() -> None:
    rows = RandomDataset(3, 50, 0, 20, 128, masked_fraction=0.3, packing=True)
    plain = RandomDataset(3, 50, 0, 20, 128)
    batch, expected = (
        as_batch(each.gather(range(20)), False, masked=each.masked, packing=each.packing)
        for each in (rows, plain)
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
    padded, packed = (
        prepare_splits(ChatData(paths=(str(path),), packing=packing, **SMALL), 300, 0)
        for packing in (False, True)
    )
    assert padded.note == ""
    assert padded.validation is not None
    assert packed.validation is not None
    for before, after in ((padded.train, packed.train), (padded.validation, packed.validation)):
        assert len(after) < len(before)
        ids, laid = (rows.gather(range(len(rows))) for rows in (before, after))
        said, told = (as_batch(it, False, masked=True)["labels"] for it in (ids, laid))
        for labels in (said, told):
            assert (labels != IGNORED).any()
        assert sorted(said[said >= 0].tolist()) == sorted(told[told >= 0].tolist())
    said = re.fullmatch(
        r"of (\d+) conversations, data.sequence=64: "
        r"packed into (\d+) sequences, ([\d.]+)% full \(one text each: ([\d.]+)%\)",
        packed.note,
    )
    assert said is not None
    assert (int(said[1]), int(said[2])) == (len(padded.train), len(packed.train))
    gained = len(padded.train) / len(packed.train)
    assert float(said[3]) / float(said[4]) == pytest.approx(gained, rel=0.01)
    assert float(said[3]) <= 100
