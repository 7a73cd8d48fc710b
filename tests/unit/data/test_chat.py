"""Conversations: formats, templates, label masks and invalid records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pyarrow import parquet
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from scalewise.data.chat import ChatData
from scalewise.data.chat_cache import chat_template
from scalewise.data.chat_messages import ROLES, Conversation, Message
from scalewise.data.chat_templates import PLAIN_TEMPLATE, PlainTemplate, prompt_text
from scalewise.data.encoding import train_tokenizer
from scalewise.data.prepare import DataSplits, TokenDataset, prepare_splits
from scalewise.data.tokenizer import END_OF_TEXT, TokenizerSource
from scalewise.errors import DataError

ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Add 2 and 2."},
        {"from": "gpt", "value": "4"},
        {"from": "human", "value": "And 3?"},
        {"from": "gpt", "value": "7"},
    ]
}
MESSAGES = {
    "messages": [
        {"role": "user", "content": "Add 2 and 2."},
        {"role": "assistant", "content": "4"},
    ]
}
CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATA_OPTIONS: dict[str, Any] = {"vocabulary": 300, "sequence": 128, "validation_fraction": 0.0}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def lines(path: Path, *records: object) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    return str(path)


def read(splits: DataSplits, dataset: TokenDataset, index: int = 0) -> tuple[str, str]:
    """Text of a sequence, and text of its labels."""
    assert splits.tokenizer is not None
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    (ids_S,) = dataset.gather([index])
    token_ids = np.where(ids_S < 0, ~ids_S, ids_S)
    labels = ids_S[1:][ids_S[1:] >= 0]
    decoded_text, label_text = (
        tokenizer.decode(it.tolist(), skip_special_tokens=False) for it in (token_ids, labels)
    )
    return decoded_text, label_text


@pytest.mark.parametrize(
    ("record", "expected_text", "answers"),
    [
        (ALPACA, "### User:\nAdd.\n\n2 and 2\n\n### Assistant:\n4", "4"),
        (MESSAGES, "### User:\nAdd 2 and 2.\n\n### Assistant:\n4", "4"),
        (
            SHAREGPT,
            "### System:\nBe brief.\n\n### User:\nAdd 2 and 2.\n\n### Assistant:\n4"
            + END_OF_TEXT
            + "### User:\nAnd 3?\n\n### Assistant:\n7",
            f"4{END_OF_TEXT}7",
        ),
    ],
    ids=["alpaca", "messages", "sharegpt"],
)
def test_chat_formats_are_detected_and_only_answers_are_labels(
    record: object, expected_text: str, answers: str, tmp_path: Path
) -> None:
    splits = prepare_splits(
        ChatData(paths=(lines(tmp_path / "a.jsonl", record),), **DATA_OPTIONS), 300, 0
    )
    assert splits.train.masked
    decoded_text, label_text = read(splits, splits.train)
    assert decoded_text.rstrip(END_OF_TEXT) == expected_text or decoded_text.startswith(
        expected_text + END_OF_TEXT
    )
    assert set(decoded_text.removeprefix(expected_text).replace(END_OF_TEXT, "")) == set()
    assert label_text == answers + END_OF_TEXT


def test_chat_truncated_tokens_are_counted(tmp_path: Path) -> None:
    long_question, long_answer = ({**ALPACA, key: "word " * 200} for key in ("input", "output"))
    path = lines(tmp_path / "a.jsonl", ALPACA, long_question, long_answer, ALPACA)
    short_options = {**DATA_OPTIONS, "sequence": 64}
    splits = prepare_splits(ChatData(paths=(path,), **short_options), 300, 0)
    assert len(splits.train) == 3
    assert splits.note == (
        "of 4 conversations, data.sequence=64: 1 dropped (answers start after the sequence), "
        "1 truncated (longer than the sequence)"
    )
    long_options = {**DATA_OPTIONS, "sequence": 1024}
    assert prepare_splits(ChatData(paths=(path,), **long_options), 300, 0).note == ""


@pytest.mark.parametrize("suffix", ["json", "parquet", "jsonl"])
def test_chat_reads_every_file_type(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    records = [MESSAGES, {"messages": SHAREGPT_AS_MESSAGES}]
    if suffix == "json":
        path.write_text(json.dumps(records))
    elif suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        lines(path, *records)
    splits = prepare_splits(ChatData(paths=(str(path),), **DATA_OPTIONS), 300, 0)
    assert [read(splits, splits.train, index)[1] for index in (0, 1)] == [
        f"4{END_OF_TEXT}",
        f"4{END_OF_TEXT}7{END_OF_TEXT}",
    ]


SHAREGPT_AS_MESSAGES = [
    {"role": ROLES[message["from"]], "content": message["value"]}
    for message in SHAREGPT["conversations"]
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """``tokenizer.json`` with the ChatML tokens, next to its template."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = train_tokenizer(
        TokenizerSource(300), lambda: iter(["Add 2 and 2. user assistant system " * 20])
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<s>"}
    config = {"chat_template": CHATML, "bos_token": bos, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("messages", [MESSAGES["messages"], SHAREGPT_AS_MESSAGES], ids=["1", "2"])
def test_chat_template_equals_transformers(
    messages: list[dict[str, str]], tokenizer: Path, tmp_path: Path
) -> None:
    hf_tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), chat_template=CHATML, bos_token="<s>"
    )
    expected = hf_tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    path = lines(tmp_path / "a.jsonl", {"messages": messages})
    splits = prepare_splits(
        ChatData(paths=(path,), tokenizer=str(tokenizer), sequence=128, validation_fraction=0),
        512,
        0,
    )
    (ids_S,) = splits.train.gather([0])
    assert np.where(ids_S < 0, ~ids_S, ids_S)[: len(expected)].tolist() == expected
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert read(splits, splits.train)[1] == "".join(f"{it}<|im_end|>\n" for it in answers)


