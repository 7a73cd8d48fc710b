"""How a conversation is written down for a model, and which part of it is an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from scalewise.data.conversations import Conversation, Message
from scalewise.errors import DataError

TITLES = {"system": "System", "user": "User", "assistant": "Assistant"}
CONFIG, OWN_FILE = "tokenizer_config.json", "chat_template.jinja"
"""Where Hugging Face keeps a template, beside the tokenizer; the second goes first."""
PLAIN = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "### Assistant:\n{{ message.content }}{{ eos_token }}"
    "{% else %}### {{ message.role | capitalize }}:\n{{ message.content }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""The template of ``plain``, in Jinja."""
MASKS = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""Marks of transformers around what is learnt; here the template is asked for it."""


@dataclass(frozen=True)
class Piece:
    """Some text of a conversation; ``learnt``: whether the model is to learn to write it.

    ``label``: the number of a class, which stands for no text.
    """

    text: str
    learnt: bool
    label: int | None = None


Template = Callable[[Conversation], list[Piece]]


def asking(template: Template, question: str) -> str:
    """Returns a question as a conversation begins with it, up to where its answer would."""
    pieces = template((Message("user", question), Message("assistant", "?")))
    return "".join(piece.text for piece in takewhile(lambda piece: not piece.learnt, pieces))


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


def sources(tokenizer: Path) -> list[Path]:
    """Returns the files beside a tokenizer.json that decide its template."""
    return [path for name in (CONFIG, OWN_FILE) if (path := tokenizer.with_name(name)).is_file()]


def beside(tokenizer: Path) -> Template | None:
    """Returns the template that comes with a tokenizer.json; None where none does.

    Raises ``DataError`` for one that cannot be read.
    """
    source, config = source_beside(tokenizer)
    return _of_jinja(source, config, tokenizer) if source else None


def source_beside(tokenizer: Path) -> tuple[str | None, dict[str, Any]]:
    """Returns the template that comes with a tokenizer.json, in Jinja, and its configuration."""
    path, own = tokenizer.with_name(CONFIG), tokenizer.with_name(OWN_FILE)
    config: dict[str, Any] = {}
    try:
        if path.is_file():
            config = dict(json.loads(path.read_text(encoding="utf-8")))
        if own.is_file():
            return own.read_text(encoding="utf-8"), config
    except (ValueError, TypeError) as error:
        raise DataError.one("data.tokenizer", path, f"cannot be read ({error})") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several, each with a name
        named = {it.get("name"): it.get("template") for it in source if isinstance(it, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise DataError.one("data.tokenizer", path, "has a chat_template that is no text")
    return source, config


def end_beside(tokenizer: Path) -> str:
    """Returns what ends a text, as is said beside a tokenizer.json; empty where nothing is."""
    return _word(source_beside(tokenizer)[1].get("eos_token"))


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
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    words = {key: _word(config.get(key)) for key in ("bos_token", "eos_token")}
    try:
        template = environment.from_string(MASKS.sub("", source))
    except TemplateError as error:
        raise DataError.one("data.tokenizer", path, f"has no sound template: {error}") from error

    def rendered(messages: Sequence[Message], *, asks: bool) -> str:
        told = [asdict(message) for message in messages]
        try:
            return template.render(messages=told, add_generation_prompt=asks, **words)
        except Exception as error:  # a template may do whatever a sandbox lets it
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
        if not any(piece.learnt and piece.text for piece in found):
            raise ValueError("has no answer as the template writes it")
        return found

    return pieces


def _word(token: object) -> str:
    """Returns a token's text; configurations hold it as such, or in a table."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
