"""Forms of messages that chat templates differ in, and what a rendered text holds of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

Messages = list[dict[str, Any]]


def is_answer(message: dict[str, Any]) -> bool:
    """Whether a message is the assistant's."""
    return bool(message["role"] == "assistant")


def contains_text(text: str, content: object) -> bool:
    """Whether a text has all of a content but whitespace; contents without a text are."""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return (
        not isinstance(content, str)
        or content.strip() in text
        or _without_whitespace(content) in _without_whitespace(text)
    )


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


def _iter_calls(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the functions of a message's tool calls."""
    for call in message.get("tool_calls", []):
        yield call.get("function", call)


def has_arguments(messages: Messages) -> bool:
    """Whether every tool call has arguments, be it an empty object."""
    functions = (function for message in messages for function in _iter_calls(message))
    return all("arguments" in function for function in functions)


def has_json_arguments(messages: Messages, text: str) -> bool:
    """Whether the arguments of tool calls that are JSON texts are in a text as they stand."""
    found = (function.get("arguments") for message in messages for function in _iter_calls(message))
    return all(given in text for given in found if isinstance(given, str))


class ArgumentsForm(Enum):
    """How the arguments of tool calls are written."""

    unchanged = 0
    objects = 1
    texts = 2


@dataclass(frozen=True)
class MessageForm:
    """A form of messages, of which templates differ in what they take.

    ``content_as_parts``: contents are lists of parts. ``empty_content``: a tool call without a
    content has an empty
    one. ``developer_role``: the template knows this role; else it is a system message.
    """

    arguments: ArgumentsForm
    content_as_parts: bool
    empty_content: bool
    developer_role: bool

    def convert(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message in this form."""
        message = copy.deepcopy(message)
        if message["role"] == "developer" and not self.developer_role:
            message["role"] = "system"
        if self.empty_content and "tool_calls" in message:
            message.setdefault("content", "")
        if self.content_as_parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for function in _iter_calls(message):
            given = function.get("arguments")
            if self.arguments is ArgumentsForm.objects and isinstance(given, str):
                function["arguments"] = _as_object(given)
            if self.arguments is ArgumentsForm.texts and isinstance(given, dict):
                function["arguments"] = json.dumps(given, ensure_ascii=False)
        return message


def _as_object(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
