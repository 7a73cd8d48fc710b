"""Preference and encoder-decoder records: every key is read, noted or rejected."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fixtures.chat_records import (
    ANSWER,
    CALL,
    DATA_OPTIONS,
    SHAREGPT_TURNS,
    TOOL,
    USER,
    lines,
    system,
)
from tokenizers import Tokenizer

from scalewise.data.chat import PreferenceData, Seq2SeqData
from scalewise.data.chat_formats import parse_pair
from scalewise.data.chat_messages import TRANSCRIPT_NOTE, RecordKeys
from scalewise.data.chat_templates import PlainTemplate
from scalewise.data.prepare import prepare_splits
from scalewise.errors import DataError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def sides(record: dict[str, Any]) -> list[str]:
    texts = parse_pair(record, PlainTemplate("."), RecordKeys())
    return ["".join(chunk.text for chunk in chunks) for chunks in texts]


PREFERENCES = {
    "system": {"prompt": "hello", "chosen": "fine", "rejected": "bad", "system": "Arr."},
    "system of messages": {
        "prompt": [system("Arr."), USER],
        "chosen": [ANSWER],
        "rejected": [ANSWER | {"content": "bad"}],
    },
    "turns": {
        "conversations": SHAREGPT_TURNS[:1],
        "system": "Arr.",
        "chosen": {"from": "gpt", "value": "fine"},
        "rejected": {"from": "gpt", "value": "bad"},
    },
    "alpaca": {"instruction": "hello", "system": "Arr.", "chosen": "fine", "rejected": "bad"},
}


ULTRAFEEDBACK = {
    "prompt": "hello",
    "prompt_id": "x",
    "chosen": [USER, ANSWER],
    "rejected": [USER, ANSWER | {"content": "bad"}],
    "messages": [USER, ANSWER],
    "score_chosen": 9.0,
}


def test_preference_may_repeat_the_chosen_answer() -> None:
    expected_prompt = "### User:\nhello\n\n### Assistant:\n"
    assert sides(ULTRAFEEDBACK) == [f"{expected_prompt}fine.", f"{expected_prompt}bad."]
    assert sides({**ULTRAFEEDBACK, "prompt": None}) == sides(ULTRAFEEDBACK)


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_is_read_with_its_prompt(name: str) -> None:
    expected_prompt = "### System:\nArr.\n\n### User:\nhello\n\n### Assistant:\n"
    assert sides(PREFERENCES[name]) == [f"{expected_prompt}fine.", f"{expected_prompt}bad."]


@pytest.mark.parametrize(
    "prompt",
    [{"prompt": [USER, ANSWER]}, {"messages": [USER, ANSWER]}, {"conversations": SHAREGPT_TURNS}],
    ids=lambda prompt: next(iter(prompt)),
)
def test_preference_prompt_that_ends_with_an_answer_is_rejected(prompt: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"an answer at the end of its {next(iter(prompt))}"):
        sides(prompt | {"chosen": "fine", "rejected": "bad"})


def test_preference_prompt_that_is_a_transcript_is_noted() -> None:
    notes: Counter[str] = Counter()
    record = {"prompt": "\n\nHuman: hello\n\nAssistant:", "chosen": " fine", "rejected": " bad"}
    parse_pair(record, PlainTemplate("."), RecordKeys((), notes))
    assert notes == {TRANSCRIPT_NOTE: 1}


@pytest.mark.parametrize("filler", ["\n", " ", "assistant ", "\nAssistant:\n"])
def test_long_prompt_is_read_in_linear_time(filler: str) -> None:
    notes: Counter[str] = Counter()
    started = time.process_time()
    record = {"prompt": filler * 100_000 + "hello", "chosen": "fine", "rejected": "bad"}
    parse_pair(record, PlainTemplate("."), RecordKeys((), notes))
    assert time.process_time() - started < 5  # quadratic time: minutes
    assert not notes


def test_preference_has_its_history() -> None:
    expected_prefix = "### User:\na\n\n### Assistant:\nb.### User:\nhello"
    for name in ("alpaca", "system"):
        record = PREFERENCES[name] | {"history": [["a", "b"]]}
        assert all(expected_prefix in side for side in sides(record)), name


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tools": [TOOL]}, "has tools, which requires a chat template"),
        ({"persona": "pirate"}, "has persona, which is not supported"),
        ({"margin": 0.5}, "has margin, which is not supported"),
        ({"messages": [USER, ANSWER]}, "has messages, which is not supported"),
        ({"instruction": "other"}, "has instruction, which is not supported"),
        (
            {"chosen": [USER | {"content": "x"}, ANSWER], "rejected": [USER, ANSWER]},
            "has a prompt that is not part of its chosen",
        ),
        (
            {"chosen": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]},
            "has tool_calls, which requires a chat template",
        ),
    ],
)
def test_preference_with_unread_keys_is_rejected(more: dict[str, Any], reason: str) -> None:
    record = {"prompt": "hello", "chosen": "fine", "rejected": "bad"} | more
    with pytest.raises(ValueError, match=reason):
        sides(record)


def test_preference_metadata_is_noted(tmp_path: Path) -> None:
    record = {"prompt": "hello", "chosen": "fine", "rejected": "bad", "score_chosen": 9}
    splits = prepare_splits(PreferenceData(paths=lines(tmp_path, record), **DATA_OPTIONS), 300, 0)
    assert splits.note == "ignored key score_chosen, occurrences: 1"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"messages": [USER, ANSWER | {"reasoning_content": "hm"}]},
            "reasoning_content in its ans",
        ),
        ({"messages": [USER, ANSWER], "tools": [TOOL]}, "has tools, which requires"),
        (
            {"messages": [USER, ANSWER, USER, ANSWER | {"weight": 0}]},
            "training is disabled for the last one",
        ),
    ],
)
def test_seq2seq_record_with_unread_keys_is_rejected(
    record: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    data = Seq2SeqData(paths=lines(tmp_path, record), **DATA_OPTIONS)
    with pytest.raises(DataError, match=rf"a\.jsonl:1 .*{reason}"):
        prepare_splits(data, 300, 0)


def test_seq2seq_system_text_is_part_of_the_question(tmp_path: Path) -> None:
    record = {"instruction": "hello", "output": "fine", "system": "Arr."}
    splits = prepare_splits(Seq2SeqData(paths=lines(tmp_path, record), **DATA_OPTIONS), 300, 0)
    ids = [~token for token in splits.train.gather([0])[0].tolist() if token < 0]
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    assert "Arr." in tokenizer.decode([token for token in ids if token < 300])
