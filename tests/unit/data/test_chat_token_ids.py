"""Token ids and labels of conversations equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.chat_templates import (
    CHATML,
    CHATML_MARKED,
    RAW_ARGUMENTS,
    STRIPPING,
    TEMPLATES,
    THINKING,
    TOKENIZERS,
    write_tokenizer,
)
from transformers import AutoTokenizer

from scalewise.data.chat import ChatData
from scalewise.data.chat_rendering import RenderRequest, RenderSetup, TemplateRenderer
from scalewise.data.encoding import train_tokenizer
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.tokenizer import TokenizerSource
from scalewise.errors import DataError

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Talk like a sailor."}
TURNS = [
    {"role": "user", "content": "hello how are you "},
    {"role": "assistant", "content": "fine thanks"},
    {"role": "user", "content": "weather in Oslo? 🙂"},
    {"role": "assistant", "content": "4 degrees, naïve 🙂"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLS = [
    TURNS[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4 degrees"},
    {"role": "assistant", "content": "It is 4 degrees."},
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def prepared(folder: Path, template: str, tokenizer: str, *records: dict[str, Any]) -> DataSplits:
    file = write_tokenizer(folder / "tokenizer", TOKENIZERS[tokenizer](), template)
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    chat = ChatData(
        paths=(str(path),),
        tokenizer=str(file),
        end_of_text="</s>",
        sequence=256,
        validation_fraction=0,
    )
    return prepare_splits(chat, 1000, 0)


def ids_of(splits: DataSplits, index: int, count: int) -> tuple[list[int], list[int]]:
    """First token ids of a sequence, and their label mask."""
    (ids_S,) = splits.train.gather([index])
    return np.where(ids_S < 0, ~ids_S, ids_S)[:count].tolist(), (ids_S >= 0)[:count].tolist()


def label_text_of(splits: DataSplits, index: int = 0) -> str:
    (ids_S,) = splits.train.gather([index])
    loaded = AutoTokenizer.from_pretrained(splits.tokenizer.parent)
    return loaded.decode(ids_S[ids_S >= 0].tolist(), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_token_ids_equal_apply_chat_template(tokenizer: str, tmp_path: Path) -> None:
    names = TEMPLATES if tokenizer == "prepending" else ("llama2", "thinking")
    for name in names:
        template = TEMPLATES[name]
        conversations = [TURNS[:2], TURNS]
        if name not in ("gemma", "stripping"):
            conversations.append([SYSTEM, *TURNS])
        records = [{"messages": messages} for messages in conversations]
        splits = prepared(tmp_path / name, template, tokenizer, *records)
        hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / name / "tokenizer")
        for index, messages in enumerate(conversations):
            expected = hf_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
            assert ids_of(splits, index, len(expected))[0] == expected, (name, index)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Qwen2Tokenizer"])
def test_token_ids_equal_the_transformers_tokenizer_class(kind: str, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer", TOKENIZERS["prepending"](), TEMPLATES["llama2"])
    config = json.loads(file.with_name("tokenizer_config.json").read_text())
    config |= {"tokenizer_class": kind, "pad_token": "<pad>"}  # absent from the file
    file.with_name("tokenizer_config.json").write_text(json.dumps(config))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n")
    chat = ChatData(
        paths=(str(path),), tokenizer=str(file), end_of_text="</s>", validation_fraction=0
    )
    hf_tokenizer = AutoTokenizer.from_pretrained(file.parent)
    expected = hf_tokenizer.apply_chat_template(TURNS, return_dict=True)["input_ids"]
    assert ids_of(prepare_splits(chat, len(hf_tokenizer), 0), 0, len(expected))[0] == expected


TOKEN = {
    "content": "<|im_end|>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": True,
}
CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]
TOKENIZER_FILES: dict[str, dict[str, dict[str, Any]]] = {
    "additional": {"tokenizer_config.json": {"additional_special_tokens": CHATML_TOKENS}},
    "extra_list": {"tokenizer_config.json": {"extra_special_tokens": CHATML_TOKENS}},
    "extra_table": {"tokenizer_config.json": {"extra_special_tokens": {"end": "<|im_end|>"}}},
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"320": TOKEN}}},
    "text_token": {
        "tokenizer_config.json": {"added_tokens_decoder": {"320": TOKEN | {"special": False}}}
    },
    "stripping": {
        "tokenizer_config.json": {"added_tokens_decoder": {"320": TOKEN | {"rstrip": True}}}
    },
    "pad": {"tokenizer_config.json": {"pad_token": "<|im_end|>"}},
    "mask": {"tokenizer_config.json": {"mask_token": TOKEN | {"__type": "AddedToken"}}},
    "unk": {"tokenizer_config.json": {"unk_token": "<|im_start|>"}},
    "map": {"special_tokens_map.json": {"additional_special_tokens": CHATML_TOKENS}},
    "added": {"added_tokens.json": {"<|im_start|>": 320, "<|im_end|>": 321}},
}


@pytest.mark.parametrize("configured", [True, False], ids=["configured", "default"])
@pytest.mark.parametrize("files", TOKENIZER_FILES.values(), ids=TOKENIZER_FILES)
def test_token_ids_of_declared_tokens_equal_transformers(
    files: dict[str, dict[str, Any]], configured: bool, tmp_path: Path
) -> None:
    tokenizer_path = train_tokenizer(
        TokenizerSource(300, end_of_text="</s>"), lambda: iter(["hello how are you"])
    )
    file = write_tokenizer(tmp_path / "tokenizer", tokenizer_path, CHATML)
    if not configured:
        config = file.with_name("tokenizer_config.json")
        file.with_name("chat_template.jinja").write_text(CHATML)
        config.unlink()
    for name, content in files.items():
        path = file.with_name(name)
        stored = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(stored | content))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n")
    chat = ChatData(
        paths=(str(path),), tokenizer=str(file), end_of_text="</s>", validation_fraction=0
    )
    hf_tokenizer = AutoTokenizer.from_pretrained(file.parent)
    assert len(hf_tokenizer) > tokenizer_path.get_vocab_size()
    expected = hf_tokenizer.apply_chat_template(TURNS, return_dict=True)["input_ids"]
    assert ids_of(prepare_splits(chat, len(hf_tokenizer), 0), 0, len(expected))[0] == expected
    with pytest.raises(DataError, match="beyond the model's embedding: <") as excinfo:
        prepare_splits(chat, len(hf_tokenizer) - 1, 0)
    assert f"model.vocabulary={len(hf_tokenizer)} " in excinfo.value.issues[0].fix
    assert "cp " in excinfo.value.issues[0].fix


END_MARKED = CHATML_MARKED.replace(
    "<|im_end|>{% endgeneration %}\n", "<|im_end|>\n{% endgeneration %}"
)
BARE_MARKED = CHATML_MARKED.replace(
    "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
)


@pytest.mark.parametrize("template", [CHATML_MARKED, END_MARKED, BARE_MARKED], ids=list("abc"))
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_labels_equal_the_assistant_mask(tokenizer: str, template: str, tmp_path: Path) -> None:
    splits = prepared(tmp_path, template, tokenizer, {"messages": TURNS})
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    expected = hf_tokenizer.apply_chat_template(
        TURNS, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, labels = ids_of(splits, 0, len(expected["input_ids"]))
    assert ids == expected["input_ids"]
    assert labels == [bool(it) for it in expected["assistant_masks"]]
    assert any(labels)


def test_labels_end_as_the_template_ends_answers() -> None:
    expected = {
        "chatml": "fine thanks<|im_end|>\n4 degrees, naïve 🙂<|im_end|>\n",
        "chatml_marked": "fine thanks<|im_end|>4 degrees, naïve 🙂<|im_end|>",
        "llama2": " fine thanks </s> 4 degrees, naïve 🙂 </s>",
        "llama3": "fine thanks<|eot|>4 degrees, naïve 🙂<|eot|>",
        "gemma": "fine thanks</turn>\n4 degrees, naïve 🙂</turn>\n",
        "phi": "fine thanks<|eot|>\n4 degrees, naïve 🙂<|eot|>\n</s>",
        "zephyr": "fine thanks</s>\n4 degrees, naïve 🙂</s>\n",
        "thinking": "<think>\n\n</think>\n\n4 degrees, naïve 🙂<|im_end|>\n",
        "stripping": "fine thanks</s>4 degrees, naïve 🙂</s>",
        "raw_arguments": "fine thanks</s>4 degrees, naïve 🙂</s>",
    }
    for name, template in TEMPLATES.items():
        renderer = TemplateRenderer(RenderSetup({"default": template}, SPECIAL_TOKENS, 10))
        rendered = renderer.render_chat(RenderRequest(TURNS, [True] * 4))
        answer_text = "".join(rendered.text[start:stop] for start, stop in rendered.spans)
        assert answer_text == expected[name], name


def test_rewriting_template_trains_on_the_last_answer_with_a_note(
    tmp_path: Path,
) -> None:
    splits = prepared(tmp_path, THINKING, "byte_level", {"messages": TURNS})
    assert "4 degrees" in label_text_of(splits)
    assert "fine" not in label_text_of(splits)
    assert "answers not trained on, since the chat template changes them" in splits.note
    assert splits.note.endswith(": 1")
    cached_splits = prepared(tmp_path, THINKING, "byte_level", {"messages": TURNS})
    assert cached_splits.note == splits.note  # from the cache


def test_messages_that_rewrite_the_last_answer_are_left_out(tmp_path: Path) -> None:
    splits = prepared(tmp_path, THINKING, "byte_level", {"messages": [*TURNS, TURNS[0]]})
    assert label_text_of(splits).endswith("4 degrees, naïve 🙂<|im_end|>\n")
    assert "messages after the last answer omitted: 1" in splits.note


def test_shortened_answers_are_counted(tmp_path: Path) -> None:
    thinking_answer = {"role": "assistant", "content": "<think>hm</think>fine"}
    splits = prepared(tmp_path, STRIPPING, "byte_level", {"messages": [TURNS[0], thinking_answer]})
    assert label_text_of(splits) == "fine</s>"
    assert "answers trained on without a part that the chat template omits: 1" in splits.note


@pytest.mark.parametrize(
    "arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=["object", "text"]
)
@pytest.mark.parametrize("template", [THINKING, RAW_ARGUMENTS], ids=["json", "raw"])
def test_labels_include_tool_calls(template: str, arguments: object, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    splits = prepared(tmp_path, template, "byte_level", {"messages": messages, "tools": TOOLS})
    assert '{"city": "Oslo"}' in label_text_of(splits)
    assert "\\" not in label_text_of(splits)


def test_token_ids_of_tools_equal_transformers(tmp_path: Path) -> None:
    thinking_answer = {**CALLS[3], "reasoning_content": "cold"}
    messages = [*CALLS[:3], thinking_answer]
    splits = prepared(tmp_path, THINKING, "prepending", {"messages": messages, "tools": TOOLS})
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    expected = hf_tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=True)[
        "input_ids"
    ]
    assert ids_of(splits, 0, len(expected))[0] == expected
    assert '{"city": "Oslo"}' in label_text_of(splits)
    assert "cold" in label_text_of(splits)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("disabling_keys", [{"weight": 0}, {"train": False}, {"training": False}])
def test_labels_exclude_disabled_answers(
    template: str, disabling_keys: dict[str, object], tmp_path: Path
) -> None:
    messages = [TURNS[0], TURNS[1] | disabling_keys, TURNS[2], TURNS[3] | {"weight": 1}]
    splits = prepared(tmp_path, template, "byte_level", {"messages": messages})
    assert label_text_of(splits).strip() == "4 degrees, naïve 🙂<|im_end|>"
    messages = [TURNS[0], TURNS[1], TURNS[2], TURNS[3] | disabling_keys]
    splits = prepared(tmp_path / "last", template, "byte_level", {"messages": messages})
    assert label_text_of(splits).strip() == "fine thanks<|im_end|>"


def test_tool_template_is_selected_for_tools(tmp_path: Path) -> None:
    template_list = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": THINKING},
    ]
    file = write_tokenizer(tmp_path / "tokenizer", TOKENIZERS["byte_level"](), CHATML)
    config = json.loads(file.with_name("tokenizer_config.json").read_text())
    config["chat_template"] = template_list
    file.with_name("tokenizer_config.json").write_text(json.dumps(config))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": CALLS, "tools": TOOLS}) + "\n")
    chat = ChatData(
        paths=(str(path),), tokenizer=str(file.parent), end_of_text="</s>", sequence=256
    )
    splits = prepare_splits(ChatData(**{**vars(chat), "validation_fraction": 0}), 1000, 0)
    hf_tokenizer = AutoTokenizer.from_pretrained(file.parent)
    expected = hf_tokenizer.apply_chat_template(CALLS, tools=TOOLS, return_dict=True)["input_ids"]
    assert ids_of(splits, 0, len(expected))[0] == expected


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        *(
            (
                {"messages": TURNS, "chat_template_kwargs": {name: True}},
                f"kwargs with {name}, which",
            )
            for name in ("add_generation_prompt", "messages", "chat_template", "tools", "documents")
        ),
        (
            {
                "messages": [
                    TURNS[0],
                    TURNS[1] | {"tool_calls": [{"function": {"name": "weather"}}]},
                ]
            },
            "has a tool call without arguments, which the chat template requires",
        ),
    ],
)
@pytest.mark.parametrize("template", [RAW_ARGUMENTS, THINKING])
def test_records_rejected_by_the_template_are_named(
    template: str, record: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """A call without arguments is an error in transformers too."""
    with pytest.raises(DataError, match=rf"a\.jsonl:1 .*{reason}"):
        prepared(tmp_path, template, "byte_level", record)
