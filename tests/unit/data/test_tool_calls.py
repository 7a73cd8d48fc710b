"""Tool calls and other nested parts of a record: each key is read or rejected."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fixtures.chat_records import ANSWER, FUNCTION, TOOL, USER, read_record
from fixtures.chat_templates import RAW_ARGUMENTS, THINKING

from scalewise.data.chat_rendering import RenderRequest, RenderSetup, TemplateRenderer

PRINTED = THINKING.replace(
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}",
    "{{ call.function.name }}({{ call.function.arguments }})",
)
"""Template that prints arguments as Python does."""


def render(template: str, *messages: dict[str, Any]) -> str:
    setup = RenderSetup({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"}, 10)
    request = RenderRequest([*messages], [True] * len(messages))
    return TemplateRenderer(setup).render_chat(request).text


def call_message(arguments: object, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call | more]}


@pytest.mark.parametrize("arguments", [{}, {"city": "Oslo"}, {"n": [1, None, True]}])
@pytest.mark.parametrize("template", [THINKING, RAW_ARGUMENTS, PRINTED], ids=list("abc"))
def test_arguments_are_rendered_as_json(template: str, arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments)
    rendered = [render(template, USER, call_message(value)) for value in (arguments, text)]
    assert rendered[0] == rendered[1]
    assert text in rendered[0]
    assert json.dumps(text) not in rendered[0]


@pytest.mark.parametrize(
    "call",
    [
        {"name": "weather", "arguments": {}, "parameters": {"city": "Oslo"}},
        {"name": "weather", "arguments": {}, "args": '{"city": "Oslo"}'},
        {"type": "function", "function": FUNCTION, "train": False},
        {"type": "function", "function": FUNCTION | {"weight": 0}},
    ],
    ids=["parameters", "args", "train", "weight"],
)
def test_key_of_a_call_that_the_template_omits_is_rejected(call: dict[str, Any]) -> None:
    record = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    (key,) = {*call, *call.get("function", {})} - {"name", "arguments", "type", "function"}
    messages = [message.to_dict() for message in read_record(record).messages]
    with pytest.raises(ValueError, match=f"has '{key}' in a tool call, which the chat template"):
        render(THINKING, *messages)
    messages = [message.to_dict() for message in read_record(record, key).messages]
    assert "weather" in render(THINKING, *messages)


def test_metadata_of_a_call_is_not_required_in_the_text() -> None:
    message = call_message({"city": "Oslo"}, id="c1", index=0, cache=None)
    assert "Oslo" in render(THINKING, USER, message)
    reads = THINKING.replace("<call>", "<call id={{ call.id }} kind={{ call.kind }}>")
    assert "kind=json" in render(reads, USER, call_message({}, kind="json"))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {
                "messages": [
                    USER,
                    ANSWER | {"function_call": FUNCTION, "tool_calls": [FUNCTION | {"name": "a"}]},
                ]
            },
            "different calls in tool_calls and function_call",
        ),
        *(
            ({"messages": [USER, ANSWER], "documents": value}, "has documents that are not a list")
            for value in (5, True, "text", {"title": "a"}, ["a"])
        ),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": "text"} | part]}, ANSWER]},
                "has a turn with a part that is not a text",
            )
            for part in ({}, {"text": None}, {"text": 5})
        ),
        (
            {"messages": [USER, ANSWER], "tools": '[{"name": "a", "name": "b"}]'},
            "has tools that is not JSON .*the key 'name' is repeated",
        ),
        ({"messages": [USER, ANSWER], "tools": "[NaN]"}, "has tools that is not JSON .*NaN"),
        (
            {"messages": [USER, ANSWER | {"tool_calls": "[" * 100_000}]},
            "has tool_calls that is JSON that is nested too deeply",
        ),
    ],
)
def test_invalid_nested_parts_are_rejected(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_record(record)


def test_equal_calls_under_both_keys_are_read_once() -> None:
    calls = {"function_call": FUNCTION, "tool_calls": [{"id": "c1", "function": FUNCTION}]}
    message = read_record({"messages": [USER, ANSWER | calls], "tools": [TOOL]}).messages[1]
    assert message.extra_fields == {"tool_calls": calls["tool_calls"]}
