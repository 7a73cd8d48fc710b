"""Conversations prepared for training, with and without a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from fixtures.chat_records import (
    ANSWER,
    CALL,
    DATA_OPTIONS,
    SHAREGPT_TURNS,
    TOOL,
    USER,
    WRAPPED_TOOL,
    lines,
    read_record,
    text_of,
    with_template,
)
from fixtures.chat_templates import CHATML, CONTENT_PARTS, GEMMA, TOKENIZERS, write_tokenizer
from pyarrow import parquet

from scalewise.data import chat_templates
from scalewise.data.chat import ChatData
from scalewise.data.chat_templates import PlainTemplate
from scalewise.data.prepare import prepare_splits
from scalewise.errors import DataError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def test_chat_history_is_trained_on(tmp_path: Path) -> None:
    record = {"instruction": "And Malta?", "output": "Second.", "history": [["Sicily?", "First."]]}
    splits = prepare_splits(
        ChatData(paths=lines(tmp_path, record | {"system": "Be brief."}), **DATA_OPTIONS), 300, 0
    )
    assert text_of(splits).startswith(
        "### System:\nBe brief.\n\n### User:\nSicily?\n\n### Assistant:\nFirst.<|endoftext|>"
        "### User:\nAnd Malta?\n\n### Assistant:\nSecond.<|endoftext|>"
    )


REJECTED_CONTENT: dict[str, tuple[dict[str, Any], str]] = {
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


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "chatml"])
def test_chat_content_that_the_template_omits_is_rejected(is_plain: bool, tmp_path: Path) -> None:
    template = PlainTemplate("</s>")
    if not is_plain:
        file = write_tokenizer(tmp_path, TOKENIZERS["byte_level"](), CHATML)
        template = chat_templates.load_template(file)
    for name, (record, reason) in REJECTED_CONTENT.items():
        with pytest.raises(ValueError, match=reason):
            pytest.fail(f"{name} is written: {template(read_record(record))}")
    assert template(read_record({"messages": [USER, ANSWER]}))
    template.close()


def test_chat_system_text_that_the_template_omits_is_rejected(tmp_path: Path) -> None:
    silent = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
    )
    record = {"conversations": SHAREGPT_TURNS, "system": "Talk like a sailor."}
    options = {**DATA_OPTIONS, **with_template(tmp_path, silent)}
    chat = ChatData(paths=lines(tmp_path, record), **options)
    with pytest.raises(DataError, match=r"a\.jsonl:1 has a turn of 'system', which the chat templ"):
        prepare_splits(chat, 1000, 0)
    chat = ChatData(paths=chat.paths, **{**options, **with_template(tmp_path, GEMMA)})
    with pytest.raises(DataError, match=r"a\.jsonl:1 is rejected by the chat template: no system"):
        prepare_splits(chat, 1000, 0)


def test_chat_contents_are_parts_if_the_template_requires_it(tmp_path: Path) -> None:
    options = {**DATA_OPTIONS, **with_template(tmp_path, CONTENT_PARTS)}
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
    splits = prepare_splits(ChatData(paths=(str(path),), **DATA_OPTIONS), 300, 0)
    assert len(splits.train) == 2


def test_chat_notes_are_printed_at_every_start(tmp_path: Path) -> None:
    chat = ChatData(paths=lines(tmp_path, {"messages": [USER, ANSWER], "id": 1}), **DATA_OPTIONS)
    assert (
        prepare_splits(chat, 300, 0).note
        == prepare_splits(chat, 300, 0).note
        == "ignored key id, occurrences: 1"
    )


def test_chat_ignored_keys_are_an_option(tmp_path: Path) -> None:
    record = {"messages": [USER, ANSWER], "persona": "pirate"}
    chat = ChatData(paths=lines(tmp_path, record), **DATA_OPTIONS)
    with pytest.raises(DataError, match=r"has persona, which .*'data\.ignore_keys=\[persona\]'"):
        prepare_splits(chat, 300, 0)
    allowed = ChatData(**{**vars(chat), "ignore_keys": ("persona",)})
    assert prepare_splits(allowed, 300, 0).note == "ignored key persona, occurrences: 1"


def test_chat_deeply_nested_records_are_rejected(tmp_path: Path) -> None:
    nested: dict[str, Any] = {}
    for _ in range(600):
        nested = {"a": nested}
    record = {"messages": [USER, ANSWER], "tools": [WRAPPED_TOOL | {"deep": nested}]}
    for options in (DATA_OPTIONS, with_template(tmp_path, CHATML)):
        chat = ChatData(paths=lines(tmp_path, record), **{**DATA_OPTIONS, **options})
        with pytest.raises(DataError, match=r"a\.jsonl:1 "):
            prepare_splits(chat, 1000, 0)


# Preferences and questions with answers.


# Chat templates that do not end.

ENDLESS_TEMPLATES = {
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (messages | length + 9) ** (10 ** 9) }}",
    "text": "{{ 'a' * (messages | length * 10 ** 12) }}",
    "doubling": "{% set n = namespace(a='ab') %}{% for i in range(99) %}"
    "{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "written": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "constant": "{{ 10 ** (10 ** 10) }}",
}


@pytest.mark.parametrize("name", ENDLESS_TEMPLATES)
def test_endless_chat_template_is_named_with_its_record(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "CPU_SECONDS", 0.5)
    options = {**DATA_OPTIONS, **with_template(tmp_path, ENDLESS_TEMPLATES[name])}
    chat = ChatData(paths=lines(tmp_path, {"messages": [USER, ANSWER]}), max_bad_rows=1, **options)
    with pytest.raises(DataError) as error:
        prepare_splits(chat, 1000, 0)
    (issue,) = error.value.issues
    assert issue.key == "data.tokenizer"
    assert str(issue.value).endswith("tokenizer_config.json")
    assert "takes " in issue.reason
    assert name == "constant" or issue.reason.endswith(" at a.jsonl:1")


def test_conversation_that_takes_quadratic_time_is_an_error_of_its_record(tmp_path: Path) -> None:
    options = {**DATA_OPTIONS, **with_template(tmp_path, CHATML)}
    record = {"messages": [USER, ANSWER] * chat_templates.MAX_MESSAGES}
    chat = ChatData(paths=lines(tmp_path, record), **options)
    with pytest.raises(DataError, match=r"a\.jsonl:1 has 4,000 messages, more than .*: split it"):
        prepare_splits(chat, 1000, 0)


def test_chat_template_with_a_syntax_error_is_named(tmp_path: Path) -> None:
    options = {**DATA_OPTIONS, **with_template(tmp_path, "{% for %}")}
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
        prepare_splits(ChatData(paths=(str(path),), **DATA_OPTIONS), 300, 0)


def test_json_list_is_read_as_strictly_as_json_lines(tmp_path: Path) -> None:
    record = json.dumps({"messages": [USER, ANSWER], "score": float("nan")})
    (tmp_path / "a.json").write_text(f"[{record}]")
    with pytest.raises(DataError, match="NaN is not a JSON value"):
        prepare_splits(ChatData(paths=(str(tmp_path / "a.json"),), **DATA_OPTIONS), 300, 0)


def test_duplicate_columns_are_rejected(tmp_path: Path) -> None:
    column = pyarrow.array([[USER, ANSWER]])
    table = pyarrow.Table.from_arrays([column, column], ["messages", "messages"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has more than one column messages"):
        prepare_splits(ChatData(paths=(str(tmp_path / "a.parquet"),), **DATA_OPTIONS), 300, 0)
