"""How a conversation is written down for a model, and which part of it is an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from scalewise.data.conversations import Conversation, Message
from scalewise.errors import DataError

TITLES = {"system": "System", "user": "User", "assistant": "Assistant"}
CONFIG = "tokenizer_config.json"
"""Where Hugging Face keeps a template, beside the tokenizer."""


@dataclass(frozen=True)
class Piece:
    """Some text of a conversation; ``learnt``: whether the model is to learn to write it."""

    text: str
    learnt: bool


Template = Callable[[Conversation], list[Piece]]


def plain(end_of_text: str) -> Template:
    """Returns a template that any tokenizer can write: titles in words, an end after answers."""

    def pieces(conversation: Conversation) -> list[Piece]:
        found = []
        for message in conversation:
            title = f"### {TITLES[message.role]}:\n"
            if message.role == "assistant":
                found += [Piece(title, False), Piece(message.content + end_of_text, True)]
            else:
                found.append(Piece(f"{title}{message.content}\n\n", False))
        return found

    return pieces


def beside(tokenizer: Path) -> Template | None:
    """Returns the template that comes with a tokenizer.json; None where none does.

    Raises ``DataError`` for one that cannot be read.
    """
    path = tokenizer.with_name(CONFIG)
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        source = config.get("chat_template")
    except (ValueError, AttributeError) as error:
        raise DataError.one("data.tokenizer", path, f"is not JSON ({error})") from error
    return None if source is None else _of_jinja(str(source), config, path)


def _of_jinja(source: str, config: dict[str, Any], path: Path) -> Template:
    """Returns a template in Jinja, as Hugging Face keeps them; it runs in a sandbox.

    An answer is what the template adds when the answer is there, over what it writes to ask for it.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    words = {key: _word(config.get(key)) for key in ("bos_token", "eos_token")}
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise DataError.one("data.tokenizer", path, f"has no sound template: {error}") from error

    def rendered(messages: Sequence[Message], *, asks: bool) -> str:
        told = [asdict(message) for message in messages]
        try:
            return template.render(messages=told, add_generation_prompt=asks, **words)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"is refused by the template: {error}") from error

    def pieces(conversation: Conversation) -> list[Piece]:
        found: list[Piece] = []
        written = ""
        for place, message in enumerate(conversation):
            if message.role != "assistant":
                continue
            asked = rendered(conversation[:place], asks=True)
            told = rendered(conversation[: place + 1], asks=False)
            if not (asked.startswith(written) and told.startswith(asked)):
                raise ValueError("is written otherwise by the template as it goes on")
            found += [Piece(asked[len(written) :], False), Piece(told[len(asked) :], True)]
            written = told
        return found

    return pieces


def _word(token: object) -> str:
    """Returns a token's text; configurations hold it as such, or in a table."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
