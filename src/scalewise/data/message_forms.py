"""Message formats that chat templates expect, and checks that a rendered text is complete."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]
"""Function that returns the text of messages, or raises ``ValueError``."""
REASONING_KEY = "reasoning_content"
MIN_UNIQUE_CHARACTERS = 32
"""Characters from which a content that a text contains is considered to be its own turn."""


def is_answer(message: dict[str, Any]) -> bool:
    """Whether a message is from the assistant."""
    return bool(message["role"] == "assistant")


def contains_text(text: str, content: object) -> bool:
    """Whether a text contains a content, ignoring whitespace; true for contents without text."""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return (
        not isinstance(content, str)
        or content.strip() in text
        or _without_whitespace(content) in _without_whitespace(text)
    )


def check_turns(messages: Messages, text: str, render: Render) -> None:
    """Raise ``ValueError`` for a part of a turn that the template omits from the text."""
    for index, message in enumerate(messages):
        if not is_answer(message) and _may_omit(text, message["content"]):
            changed = message | {"content": "?" if message["content"] != "?" else "!"}
            if renders_same(render, [*messages[:index], changed, *messages[index + 1 :]], text):
                role = message["role"]
                raise ValueError(f"has a turn of {role!r}, which the chat template omits")
        for key in ("tool_calls", REASONING_KEY, "name"):
            if key not in message or (key == "name" and message["role"] == "tool"):
                continue
            if key == REASONING_KEY and contains_text(text, message[key]):
                continue
            prefix = messages[: index + 1]
            without = {k: v for k, v in message.items() if k != key}
            if renders_same(render, [*prefix[:-1], without], render(prefix)):
                raise ValueError(f"has {key} in a turn, which the chat template omits")
        calls = message.get("tool_calls", [])
        for number, key in _extra_call_keys(calls):
            fewer = message | {"tool_calls": copy.deepcopy(calls)}
            call = fewer["tool_calls"][number]
            del (call if key in call else call["function"])[key]
            if renders_same(render, [*messages[:index], fewer, *messages[index + 1 :]], text):
                raise ValueError(
                    f"has {key!r} in a tool call, which the chat template omits "
                    "(the key of arguments is 'arguments')"
                )
        for number in range(len(calls) if len(calls) > 1 else 0):
            fewer = message | {"tool_calls": [*calls[:number], *calls[number + 1 :]]}
            if renders_same(render, [*messages[:index], fewer, *messages[index + 1 :]], text):
                reason = "has several tool_calls in a turn, of which the chat template omits"
                raise ValueError(f"{reason} number {number + 1}")


def _extra_call_keys(calls: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the number and the keys of each call that are not in the API of OpenAI."""
    for number, call in enumerate(calls):
        extra = {**call, **call["function"]}
        for key in extra.keys() - {"id", "type", "index", "function", "name", "arguments"}:
            if extra[key] not in (None, "", [], {}):
                yield number, key


def renders_same(render: Render, messages: Messages, text: str) -> bool:
    """Whether other messages are rendered to the same text."""
    try:
        return render(messages) == text
    except ValueError:
        return False


def _may_omit(text: str, content: object) -> bool:
    """Whether a content may be absent from a text: a short one may be part of another turn."""
    length = len(content.strip()) if isinstance(content, str) else MIN_UNIQUE_CHARACTERS
    return 0 < length < MIN_UNIQUE_CHARACTERS or not contains_text(text, content)


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


def _iter_calls(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the functions of a message's tool calls."""
    for call in message.get("tool_calls", []):
        yield call.get("function", call)


def has_arguments(messages: Messages) -> bool:
    """Whether every tool call has arguments, which may be an empty object."""
    functions = (function for message in messages for function in _iter_calls(message))
    return all("arguments" in function for function in functions)


def _has_json_arguments(messages: Messages, text: str) -> bool:
    """Whether a text contains the arguments of all tool calls as JSON.

    A template may also quote a JSON text once more, or print an object as Python does.
    """
    functions = (function for message in messages for function in _iter_calls(message))
    for value in (function.get("arguments") for function in functions):
        json_text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str) and (value not in text or json_text in text):
            return False
        if isinstance(value, dict) and json_text not in text and str(value) in text:
            return False
    return True


class _ArgumentsForm(Enum):
    """Type of the arguments of tool calls."""

    unchanged = 0
    """As in the record."""
    objects = 1
    """JSON objects."""
    texts = 2
    """JSON texts."""


@dataclass(frozen=True)
class _MessageForm:
    """Message format; chat templates differ in the one that they accept."""

    arguments: _ArgumentsForm
    """Type of the arguments of tool calls."""
    content_as_parts: bool
    """Whether contents are lists of parts."""
    empty_content: bool
    """Whether a tool call without content gets an empty one."""
    developer_role: bool
    """Whether the template supports this role; otherwise it becomes a system message."""

    def convert(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in this format."""
        message = copy.deepcopy(message)
        if message["role"] == "developer" and not self.developer_role:
            message["role"] = "system"
        if self.empty_content and "tool_calls" in message:
            message.setdefault("content", "")
        if self.content_as_parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for function in _iter_calls(message):
            value = function.get("arguments")
            if self.arguments is _ArgumentsForm.objects and isinstance(value, str):
                function["arguments"] = _as_object(value)
            if self.arguments is _ArgumentsForm.texts and isinstance(value, dict):
                function["arguments"] = json.dumps(value, ensure_ascii=False)
        return message


def _as_object(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def choose_message_form(
    messages: Messages, render: Render, *, developer_role: bool
) -> tuple[Messages, str]:
    """Return the messages in the format that a template renders best, and the text.

    Templates differ in whether arguments of tool calls are JSON objects or texts, and whether
    contents are strings or lists of parts. The first format that keeps all content is used, or else
    the first that can be rendered.
    """
    first: tuple[Messages, str] | None = None
    first_error: ValueError | None = None
    tried: list[Messages] = []
    for as_parts, empty_content, arguments in product((False, True), (False, True), _ArgumentsForm):
        form = _MessageForm(arguments, as_parts, empty_content, developer_role)
        converted = [form.convert(message) for message in messages]
        if converted in tried:
            continue
        tried.append(converted)
        try:
            text = render(converted)
        except ValueError as error:
            first_error = first_error or error
            continue
        if first is None or not _has_json_arguments(*first):
            first = converted, text
        contents = [message["content"] for message in converted if not is_answer(message)]
        if (
            _has_json_arguments(converted, text)
            and all(contains_text(text, content) for content in contents)
            and not (as_parts and "{'type': 'text'" in text)  # the template printed the list itself
        ):
            return converted, text
    if first is None:
        assert first_error is not None
        raise first_error
    return first
