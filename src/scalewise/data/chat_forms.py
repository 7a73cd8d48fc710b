"""Message formats that chat templates expect, and checks that a rendered text is complete."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

Messages = list[dict[str, Any]]


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


def has_json_arguments(messages: Messages, text: str) -> bool:
    """Whether a text contains the unchanged JSON arguments of all tool calls."""
    arguments = (
        function.get("arguments") for message in messages for function in _iter_calls(message)
    )
    return all(value in text for value in arguments if isinstance(value, str))


class ArgumentsForm(Enum):
    """Type of the arguments of tool calls."""

    unchanged = 0
    """As in the record."""
    objects = 1
    """JSON objects."""
    texts = 2
    """JSON texts."""


@dataclass(frozen=True)
class MessageForm:
    """Message format; chat templates differ in the one that they accept."""

    arguments: ArgumentsForm
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
            if self.arguments is ArgumentsForm.objects and isinstance(value, str):
                function["arguments"] = _as_object(value)
            if self.arguments is ArgumentsForm.texts and isinstance(value, dict):
                function["arguments"] = json.dumps(value, ensure_ascii=False)
        return message


def _as_object(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