def test_chat_template_runs_in_a_sandbox(tokenizer: Path, tmp_path: Path) -> None:
    config = {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}
    tokenizer.with_name("tokenizer_config.json").write_text(json.dumps(config))
    chat = ChatData(paths=(lines(tmp_path / "a.jsonl", MESSAGES),), tokenizer=str(tokenizer))
    with pytest.raises(DataError, match=r"is rejected by the chat template.*unsafe"):
        prepare_splits(chat, 512, 0)


def test_chat_template_exception_marks_bad_records(tokenizer: Path, tmp_path: Path) -> None:
    raising_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    config = {"chat_template": raising_template + CHATML}
    tokenizer.with_name("tokenizer_config.json").write_text(json.dumps(config))
    path = lines(tmp_path / "a.jsonl", MESSAGES, SHAREGPT)
    chat = ChatData(paths=(path,), tokenizer=str(tokenizer), validation_fraction=0)
    with pytest.raises(DataError, match=r"1 record that .*a.jsonl:2 is rejected .* no system"):
        prepare_splits(chat, 512, 0)


def test_chat_template_is_read_from_a_file_or_list(tokenizer: Path, tmp_path: Path) -> None:
    config = tokenizer.with_name("tokenizer_config.json")
    chat = ChatData(
        paths=(lines(tmp_path / "a.jsonl", MESSAGES),),
        tokenizer=str(tokenizer),
        sequence=128,
        validation_fraction=0,
    )
    (expected,) = prepare_splits(chat, 512, 0).train.gather([0])
    template_list = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    config.write_text(json.dumps({"chat_template": template_list, "bos_token": "<s>"}))
    assert (prepare_splits(chat, 512, 0).train.gather([0])[0] == expected).all()
    body = "{{ message.content | trim }}<|im_end|>\n"
    marked_template = (
        "{% if message.role == 'assistant' %}{% generation %}" + body + "{% endgeneration %}"
        "{% else %}" + body + "{% endif %}"
    )
    marked_template = CHATML.replace(body, marked_template)
    config.write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer.with_name("chat_template.jinja").write_text(marked_template)
    assert (prepare_splits(chat, 512, 0).train.gather([0])[0] == expected).all()
    template = chat_template(chat)
    assert (
        prompt_text(template, "Hi") == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_default_template_is_exported() -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = environment.from_string(PLAIN_TEMPLATE)
    developer = [{"role": "developer", "content": "Be brief."}, *MESSAGES["messages"]]
    for messages in (MESSAGES["messages"], SHAREGPT_AS_MESSAGES, developer):
        conversation = tuple(Message(**message) for message in messages)
        actual = "".join(
            chunk.text for chunk in PlainTemplate(END_OF_TEXT)(Conversation(conversation))
        )
        assert expected.render(messages=messages, eos_token=END_OF_TEXT) == actual, messages
    expected_prompt = expected.render(messages=MESSAGES["messages"][:1], add_generation_prompt=True)
    assert prompt_text(PlainTemplate(END_OF_TEXT), "Add 2 and 2.") == expected_prompt


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ range(9999999) | list }}", "hello"])
def test_chat_template_error_is_reported(source: str, tokenizer: Path, tmp_path: Path) -> None:
    config = {"chat_template": source}
    tokenizer.with_name("tokenizer_config.json").write_text(json.dumps(config))
    chat = ChatData(paths=(lines(tmp_path / "a.jsonl", MESSAGES),), tokenizer=str(tokenizer))
    with pytest.raises(DataError, match=r"a\.jsonl:1 "):
        prepare_splits(chat, 512, 0)


