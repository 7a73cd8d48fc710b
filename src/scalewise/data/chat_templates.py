"""How a conversation is written down for a model, and which part of it is an answer."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any

from scalewise import regular_files
from scalewise.data.chat_formats import TemplateLimitError
from scalewise.data.chat_messages import Conversation, Message
from scalewise.errors import DataError

TITLES = {"system": "System", "user": "User", "assistant": "Assistant"}
CONFIG, OWN_FILE = "tokenizer_config.json", "chat_template.jinja"
"""Where Hugging Face keeps a template, beside the tokenizer; the second goes first."""
SOURCES = (CONFIG, OWN_FILE, "special_tokens_map.json", "added_tokens.json", "config.json")
PLAIN = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "### Assistant:\n{{ message.content }}{{ eos_token }}"
    "{% else %}### {{ message.role | capitalize }}:\n{{ message.content }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""The template of ``plain``, in Jinja."""
SECONDS = 10.0
"""CPU time in which a chat template must write one conversation."""
REWRITTEN = (
    "answers not trained on, since the chat template rewrites them in later turns "
    "(a record for each answer, which ends with it, trains on all)"
)
SHORTENED = "answers trained on without a part that the chat template leaves out"
OMITTED = "messages left out that follow the last answer"
"""Notes, with a count."""


@dataclass(frozen=True)
class TemplatePiece:
    """Some text of a conversation; ``trained``: whether the model is to learn to write it.

    ``label``: the number of a class, which stands for no text.
    """

    text: str
    trained: bool
    label: int | None = None
    marked: bool = False
    """Whether it is between generation marks of a template."""
    separate: bool = False
    """Whether the text is tokenized by itself, not joined with the pieces before it."""


class ConversationTemplate(ABC):
    """Writes conversations as text. ``notes`` counts what a user should know of them."""

    def __init__(self) -> None:
        self.notes: Counter[str] = Counter()

    @abstractmethod
    def __call__(self, conversation: Conversation) -> list[TemplatePiece]:
        """Pieces of text, answers marked as learnt; raises ``ValueError`` if it cannot."""

    @abstractmethod
    def render_prompt(self, conversation: Conversation) -> str:
        """Text of a conversation up to where its next answer begins."""

    def close(self) -> None:  # noqa: B027
        """Frees what the template holds; it can be used again."""


def prompt_text(template: ConversationTemplate, question: str) -> str:
    """Returns a question as a conversation begins with it, up to where its answer would."""
    try:
        return template.render_prompt(Conversation((Message("user", question),)))
    except ValueError as error:
        raise DataError.for_key("prompt", question, str(error), "give another prompt") from error


class PlainTemplate(ConversationTemplate):
    """Titles in words and an end after answers: any tokenizer can write it."""

    def __init__(self, end_of_text: str) -> None:
        super().__init__()
        self._end = end_of_text

    def __call__(self, conversation: Conversation) -> list[TemplatePiece]:
        """Pieces of text; raises ``ValueError`` for what only a chat template writes."""
        extra = [key for key in ("tools", "documents") if getattr(conversation, key)]
        found = []
        for message in conversation.messages:
            extra += message.extra_fields
            if message.role == "tool":
                extra.append("a turn of 'tool'")
            if extra:
                raise ValueError(
                    f"has {extra[0]}, which needs a chat template: "
                    "give data.tokenizer=PATH of a tokenizer.json with one beside it"
                )
            title = f"### {TITLES[message.role]}:\n"
            if message.role == "assistant":
                answer = TemplatePiece(message.text + self._end, message.train)
                found += [TemplatePiece(title, False), answer]
            else:
                found.append(TemplatePiece(f"{title}{message.text}\n\n", False))
        return found

    def render_prompt(self, conversation: Conversation) -> str:
        """Text of a conversation up to where its next answer begins."""
        text = "".join(piece.text for piece in self(conversation))
        return f"{text}### {TITLES['assistant']}:\n"


def template_sources(tokenizer: Path) -> list[Path]:
    """Returns the files beside a tokenizer.json that decide its template and special tokens."""
    named = [path for name in SOURCES if (path := tokenizer.with_name(name)).is_file()]
    return [*named, *sorted(tokenizer.parent.glob("additional_chat_templates/*.jinja"))]


