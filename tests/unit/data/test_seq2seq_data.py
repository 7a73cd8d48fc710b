"""Question-answer data: records, truncation and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.hf_checkpoints import NO_SEQUENCE_PARALLEL, RANDOM_LLAMA, RANDOM_T5
from fixtures.rejections import REJECTION_FIELDS, RejectionCase, assert_rejected, overrides_id
from tokenizers import Tokenizer

from scalewise.data.chat import Seq2SeqData
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.prepare import NO_TOKEN, DataSplits, prepare_splits
from scalewise.data.synthetic import RandomTokens
from scalewise.data.tokenizer import END_OF_TEXT as END
from scalewise.errors import DataError

DATA_OPTIONS: dict[str, Any] = {
    "vocabulary": 300,
    "sequence": 48,
    "target_length": 16,
    "validation_fraction": 0.0,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def prompt_of(path: Path, *records: object, **more: Any) -> Seq2SeqData:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    return Seq2SeqData(paths=(str(path),), **{**DATA_OPTIONS, **more})


def read(splits: DataSplits, index: int) -> tuple[str, str]:
    """Encoder inputs and answer of a sequence, including end tokens."""
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    (ids_S,) = splits.train.gather([index])
    (input_S, answer_T) = ids_S[:-16], ids_S[-16:]
    input_ids = (~input_S[input_S != NO_TOKEN]).tolist()
    answer = answer_T[answer_T >= 0].tolist()
    return tuple(tokenizer.decode(ids, skip_special_tokens=False) for ids in (input_ids, answer))


ALPACA = {"instruction": "Reverse.", "input": "abc", "output": "cba"}
SHORT_RECORD = {
    "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
}
LONG_RECORD = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
}


def test_seq2seq_question_and_answer_are_separate(tmp_path: Path) -> None:
    splits = prepare_splits(
        prompt_of(tmp_path / "a.jsonl", ALPACA, SHORT_RECORD, LONG_RECORD, sequence=96), 300, 0
    )
    assert splits.note == ""
    assert read(splits, 0) == ("Reverse.\n\nabc" + END, "cba" + END)
    assert read(splits, 1) == ("1+1" + END, "2" + END)
    before = f"### User:\na\n\n### Assistant:\nb{END}### User:\nc\n\n### Assistant:\n{END}"
    assert read(splits, 2) == (before, "d" + END)


def test_seq2seq_question_and_answer_are_truncated(tmp_path: Path) -> None:
    long = {"instruction": "why " * 90, "output": "so " * 90}
    splits = prepare_splits(prompt_of(tmp_path / "a.jsonl", long, SHORT_RECORD), 300, 0)
    (ids_S,) = splits.train.gather([0])
    assert len(ids_S) == 48
    assert (ids_S[:32] < 0).all()
    assert NO_TOKEN not in ids_S
    assert (ids_S[32:] >= 0).all()
    assert "of 2 conversations, data.sequence=48: 1 truncated" in splits.note


def test_seq2seq_records_without_question_are_named(tmp_path: Path) -> None:
    answer_only_record = {"messages": [{"role": "assistant", "content": "2"}]}
    with pytest.raises(
        DataError, match=r"not a valid question with an answer: a.jsonl:2 has no question"
    ):
        prepare_splits(prompt_of(tmp_path / "a.jsonl", SHORT_RECORD, answer_only_record), 300, 0)


def test_seq2seq_batches_mark_padding() -> None:
    splits = prepare_splits(
        RandomTokens(sequence=24, vocabulary=50, masked=0.3, target_length=8), 50, 1
    )
    loader = TrainLoader(splits.train, BatchShare(5, 2, 0, 2), seed=1, steps=1)
    first, second = loader
    for batch in (first, second):
        assert batch["inputs"].shape == (2, 16)
        assert batch["labels"].shape == (2, 8)
        assert batch["inputs"].min() == -1 or batch is second
    labels = sum((batch["labels"] != -100).sum() for batch in (first, second))
    assert first["labels_of_step"] == labels
    assert (second["labels"][1] == -100).all()  # a padding sample
    assert torch.equal(first["inputs"].clamp(min=0), first["inputs"] * (first["inputs"] >= 0))


SYNTHETIC_DATA = ("data=synthetic", "data.sequence=32", "data.target_length=8")
T5 = (*RANDOM_T5, "objective=seq2seq")
REJECTED_SEQ2SEQ_OPTIONS: list[RejectionCase] = [
    ([*T5], "data", "contains no encoder inputs", "data=seq2seq"),
    ([*RANDOM_T5, "data=corpus"], "model.path", "is an encoder-decoder model (t5)", "seq2seq"),
    ([*SYNTHETIC_DATA], "data", "contains encoder inputs", "objective=seq2seq"),
    (
        [*RANDOM_LLAMA, "objective=seq2seq", *SYNTHETIC_DATA],
        "model",
        "has no encoder",
        "such as T5",
    ),
    (["objective=seq2seq", *SYNTHETIC_DATA], "model", "has no encoder", "model=hf"),
    (
        [*T5, *SYNTHETIC_DATA[:2], "data.target_length=32"],
        "data.target_length",
        "must be positive and below",
        "data.target_length=8",
    ),
    (
        [*T5, *SYNTHETIC_DATA[:2], "data.target_length=0"],
        "data",
        "contains no encoder inputs",
        "data=seq2seq",
    ),
    (
        [*T5, *SYNTHETIC_DATA, "objective.loss_chunk=8"],
        "objective.loss_chunk",
        "not supported",
        "null",
    ),
    (
        [*T5, *SYNTHETIC_DATA, "parallelism=tensor", NO_SEQUENCE_PARALLEL],
        "parallelism.tensor",
        "transformers does not have for t5",
        "parallelism=fsdp",
    ),
    *(
        ([*T5, *SYNTHETIC_DATA, override], key, reason, fix)
        for override, key, reason, fix in (
            (
                "parallelism=context",
                "parallelism.context",
                "is not supported for Hugging Face models",
                "fsdp",
            ),
            (
                "parallelism=pipeline",
                "parallelism.pipeline",
                "is not supported for Hugging Face models",
                "fsdp",
            ),
            (
                "compile=block",
                "compile",
                "is not supported for encoder-decoder models",
                "compile=none",
            ),
            (
                "adapter=prompt",
                "adapter",
                "is not supported for Hugging Face models",
                "adapter=lora",
            ),
            ("data.packing=true", "data.packing", "not supported with", "data.packing=false"),
            ("data.pairs=true", "data.pairs", "not supported with", "data.pairs=false"),
        )
    ),
]


@pytest.mark.parametrize(REJECTION_FIELDS, REJECTED_SEQ2SEQ_OPTIONS, ids=overrides_id)
def test_seq2seq_rejects_incompatible_options(
    overrides: list[str], key: str, reason: str, fix: str
) -> None:
    assert_rejected(overrides, key, reason, fix)