def test_chat_reads_bom_parts_and_empty_columns(tmp_path: Path) -> None:
    content_parts = [{"type": "text", "text": "Add 2"}, {"type": "text", "text": " and 2."}]
    union = {"messages": None, "instruction": "Add 2 and 2.", "output": "4"}
    record = {"messages": [{"role": "user", "content": content_parts}, MESSAGES["messages"][1]]}
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + "".join(f"{json.dumps(it)}\n" for it in (record, union, MESSAGES)))
    dataset = prepare_splits(ChatData(paths=(str(path),), **DATA_OPTIONS), 300, 0).train
    assert (dataset.gather([0]) == dataset.gather([1])).all()
    assert (dataset.gather([0]) == dataset.gather([2])).all()


INVALID_RECORDS = {
    r'{"instruction": "\ud83d x", "output": "y"}': "has a lone surrogate",
    "{": "is not JSON",
    "[1]": "is not an object",
    '{"a": 1}': "its keys: a",
    '{"messages": []}': "has no list of turns",
    '{"messages": [{"role": "user"}]}': "a turn without a text in 'content'",
    '{"messages": [{"role": "robot", "content": "x"}]}': "of 'robot'; supported roles: system",
    '{"messages": [{"role": "user", "content": "x"}]}': "has no answer",
    '{"instruction": "x", "output": 3}': "that is not a text",
}


@pytest.mark.parametrize("overrides", INVALID_RECORDS)
def test_chat_bad_records_are_named_and_counted(
    overrides: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(MESSAGES)}\n\n{overrides}\n{json.dumps(ALPACA)}\n")
    chat = ChatData(paths=(str(path),), **DATA_OPTIONS)
    with pytest.raises(DataError) as error:
        prepare_splits(chat, 300, 0)
    assert "1 record that is not a valid conversation: a.jsonl:3 " in str(error.value)
    assert INVALID_RECORDS[overrides] in str(error.value)
    assert "data.max_bad_rows=1" in str(error.value)
    allowed = prepare_splits(ChatData(paths=(str(path),), max_bad_rows=1, **DATA_OPTIONS), 300, 0)
    assert len(allowed.train) == 2
    assert "skipped 1 record, first: a.jsonl:3" in capsys.readouterr().err


def test_chat_splits_truncates_and_pads(tmp_path: Path) -> None:
    records = [{"instruction": f"Say {n}.", "output": f"{n} " * 40} for n in range(40)]
    chat = ChatData(
        paths=(lines(tmp_path / "a.jsonl", *records),),
        vocabulary=300,
        sequence=32,
        validation_fraction=0.1,
    )
    splits = prepare_splits(chat, 300, 0)
    assert splits.validation is not None
    assert (len(splits.train), len(splits.validation)) == (36, 4)
    tokens_BS = splits.train.gather([3, 0])
    assert tokens_BS.shape == (2, 33)
    assert (tokens_BS[:, -1] >= 0).all()


def test_chat_sequence_too_short_for_answers_is_rejected(tmp_path: Path) -> None:
    record = {"instruction": "why " * 200, "output": "so"}
    path = lines(tmp_path / "a.jsonl", record)
    with pytest.raises(
        DataError, match=r"the first answer of the train split .* set data.sequence="
    ):
        prepare_splits(
            ChatData(paths=(path,), vocabulary=300, sequence=16, validation_fraction=0), 300, 0
        )
    longer_path = lines(tmp_path / "b.jsonl", record, MESSAGES)
    splits = prepare_splits(ChatData(paths=(longer_path,), **DATA_OPTIONS), 300, 0)
    assert len(splits.train) == 1


def test_chat_cache_detects_changed_files(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", MESSAGES)
    first = prepare_splits(ChatData(paths=(path,), **DATA_OPTIONS), 300, 0)
    second_splits = prepare_splits(ChatData(paths=(path,), **DATA_OPTIONS), 300, 0)
    assert first.tokenizer == second_splits.tokenizer
    lines(tmp_path / "a.jsonl", MESSAGES, ALPACA)
    assert len(prepare_splits(ChatData(paths=(path,), **DATA_OPTIONS), 300, 0).train) == 2
