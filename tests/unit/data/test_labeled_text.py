"""Labeled texts: records, label positions and invalid records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from scalewise.data.chat import LabeledText
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.stdlib_corpus import StdlibCorpusClasses
from scalewise.errors import DataError

DATA_OPTIONS: dict[str, Any] = {"vocabulary": 300, "sequence": 16, "validation_fraction": 0.0}
CLASSES = ("no", "yes")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def labelled(path: Path, *records: object, **more: Any) -> LabeledText:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    return LabeledText(paths=(str(path),), classes=CLASSES, **{**DATA_OPTIONS, **more})


def read(splits: DataSplits, index: int) -> tuple[str, int]:
    """Text before the label of a sequence, and the label."""
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    (ids_S,) = splits.train.gather([index])
    (position,) = np.flatnonzero(ids_S >= 0)
    return tokenizer.decode((~ids_S[:position]).tolist()), int(ids_S[position])


def test_label_follows_its_text(tmp_path: Path) -> None:
    texts = (
        {"text": "fine", "label": "yes"},
        {"text": "bad", "label": 0},
        {"text": "w", "label": 1},
    )
    splits = prepare_splits(labelled(tmp_path / "a.jsonl", *texts), 300, 0)
    assert [read(splits, index) for index in range(3)] == [("fine", 1), ("bad", 0), ("w", 1)]


def test_labeled_text_is_truncated_at_its_end(tmp_path: Path) -> None:
    text = " ".join(map(str, range(50)))
    splits = prepare_splits(labelled(tmp_path / "a.jsonl", {"text": text, "label": "yes"}), 300, 0)
    (ids_S,) = splits.train.gather([0])
    assert ids_S[-1] == 1
    assert (ids_S[:-1] < 0).all()
    assert text.startswith(read(splits, 0)[0])
    assert "1 truncated" in splits.note


def test_labeled_text_cache_depends_on_keys_and_classes(tmp_path: Path) -> None:
    record = {"text": "fine", "label": "yes", "body": "well", "stars": "no"}
    first = labelled(tmp_path / "a.jsonl", record)
    renamed_spec = replace(first, text="body", label="stars")
    reclassed_spec = replace(first, classes=("yes", "no"))
    samples = [
        read(prepare_splits(spec, 300, 0), 0) for spec in (first, renamed_spec, reclassed_spec)
    ]
    assert samples == [("fine", 1), ("well", 0), ("fine", 0)]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "fine"}, "has no label; its keys: text"),
        ({"label": "yes"}, "has no text; its keys: label"),
        ({"text": " ", "label": "yes"}, "has no text in text"),
        ({"text": 3, "label": "yes"}, "has no text in text"),
        (
            {"text": "fine", "label": "maybe"},
            "has class 'maybe', which is not one of data.classes: no, yes",
        ),
        ({"text": "fine", "label": 2}, "has class 2, which is not one of data.classes: no, yes"),
        (
            {"text": "fine", "label": True},
            "has class True, which is not one of data.classes: no, yes",
        ),
    ],
)
def test_labeled_text_bad_records_are_named_or_skipped(
    record: object, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = labelled(tmp_path / "a.jsonl", {"text": "fine", "label": "yes"}, record)
    with pytest.raises(
        DataError, match="1 record that is not a valid text of a known class"
    ) as excinfo:
        prepare_splits(spec, 300, 0)
    assert f"a.jsonl:2 {reason}" in str(excinfo.value)
    assert len(prepare_splits(replace(spec, max_bad_rows=1), 300, 0).train) == 1
    assert "skipped 1 record" in capsys.readouterr().err


@pytest.mark.parametrize("classes", [(), ("one",), ("no", "no")])
def test_labeled_text_requires_two_classes(classes: tuple[str, ...], tmp_path: Path) -> None:
    spec = replace(labelled(tmp_path / "a.jsonl"), classes=classes)
    assert [issue.key for issue in spec.validate()] == ["data.classes"]


def test_labeled_text_sample_is_one_text(tmp_path: Path) -> None:
    spec = replace(labelled(tmp_path / "a.jsonl"), packing=True)
    assert [issue.key for issue in spec.validate()] == ["data.packing"]


def test_embedded_classes_are_balanced() -> None:
    splits = prepare_splits(StdlibCorpusClasses(vocabulary=300, megabytes=1.0), 300, 0)
    assert splits.validation is not None
    ids_BS = splits.train.gather(range(len(splits.train)))
    labels_B = ids_BS[ids_BS >= 0]
    assert len(labels_B) == len(ids_BS)
    assert 0.4 < labels_B.mean() < 0.6
    assert len(splits.train) > 5 * len(splits.validation) > 0


def test_labeled_text_gets_special_tokens(tmp_path: Path) -> None:
    words = {word: index for index, word in enumerate(["[CLS]", "[SEP]", "[UNK]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    tokenizer.save(str(tmp_path / "own.json"))
    tokenizer_options = {"tokenizer": str(tmp_path / "own.json"), "end_of_text": "[SEP]"}
    splits = prepare_splits(
        labelled(tmp_path / "a.jsonl", {"text": "b a", "label": "yes"}, **tokenizer_options), 5, 0
    )
    (ids_S,) = splits.train.gather([0])
    assert [~ids_S[at] for at in range(4)] == tokenizer.encode("b a").ids == [0, 4, 3, 1]
    assert ids_S[4] == 1
