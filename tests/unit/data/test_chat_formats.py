"""Records of conversations and preferences: every key is read, noted or rejected."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from fixtures.chat_templates import CHATML, GEMMA, PARTS, TOKENIZERS, write_tokenizer
from pyarrow import parquet
from tokenizers import Tokenizer

from scalewise.data import chat_templates
from scalewise.data.chat import ChatData, PreferenceData, Seq2SeqData
from scalewise.data.chat_formats import parse_conversation, parse_pair
from scalewise.data.chat_messages import ROLES, Conversation, RecordKeys
from scalewise.data.chat_templates import PlainTemplate
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.errors import DataError

USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
TOOL = {"name": "weather", "description": "tells it", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": TOOL}
TALK = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine"}]
SMALL: dict[str, Any] = {"vocabulary": 300, "sequence": 128, "validation_fraction": 0.0}


def read(record: dict[str, Any], *ignored: str) -> Conversation:
    return parse_conversation(record, RecordKeys(ignored))


def tables(record: dict[str, Any], *ignored: str) -> list[dict[str, Any]]:
    return [message.to_dict() for message in read(record, *ignored).messages]


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


READ: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "sharegpt system": ({"conversations": TALK, "system": "Arr."}, [system("Arr."), USER, ANSWER]),
    "sharegpt empty system": ({"conversations": TALK, "system": ""}, [USER, ANSWER]),
    "openai system": (
        {"messages": [USER, ANSWER], "system": "Arr."},
        [system("Arr."), USER, ANSWER],
    ),
    "same system twice": (
        {"messages": [system("Arr."), USER, ANSWER], "system": "Arr."},
        [system("Arr."), USER, ANSWER],
    ),
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
                TALK[0],
                {"from": "function_call", "value": json.dumps(FUNCTION)},
                {"from": "observation", "value": "4"},
                TALK[1],
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
        {"conversations": TALK, "system_prompt": "Arr."},
        [system("Arr."), USER, ANSWER],
    ),
    "conversation": ({"conversation": [USER, ANSWER]}, [USER, ANSWER]),
    "roles in conversations": ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
}


@pytest.mark.parametrize("name", READ)
def test_chat_records_are_read(name: str) -> None:
    record, expected = READ[name]
    assert tables(record) == expected


@pytest.mark.parametrize("tools", [[WRAPPED], [TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
@pytest.mark.parametrize("said", [{"messages": [USER, ANSWER]}, {"conversations": TALK}])
def test_chat_tools_are_read_in_every_form(tools: object, said: dict[str, Any]) -> None:
    assert read(said | {"tools": tools}).tools == [WRAPPED]


def test_chat_functions_are_read_as_tools() -> None:
    assert read({"messages": [USER, ANSWER], "functions": [TOOL]}).tools == [WRAPPED]


def test_chat_documents_and_template_variables_are_read() -> None:
    more = {"documents": [{"title": "a", "text": "b"}], "chat_template_kwargs": {"thinking": True}}
    found = read({"messages": [USER, ANSWER]} | more)
    assert found.documents == more["documents"]
    assert found.variables == {"thinking": True}


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
    messages = read({"messages": [USER, ANSWER | switch, USER, ANSWER]}).messages
    assert [message.train for message in messages if message.role == "assistant"] == [train, True]


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
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
        {"conversations": [TALK[0], {"from": "function_call", "value": "weather()"}]},
        "has a function_call that is not JSON",
    ),
    "tools that are no JSON": (
        {"conversations": TALK, "tools": "weather"},
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
        {"messages": [USER, ANSWER], "conversations": TALK[:1]},
        "has conversations, which",
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


@pytest.mark.parametrize("name", REJECTED)
def test_chat_records_with_unknown_keys_are_rejected(name: str) -> None:
    record, reason = REJECTED[name]
    with pytest.raises(ValueError, match=reason):
        read(record)


def test_chat_metadata_is_counted_and_ignored_on_request() -> None:
    notes: Counter[str] = Counter()
    keys = RecordKeys(["persona", "history"], notes)
    told = {"messages": [USER | {"id": 7}, ANSWER], "source": "web", "toxic": False, "id": "x"}
    parse_conversation(told | {"persona": "pirate"}, keys)
    alpaca = {"instruction": "a", "output": "b", "history": [["c", "d"]]}
    assert [message.text for message in parse_conversation(alpaca, keys).messages] == ["a", "b"]
    assert notes == {
        f"ignored key {key}, occurrences": count
        for key, count in (("id", 2), ("source", 1), ("toxic", 1), ("persona", 1), ("history", 1))
    }


def test_chat_text_that_repeats_the_messages_is_ignored() -> None:
    assert tables({"messages": [USER, ANSWER], "prompt": "hello"}) == [USER, ANSWER]
    whole = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nhello\n\n### Response:\nfine"
    )
    alpaca = {"instruction": "hello", "input": "", "output": "fine", "text": whole}
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
            read(record | more)
        read(record | more, key)


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
            read(record)
        read(record, key)


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
    messages = read({"conversations": [{"from": name, "value": text}, *TALK]}).messages
    assert messages[0].role == ROLES[name]


# What is prepared from records, with and without a chat template.


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def lines(folder: Path, *records: dict[str, Any]) -> tuple[str]:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return (str(path),)


def with_template(folder: Path, template: str) -> dict[str, Any]:
    file = write_tokenizer(folder / "tokenizer", TOKENIZERS["byte_level"](), template)
    return {"tokenizer": str(file), "end_of_text": "</s>", "sequence": 128}


def text_of(splits: DataSplits, row: int = 0) -> str:
    (ids_S,) = splits.train.gather([row])
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    ids = [token if token >= 0 else ~token for token in ids_S.ravel().tolist()]
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_chat_history_is_trained_on(tmp_path: Path) -> None:
    record = {"instruction": "And Malta?", "output": "Second.", "history": [["Sicily?", "First."]]}
    splits = prepare_splits(
        ChatData(paths=lines(tmp_path, record | {"system": "Be brief."}), **SMALL), 300, 0
    )
    assert text_of(splits).startswith(
        "### System:\nBe brief.\n\n### User:\nSicily?\n\n### Assistant:\nFirst.<|endoftext|>"
        "### User:\nAnd Malta?\n\n### Assistant:\nSecond.<|endoftext|>"
    )


OF_TEMPLATES: dict[str, tuple[dict[str, Any], str]] = {
    "tools": ({"messages": [USER, ANSWER], "tools": [TOOL]}, "has tools, which"),
    "tool calls": (
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
        "has tool_calls",
    ),
    "reasoning": (
        {"messages": [USER, ANSWER | {"reasoning_content": "hm"}]},
        "has reasoning_content",
    ),
    "name": ({"messages": [USER | {"name": "Ann"}, ANSWER]}, "has name"),
    "documents": (
        {"messages": [USER, ANSWER], "documents": [{"title": "a", "text": "b"}]},
        "has documents, which",
    ),
}


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "chatml"])
def test_chat_content_that_the_template_omits_is_rejected(plain: bool, tmp_path: Path) -> None:
    template = PlainTemplate("</s>")
    if not plain:
        file = write_tokenizer(tmp_path, TOKENIZERS["byte_level"](), CHATML)
        template = chat_templates.load_template(file)
    for name, (record, reason) in OF_TEMPLATES.items():
        with pytest.raises(ValueError, match=reason):
            pytest.fail(f"{name} is written: {template(read(record))}")
    assert template(read({"messages": [USER, ANSWER]}))
    template.close()


def test_chat_system_text_that_the_template_omits_is_rejected(tmp_path: Path) -> None:
    silent = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
    )
    record = {"conversations": TALK, "system": "Talk like a sailor."}
    options = {**SMALL, **with_template(tmp_path, silent)}
    chat = ChatData(paths=lines(tmp_path, record), **options)
    with pytest.raises(DataError, match=r"a\.jsonl:1 has a turn of 'system', which the chat templ"):
        prepare_splits(chat, 1000, 0)
    chat = ChatData(paths=chat.paths, **{**options, **with_template(tmp_path, GEMMA)})
    with pytest.raises(DataError, match=r"a\.jsonl:1 is rejected by the chat template: no system"):
        prepare_splits(chat, 1000, 0)


def test_chat_contents_are_parts_if_the_template_requires_it(tmp_path: Path) -> None:
    options = {**SMALL, **with_template(tmp_path, PARTS)}
    splits = prepare_splits(
        ChatData(paths=lines(tmp_path, {"messages": [USER, ANSWER]}), **options), 1000, 0
    )
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n"
    assert text_of(splits).startswith(expected)


def test_chat_parquet_nulls_are_absent_keys(tmp_path: Path) -> None:
    records = [
        {"messages": [USER, ANSWER | {"weight": 1}], "tools": None},
        {"messages": [USER, {"role": "assistant", "content": "no"}], "tools": None},
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    splits = prepare_splits(ChatData(paths=(str(path),), **SMALL), 300, 0)
    assert len(splits.train) == 2


def test_chat_notes_are_printed_at_every_start(tmp_path: Path) -> None:
    chat = ChatData(paths=lines(tmp_path, {"messages": [USER, ANSWER], "id": 1}), **SMALL)
    assert (
        prepare_splits(chat, 300, 0).note
        == prepare_splits(chat, 300, 0).note
        == "ignored key id, occurrences: 1"
    )


def test_chat_ignored_keys_are_an_option(tmp_path: Path) -> None:
    record = {"messages": [USER, ANSWER], "persona": "pirate"}
    chat = ChatData(paths=lines(tmp_path, record), **SMALL)
    with pytest.raises(DataError, match=r"has persona, which .*'data\.ignore_keys=\[persona\]'"):
        prepare_splits(chat, 300, 0)
    allowed = ChatData(**{**vars(chat), "ignore_keys": ("persona",)})
    assert prepare_splits(allowed, 300, 0).note == "ignored key persona, occurrences: 1"


def test_chat_deeply_nested_records_are_rejected(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(600):
        deep = {"a": deep}
    record = {"messages": [USER, ANSWER], "tools": [WRAPPED | {"deep": deep}]}
    for options in (SMALL, with_template(tmp_path, CHATML)):
        chat = ChatData(paths=lines(tmp_path, record), **{**SMALL, **options})
        with pytest.raises(DataError, match=r"a\.jsonl:1 "):
            prepare_splits(chat, 1000, 0)


# Preferences and questions with answers.


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
        "conversations": TALK[:1],
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
    asked = "### User:\nhello\n\n### Assistant:\n"
    assert sides(ULTRAFEEDBACK) == [f"{asked}fine.", f"{asked}bad."]
    assert sides({**ULTRAFEEDBACK, "prompt": None}) == sides(ULTRAFEEDBACK)


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_is_read_with_its_prompt(name: str) -> None:
    asked = "### System:\nArr.\n\n### User:\nhello\n\n### Assistant:\n"
    assert sides(PREFERENCES[name]) == [f"{asked}fine.", f"{asked}bad."]


def test_preference_has_its_history() -> None:
    begin = "### User:\na\n\n### Assistant:\nb.### User:\nhello"
    for name in ("alpaca", "system"):
        record = PREFERENCES[name] | {"history": [["a", "b"]]}
        assert all(begin in side for side in sides(record)), name


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
    splits = prepare_splits(PreferenceData(paths=lines(tmp_path, record), **SMALL), 300, 0)
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
    data = Seq2SeqData(paths=lines(tmp_path, record), **SMALL)
    with pytest.raises(DataError, match=rf"a\.jsonl:1 .*{reason}"):
        prepare_splits(data, 300, 0)


def test_seq2seq_system_text_is_part_of_the_question(tmp_path: Path) -> None:
    record = {"instruction": "hello", "output": "fine", "system": "Arr."}
    splits = prepare_splits(Seq2SeqData(paths=lines(tmp_path, record), **SMALL), 300, 0)
    ids = [~token for token in splits.train.gather([0])[0].tolist() if token < 0]
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    assert "Arr." in tokenizer.decode([token for token in ids if token < 300])


# Chat templates that do not end.

ENDLESS = {
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (messages | length + 9) ** (10 ** 9) }}",
    "text": "{{ 'a' * (messages | length * 10 ** 12) }}",
    "doubling": "{% set n = namespace(a='ab') %}{% for i in range(99) %}"
    "{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "written": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "constant": "{{ 10 ** (10 ** 10) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_chat_template_is_named_with_its_record(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "CPU_SECONDS", 0.5)
    options = {**SMALL, **with_template(tmp_path, ENDLESS[name])}
    chat = ChatData(paths=lines(tmp_path, {"messages": [USER, ANSWER]}), max_bad_rows=1, **options)
    with pytest.raises(DataError) as error:
        prepare_splits(chat, 1000, 0)
    (issue,) = error.value.issues
    assert issue.key == "data.tokenizer"
    assert str(issue.value).endswith("tokenizer_config.json")
    assert "takes " in issue.reason
    assert name == "constant" or issue.reason.endswith(" at a.jsonl:1")


def test_chat_template_with_a_syntax_error_is_named(tmp_path: Path) -> None:
    options = {**SMALL, **with_template(tmp_path, "{% for %}")}
    chat = ChatData(paths=lines(tmp_path, {"messages": [USER, ANSWER]}), **options)
    with pytest.raises(DataError, match=r"tokenizer_config\.json: the chat template has an error"):
        prepare_splits(chat, 1000, 0)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_nul_character_is_rejected_in_every_format(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    record = {"messages": [USER, {"role": "assistant", "content": "fi\0ne"}]}
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    else:
        path.write_text(json.dumps([record] if suffix == ".json" else record))
    with pytest.raises(DataError, match=f"a{suffix}:1 has a NUL character"):
        prepare_splits(ChatData(paths=(str(path),), **SMALL), 300, 0)


def test_json_list_is_read_as_strictly_as_json_lines(tmp_path: Path) -> None:
    record = json.dumps({"messages": [USER, ANSWER], "score": float("nan")})
    (tmp_path / "a.json").write_text(f"[{record}]")
    with pytest.raises(DataError, match="NaN is not a JSON value"):
        prepare_splits(ChatData(paths=(str(tmp_path / "a.json"),), **SMALL), 300, 0)


def test_duplicate_columns_are_rejected(tmp_path: Path) -> None:
    column = pyarrow.array([[USER, ANSWER]])
    table = pyarrow.Table.from_arrays([column, column], ["messages", "messages"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has more than one column messages"):
        prepare_splits(ChatData(paths=(str(tmp_path / "a.parquet"),), **SMALL), 300, 0)
