"""Messages that a record has as JSON text are read as messages, with a note."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from fixtures.chat_records import ANSWER, FUNCTION, SHAREGPT_TURNS, USER

from scalewise.data.chat_formats import parse_conversation, parse_pair
from scalewise.data.chat_messages import RecordKeys
from scalewise.data.chat_templates import PlainTemplate

BAD = {"role": "assistant", "content": "bad"}
PAIRS: dict[str, dict[str, Any]] = {
    "conversations": {"chosen": [USER, ANSWER], "rejected": [USER, BAD]},
    "answers": {"prompt": "hello", "chosen": [ANSWER], "rejected": [BAD]},
    "turns": {"prompt": "hello", "chosen": ANSWER, "rejected": BAD},
    "prompt": {"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD]},
    "sharegpt": {
        "conversations": SHAREGPT_TURNS[:1],
        "chosen": SHAREGPT_TURNS[1],
        "rejected": {"from": "gpt", "value": "bad"},
    },
}


def sides(record: dict[str, Any], notes: Counter[str]) -> list[str]:
    pair = parse_pair(record, PlainTemplate("."), RecordKeys((), notes))
    return ["".join(segment.text for segment in side) for side in pair]


@pytest.mark.parametrize("name", PAIRS)
def test_preference_of_json_texts_is_read_as_its_messages(name: str) -> None:
    record, notes = PAIRS[name], Counter[str]()
    texts = {key: it if isinstance(it, str) else json.dumps(it) for key, it in record.items()}
    expected = [f"### User:\nhello\n\n### Assistant:\n{answer}." for answer in ("fine", "bad")]
    assert sides(record, notes) == expected
    assert not notes
    assert sides(texts, notes) == expected
    decoded = [key for key, value in record.items() if not isinstance(value, str)]
    assert notes == {f"JSON texts read as messages, in {key}": 1 for key in decoded}


@pytest.mark.parametrize("key", ["messages", "conversations", "conversation"])
def test_conversation_of_json_text_is_read_as_its_messages(key: str) -> None:
    notes: Counter[str] = Counter()
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": FUNCTION}]}
    for turns in ([USER, ANSWER], [USER, call]):
        parsed = parse_conversation({key: f" {json.dumps(turns)}\n"}, RecordKeys((), notes))
        assert [message.to_dict() for message in parsed.messages] == turns
    assert notes == {f"JSON texts read as messages, in {key}": 2}


@pytest.mark.parametrize(
    "answer",
    [
        '{"a": 1}',
        '[{"a": 1}]',
        "[]",
        '[{"role": "admin", "content": "x"}]',
        '{"role": "user"}',
        '[{"from": "Oslo", "value": 4}]',
        "{'role': 'user', 'content': 'x'} is a message in Python",
        '{"role": "user", "content": ',
        "[1, 2",
    ],
)
def test_answer_that_is_another_json_text_stays_a_text(answer: str) -> None:
    notes: Counter[str] = Counter()
    (chosen, _) = sides({"prompt": "hello", "chosen": answer, "rejected": "bad"}, notes)
    assert chosen.endswith(f"### Assistant:\n{answer}.")
    assert not notes


@pytest.mark.parametrize(
    "text",
    [
        str([USER, ANSWER]),
        f"array([{USER},\n       {ANSWER}], dtype=object)",
        f"[{USER}\n {ANSWER}]",
        '[{"role": "user", "content": "hello"}, {"role": "assistant" "content": "fine"}]',
        '[{"role": "user", "role": "user", "content": "hello"}]',
    ],
    ids=["python", "array", "numpy", "comma", "repeated key"],
)
def test_text_of_messages_that_is_not_json_is_rejected(text: str) -> None:
    record = {"prompt": "hello", "chosen": text, "rejected": "bad"}
    reason = "has messages as a text in {}, which is not JSON .*: write it with json.dumps"
    with pytest.raises(ValueError, match=reason.format("chosen")):
        sides(record, Counter())
    with pytest.raises(ValueError, match=reason.format("messages")):
        parse_conversation({"messages": text}, RecordKeys())


def test_text_without_messages_is_rejected_by_key() -> None:
    for value in ("hello", "5", 5, {"role": ["user"]}):
        with pytest.raises(ValueError, match="has no list of turns in messages"):
            parse_conversation({"messages": value}, RecordKeys())