def load_template(tokenizer: Path) -> ConversationTemplate | None:
    """Returns the template that comes with a tokenizer.json; None where none does.

    Raises ``DataError`` for one that cannot be read.
    """
    from scalewise.data.chat_tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    templates = getattr(loaded, "chat_template", None)
    if loaded is None or not templates:
        return None
    if isinstance(templates, str):
        templates = {"default": templates}
    own = tokenizer.with_name(OWN_FILE)
    path = own if own.is_file() else tokenizer.with_name(CONFIG)
    if "default" not in templates:
        reason = f"has chat templates {', '.join(templates)}, and none of the name default"
        raise DataError.for_key("data.tokenizer", path, reason, "name one of them default")
    return ChatTemplate(path, templates, loaded.special_tokens_map)


def read_template(tokenizer: Path) -> tuple[str | None, dict[str, Any]]:
    """Returns the template that comes with a tokenizer.json, in Jinja, and its configuration."""
    path, own = tokenizer.with_name(CONFIG), tokenizer.with_name(OWN_FILE)
    config: dict[str, Any] = {}
    try:
        if path.is_file():
            config = dict(json.loads(regular_files.read_text(path)))
        if own.is_file():
            return regular_files.read_text(own), config
    except (ValueError, TypeError) as error:
        raise DataError.for_key("data.tokenizer", path, f"cannot be read ({error})") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several, each with a name
        named = {it.get("name"): it.get("template") for it in source if isinstance(it, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise DataError.for_key("data.tokenizer", path, "has a chat_template that is no text")
    return source, config


def read_end_of_text(tokenizer: Path) -> str:
    """Returns what ends a text, as is said beside a tokenizer.json; empty where nothing is."""
    return token_text(read_template(tokenizer)[1].get("eos_token"))


class ChatTemplate(ConversationTemplate):
    """A chat template in Jinja, rendered by transformers in a process of its own.

    ``path`` is the file that errors name.
    """

    def __init__(self, path: Path, templates: dict[str, str], special_tokens: dict[str, str]):
        super().__init__()
        self._path = path
        self._setup = {
            "templates": templates,
            "special_tokens": special_tokens,
            "seconds": SECONDS,
        }
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, conversation: Conversation) -> list[TemplatePiece]:
        """Pieces of the text as transformers renders it; raises ``ValueError``."""
        found = self._request_rendering(conversation, prompt=False)
        text, at, pieces = found["text"], 0, []
        for start, stop in found["spans"]:
            answer = TemplatePiece(text[start:stop], True, marked=found["marked"])
            pieces += [TemplatePiece(text[at:start], False), answer]
            at = stop
        for note, key in ((REWRITTEN, "rewritten"), (SHORTENED, "shortened"), (OMITTED, "omitted")):
            self.notes[note] += found[key]
        return [*pieces, TemplatePiece(text[at:], False)]

    def render_prompt(self, conversation: Conversation) -> str:
        """Text of a conversation with transformers' generation prompt."""
        return str(self._request_rendering(conversation, prompt=True)["text"])

    def close(self) -> None:
        """Ends the process; the next conversation starts another."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _request_rendering(self, conversation: Conversation, *, prompt: bool) -> dict[str, Any]:
        request = {
            "messages": [message.to_dict() for message in conversation.messages],
            "train": [message.train for message in conversation.messages],
            "tools": conversation.tools,
            "documents": conversation.documents,
            "variables": conversation.variables,
        }
        if self._process is None:
            self._start_process()
        answer = self._send_request({"request": request, "prompt": prompt})
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _start_process(self) -> None:
        command = [sys.executable, "-P", "-m", "scalewise.data.chat_rendering"]
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
        self._process = subprocess.Popen(  # noqa: S603  # our own module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**environ, **quiet},
        )
        self._finalizer = weakref.finalize(self, _end_token, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._setup) + "\n")
        answer = self._send_request({"request": None})
        if "error" in answer:
            self.close()
            fix = "repair the template, or put another beside data.tokenizer"
            reason = f"the chat template {answer['error']}"
            raise DataError.for_key("data.tokenizer", self._path, reason, fix)

    def _send_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of the process; raises ``DataError`` where a limit ended it."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            status = process.wait()
            self.close()
            reason = f"takes over {SECONDS:g} s of CPU time"
            if status != -signal.SIGPROF:
                reason = f"ends its process (exit status {status})"
            raise TemplateLimitError.for_template(self._path, reason)
        found: dict[str, Any] = json.loads(answer)
        if "limit" in found:
            self.close()
            raise TemplateLimitError.for_template(self._path, found["limit"])
        return found


def _end_token(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def token_text(token: object) -> str:
    """Returns a token's text; configurations hold it as such, or in a table."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
