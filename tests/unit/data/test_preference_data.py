"""Preference pairs: records, label masks and invalid records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from scalewise.data.chat import PreferenceData
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.stdlib_corpus import StdlibCorpusPairs
from scalewise.data.tokenizer import END_OF_TEXT
from scalewise.errors import DataError

DATA_OPTIONS: dict[str, Any] = {"vocabulary": 300, "sequence": 128, "validation_fraction": 0.0}
TEXTS = {"prompt": "Add 2 and 2.", "chosen": "4", "rejected": "five"}
QUESTION, CHOSEN, REJECTED = (
    {"role": role, "content": text}
    for role, text in (("user", "Add 2 and 2."), ("assistant", "4"), ("assistant", "five"))
)
FOLLOW_UP = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
SHAPES = {
    "texts": TEXTS,
    "messages": {"prompt": [QUESTION], "chosen": [CHOSEN], "rejected": [REJECTED]},
    "whole": {"chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]},
    "ultrafeedback": {
        "prompt": "Add 2 and 2.",
        "chosen": [QUESTION, CHOSEN],
        "rejected": [QUESTION, REJECTED],
    },
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def lines(path: Path, *records: object) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    return str(path)


def read(splits: DataSplits, index: int = 0) -> list[tuple[str, str]]:
    """Text of both sequences of a pair, and text of their labels."""
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    pairs = []
    for ids_S in splits.train.gather([index])[0]:
        token_ids = np.where(ids_S < 0, ~ids_S, ids_S)
        labels = ids_S[1:][ids_S[1:] >= 0]
        decoded_text, label_text = (
            tokenizer.decode(it.tolist(), skip_special_tokens=False) for it in (token_ids, labels)
        )
        pairs.append((decoded_text.replace(END_OF_TEXT, ""), label_text.removesuffix(END_OF_TEXT)))
    return pairs


@pytest.mark.parametrize("shape", SHAPES)
def test_preference_formats_are_detected_and_only_answers_are_labels(
    shape: str, tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", SHAPES[shape])
    splits = prepare_splits(PreferenceData(paths=(path,), **DATA_OPTIONS), 300, 0)
    expected_prompt = "### User:\nAdd 2 and 2.\n\n### Assistant:\n"
    assert read(splits) == [(f"{expected_prompt}4", "4"), (f"{expected_prompt}five", "five")]


def test_preference_common_prefix_is_the_prompt(tmp_path: Path) -> None:
    last = {"role": "assistant", "content": "No."}
    record = {
        "chosen": [QUESTION, CHOSEN, *FOLLOW_UP],
        "rejected": [QUESTION, CHOSEN, FOLLOW_UP[0], last],
    }
    path = lines(tmp_path / "a.jsonl", record)
    splits = prepare_splits(PreferenceData(paths=(path,), **DATA_OPTIONS), 300, 0)
    assert [label_text for _, label_text in read(splits)] == ["Yes.", "No."]


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_preference_reads_every_file_type(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    records = [SHAPES["whole"], SHAPES["whole"]]
    if suffix == "json":
        path.write_text(json.dumps(records))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    splits = prepare_splits(PreferenceData(paths=(str(path),), **DATA_OPTIONS), 300, 0)
    assert len(splits.train) == 2
    assert [label_text for _, label_text in read(splits, 1)] == ["4", "five"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "Add.", "chosen": "4"}, "has no rejected; its keys: prompt, chosen"),
        ({"chosen": "4", "rejected": "5"}, "has an answer that is a text, and no prompt"),
        ({**TEXTS, "rejected": "4"}, "does not have two different answers to one prompt"),
        (
            {"chosen": [QUESTION, CHOSEN], "rejected": [FOLLOW_UP[0], REJECTED]},
            "does not have two different answers to one prompt",
        ),
        ({**TEXTS, "chosen": [QUESTION]}, "has no answer"),
        ({**TEXTS, "chosen": 4}, "has no list of turns"),
        ({**TEXTS, "prompt": 4}, "has no list of turns"),
        ({**TEXTS, "chosen": " "}, "has no answer"),
        ([TEXTS], "is not an object"),
    ],
)
def test_preference_bad_records_are_named_or_skipped(
    record: object, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "a.jsonl", TEXTS, record)
    with pytest.raises(DataError, match="1 record that is not a valid pair of answers") as excinfo:
        prepare_splits(PreferenceData(paths=(path,), **DATA_OPTIONS), 300, 0)
    assert f"a.jsonl:2 {reason}" in str(excinfo.value)
    splits = prepare_splits(PreferenceData(paths=(path,), max_bad_rows=1, **DATA_OPTIONS), 300, 0)
    assert len(splits.train) == 1
    assert "skipped 1 record" in capsys.readouterr().err


def test_preference_answers_must_begin_within_the_sequence(tmp_path: Path) -> None:
    long = " ".join(map(str, range(100)))
    path = lines(tmp_path / "a.jsonl", TEXTS, {**TEXTS, "prompt": long}, {**TEXTS, "chosen": long})
    splits = prepare_splits(
        PreferenceData(paths=(path,), **{**DATA_OPTIONS, "sequence": 40}), 300, 0
    )
    assert len(splits.train) == 2
    assert long.startswith(read(splits, 1)[0][1])


def test_preference_requires_enough_embedded_text() -> None:
    with pytest.raises(DataError, match=r"split has no pair; increase data\.megabytes"):
        prepare_splits(StdlibCorpusPairs(vocabulary=300, megabytes=0.001), 300, 0)


def test_embedded_pairs_have_the_same_words() -> None:
    splits = prepare_splits(StdlibCorpusPairs(vocabulary=300, megabytes=1.0, sequence=1000), 300, 0)
    assert splits.validation is not None
    for index in range(20):
        (chosen, label_text), (rejected, other) = read(splits, index)
        assert chosen.split("### Assistant:")[0] == rejected.split("### Assistant:")[0], index
        assert sorted(label_text.split()) == sorted(other.split()), index
        assert label_text != other, index
    assert len(splits.train) > 5 * len(splits.validation) > 0
