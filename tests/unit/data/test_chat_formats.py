"""Records of conversations: every key is read, noted or rejected."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import date
from typing import Any

import pytest
from fixtures.chat_records import (
    ANSWER,
    CALL,
    FUNCTION,
    SHAREGPT_TURNS,
    TOOL,
    USER,
    read_record,
    system,
)

from scalewise.data.chat_formats import parse_conversation
from scalewise.data.chat_messages import ROLES, RecordKeys


def tables(record: dict[str, Any], *ignored: str) -> list[dict[str, Any]]:
    return [message.to_dict() for message in read_record(record, *ignored).messages]


RECORDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "sharegpt system": (
        {"conversations": SHAREGPT_TURNS, "system": "Arr."},
        [system("Arr."), USER, ANSWER],
    ),
    "sharegpt empty system": ({"conversations": SHAREGPT_TURNS, "system": ""}, [USER, ANSWER]),
    "openai system": (
        {"messages": [USER, ANSWER], "system": "Arr."},
        [system("Arr."), USER, ANSWER],
    ),
    "same system twice": (
        {"messages": [system("Arr."), USER, ANSWER], "system": "Arr."},
        [system("Arr."), USER, ANSWER],
    ),
    "alpaca without instruction": (
        {"instruction": None, "input": "hello", "output": "fine"},
        [USER, ANSWER],
    ),
    "alpaca with blank input": (
        {"instruction": "hello", "input": " \n", "output": "fine"},
        [USER, ANSWER],
    ),
    "no calls as text": (
        {"messages": [USER, ANSWER | {"tool_calls": "[]", "channel": "final"}]},
        [USER, ANSWER],
    ),
    "null call as text": ({"messages": [USER, ANSWER | {"function_call": "null"}]}, [USER, ANSWER]),
    "alpaca history": (
        {"instruction": "hello", "output": "fine", "history": [["a", "b"], ["c", "d"]]},
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
            USER,
            ANSWER,
        ],
    ),
    "alpaca system and history": (
        {
            "instruction": "a",
            "input": "b",
            "output": "fine",
            "system": "Arr.",
            "history": [["x", "y"]],
        },
        [
            system("Arr."),
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "a\n\nb"},
            ANSWER,
        ],
    ),
    "tool calls": (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
    ),
    "old function call": (
        {"messages": [USER, {"role": "assistant", "content": None, "function_call": FUNCTION}]},
        [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": FUNCTION}]}],
    ),
    "sharegpt function call": (
        {
            "conversations": [
                SHAREGPT_TURNS[0],
                {"from": "function_call", "value": json.dumps(FUNCTION)},
                {"from": "observation", "value": "4"},
                SHAREGPT_TURNS[1],
            ]
        },
        [
            USER,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": FUNCTION}]},
            {"role": "tool", "content": "4"},
            ANSWER,
        ],
    ),
    "tool": (
        {"messages": [USER, {"role": "tool", "content": "4", "tool_call_id": "c1"}, ANSWER]},
        [USER, {"role": "tool", "content": "4", "tool_call_id": "c1"}, ANSWER],
    ),
    "reasoning": (
        {"messages": [USER, ANSWER | {"reasoning": "hm"}]},
        [USER, ANSWER | {"reasoning_content": "hm"}],
    ),
    "thinking": (
        {"messages": [USER, ANSWER | {"thinking": "hm"}]},
        [USER, ANSWER | {"reasoning_content": "hm"}],
    ),
    "names": ({"messages": [USER | {"name": "Ann"}, ANSWER]}, [USER | {"name": "Ann"}, ANSWER]),
    "developer": (
        {"messages": [{"role": "developer", "content": "Arr."}, USER, ANSWER]},
        [{"role": "developer", "content": "Arr."}, USER, ANSWER],
    ),
    "parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hel"}, "lo"]},
                ANSWER,
            ]
        },
        [USER, ANSWER],
    ),
    "nulls": (
        {
            "messages": [USER | {"tool_calls": None, "name": None}, ANSWER | {"weight": None}],
            "tools": None,
        },
        [USER, ANSWER],
    ),
    "system prompt": (
        {"conversations": SHAREGPT_TURNS, "system_prompt": "Arr."},
        [system("Arr."), USER, ANSWER],
    ),
    "conversation": ({"conversation": [USER, ANSWER]}, [USER, ANSWER]),
    "roles in conversations": ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_chat_records_are_read(name: str) -> None:
    record, expected = RECORDS[name]
    assert tables(record) == expected


def test_chat_documents_and_template_variables_are_read() -> None:
    more = {"documents": [{"title": "a", "text": "b"}], "chat_template_kwargs": {"thinking": True}}
    parsed = read_record({"messages": [USER, ANSWER]} | more)
    assert parsed.documents == more["documents"]
    assert parsed.variables == {"thinking": True}


@pytest.mark.parametrize(
    ("switch", "train"),
    [
        ({"weight": 0}, False),
        ({"weight": 1}, True),
        ({"weight": 1.0}, True),
        ({"train": False}, False),
        ({"train": True}, True),
        ({"training": False}, False),
        ({"weight": 0, "train": False}, False),
        ({}, True),
    ],
)
def test_chat_answer_flags_are_read(switch: dict[str, Any], train: bool) -> None:
    messages = read_record({"messages": [USER, ANSWER | switch, USER, ANSWER]}).messages
    assert [message.train for message in messages if message.role == "assistant"] == [train, True]


REJECTED_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (
        {"messages": [USER, ANSWER], "persona": "pirate"},
        "has persona, which is not supported",
    ),
    "key of a turn": ({"messages": [USER, ANSWER | {"audio": {"id": 1}}]}, "has audio, which"),
    "refusal": (
        {"messages": [USER, ANSWER | {"refusal": "no"}]},
        "has refusal, which is not supported",
    ),
    "weight of a record": ({"messages": [USER, ANSWER], "weight": 0.5}, "has weight, which"),
    "half a weight": ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "weight is not 0 or 1"),
    "switches differ": (
        {"messages": [USER, ANSWER | {"weight": 0, "train": True}]},
        "weight and train is not",
    ),
    "a question to train on": (
        {"messages": [USER | {"train": True}, ANSWER]},
        "has a turn of 'user' to train on",
    ),
    "all off": ({"messages": [USER, ANSWER | {"weight": 0}]}, "training is disabled for all"),
    "two systems": (
        {"messages": [system("a"), USER, ANSWER], "system": "b"},
        "has a system, and a different one",
    ),
    "picture": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
                ANSWER,
            ]
        },
        "a part of type 'image_url'",
    ),
    "pictures": (
        {"messages": [USER, ANSWER], "images": ["a.png"]},
        "has images, which is not supported",
    ),
    "empty answer": (
        {"messages": [USER, ANSWER | {"content": ""}, USER, ANSWER]},
        "has an empty answer",
    ),
    "no content": ({"messages": [USER, {"role": "assistant"}]}, "a turn without a text"),
    "a call without a name": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "a tool call without a function name",
    ),
    "a call that is no JSON": (
        {"conversations": [SHAREGPT_TURNS[0], {"from": "function_call", "value": "weather()"}]},
        "has a function_call that is not JSON",
    ),
    "tools that are no JSON": (
        {"conversations": SHAREGPT_TURNS, "tools": "weather"},
        "has tools that is not JSON",
    ),
    "calls of a user": (
        {"messages": [USER | {"tool_calls": [CALL]}, ANSWER]},
        "has tool_calls, which is not supported",
    ),
    "history of texts": (
        {"instruction": "a", "output": "b", "history": ["x"]},
        "has a history that is not a list of pairs",
    ),
    "two texts of a turn": (
        {"messages": [USER | {"value": "other"}, ANSWER]},
        "different values in content and value",
    ),
    "two lists": (
        {"messages": [USER, ANSWER], "conversations": SHAREGPT_TURNS[:1]},
        "has conversations, which",
    ),
    "channel of a turn": (
        {"messages": [USER, ANSWER | {"channel": "analysis"}]},
        "a turn in the channel 'analysis'",
    ),
    "different tools": (
        {"messages": [USER, ANSWER], "tools": [TOOL], "functions": [{"name": "other"}]},
        "different lists in tools and functions",
    ),
    "time in tools": (
        {"messages": [USER, ANSWER], "tools": [{"name": "a", "since": date(2026, 1, 1)}]},
        "has tools that cannot be written as JSON",
    ),
    "bytes in a call": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "a", "x": b"y"}]}]},
        "has tool_calls that cannot be written as JSON",
    ),
    "surrogate in tools": (
        {"messages": [USER, ANSWER], "tools": [{"name": "\ud83d"}]},
        "has a lone surrogate",
    ),
    "surrogate in a call": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "\ud83d"}]}]},
        "has a lone surrogate",
    ),
}


@pytest.mark.parametrize("name", REJECTED_RECORDS)
def test_chat_records_with_unknown_keys_are_rejected(name: str) -> None:
    record, reason = REJECTED_RECORDS[name]
    with pytest.raises(ValueError, match=reason):
        read_record(record)


def test_chat_metadata_is_counted_and_ignored_on_request() -> None:
    notes: Counter[str] = Counter()
    keys = RecordKeys(["persona", "history"], notes)
    record = {"messages": [USER | {"id": 7}, ANSWER], "source": "web", "toxic": False, "id": "x"}
    parse_conversation(record | {"persona": "pirate"}, keys)
    alpaca = {"instruction": "a", "output": "b", "history": [["c", "d"]]}
    assert [message.text for message in parse_conversation(alpaca, keys).messages] == ["a", "b"]
    assert notes == {
        f"ignored key {key}, occurrences": count
        for key, count in (("id", 2), ("source", 1), ("toxic", 1), ("persona", 1), ("history", 1))
    }


def test_chat_text_that_repeats_the_messages_is_ignored() -> None:
    assert tables({"messages": [USER, ANSWER], "prompt": "hello"}) == [USER, ANSWER]
    alpaca_text = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nhello\n\n### Response:\nfine"
    )
    alpaca = {"instruction": "hello", "input": "", "output": "fine", "text": alpaca_text}
    assert tables(alpaca) == [USER, ANSWER]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": "other"},
        {"prompt": "hell"},
        {"text": "Below is an instruction.\n\nhello\n\nResponse: fine"},
        {"text": "hello fine"},
        {"system_message": "fin"},
        {"context": "hello, fine: what came before"},
        {"custom_instruction": "Talk like a sailor."},
        {"custom_instructions": "hello"[:4]},
    ],
)
def test_chat_text_that_differs_from_the_messages_is_rejected(more: dict[str, Any]) -> None:
    (key,) = more
    for record in (
        {"messages": [USER, ANSWER]},
        {"instruction": "hello", "input": "", "output": "fine"},
    ):
        with pytest.raises(ValueError, match=f"has {key}, which is not supported"):
            read_record(record | more)
        read_record(record | more, key)


@pytest.mark.parametrize(
    "switch",
    [
        {"is_target": 0},
        {"ignore": True},
        {"skip": True},
        {"supervised": False},
        {"include": False},
        {"exclude": 1},
        {"prefix": True},
        {"enable_thinking": False},
        {"excluded_score": True},
        {"selected": 1.0},
        {"loss_count": 0},
        {"trainIndex": 1},
    ],
)
def test_chat_unknown_flags_and_numbers_are_rejected(switch: dict[str, Any]) -> None:
    (key,) = switch
    fix = re.escape(f"(set 'data.ignore_keys=[{key}]' to ignore it)")
    for record in (
        {"messages": [USER, ANSWER | switch, USER, ANSWER]},
        {"messages": [USER, ANSWER]} | switch,
        {"instruction": "a", "output": "b"} | switch,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"} | switch]},
                ANSWER,
            ]
        },
    ):
        with pytest.raises(ValueError, match=f"has {key}, which is not supported {fix}"):
            read_record(record)
        read_record(record, key)


@pytest.mark.parametrize(
    "key",
    ["id", "turn_index", "created_at", "timestamp", "score_chosen", "num_tokens", "answerScore",
     "n_words", "rank", "messageId", "token_count", "time-ms", "seed"],
)  # fmt: skip
def test_chat_numeric_metadata_is_noted(key: str) -> None:
    notes: Counter[str] = Counter()
    record = {"messages": [USER, ANSWER | {key: 0.5}], key: 3}
    parse_conversation(record, RecordKeys((), notes))
    assert notes == {f"ignored key {key}, occurrences": 2}


@pytest.mark.parametrize("name", ROLES)
def test_chat_role_aliases_are_read(name: str) -> None:
    text = json.dumps(FUNCTION) if name == "function_call" else "text"
    messages = read_record(
        {"conversations": [{"from": name, "value": text}, *SHAREGPT_TURNS]}
    ).messages
    assert messages[0].role == ROLES[name]
