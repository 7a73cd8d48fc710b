"""Chat templates that render conversations, and the parts of a text that are trained on."""

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
from scalewise.data.chat_messages import Conversation, Message
from scalewise.data.record_files import TemplateLimitError
from scalewise.data.tokenizer import (
    conversion_error,
    has_declarations,
    load_with_transformers,
)
from scalewise.errors import DataError

CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
"""Files next to the tokenizer in which Hugging Face stores a template; the second takes
precedence."""
TEMPLATE_SOURCES = (
    CONFIG_FILE,
    TEMPLATE_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "### Assistant:\n{{ message.content }}{{ eos_token }}"
    "{% else %}### {{ message.role | capitalize }}:\n{{ message.content }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""Jinja source of ``PlainTemplate``."""
CPU_SECONDS = 10.0
"""CPU time limit of a chat template for one conversation."""
MAX_MESSAGES = 2000
"""Maximum number of messages of a conversation; the time grows with its square."""
REWRITTEN_NOTE = (
    "answers not trained on, since the chat template changes them in later turns "
    "(to train on all, use one record per answer that ends with it)"
)
SHORTENED_NOTE = "answers trained on without a part that the chat template omits"
OMITTED_NOTE = "messages after the last answer omitted"
"""Notes that are printed with a count."""


@dataclass(frozen=True)
class TextSegment:
    """Part of a rendered conversation."""

    text: str
    """Text of the part."""
    trained: bool
    """Whether its tokens are labels."""
    label: int | None = None
    """Class index, which replaces the text."""
    marked: bool = False
    """Whether it is between generation marks of a template."""
    separate: bool = False
    """Whether the text is tokenized separately from the preceding parts."""


RenderedRecord = tuple[list[TextSegment], ...]
"""Rendered conversation of a record, or both conversations of a pair."""


class ConversationTemplate(ABC):
    """Base class of templates that render conversations. ``notes`` counts notes for the user."""

    def __init__(self) -> None:
        self.notes: Counter[str] = Counter()

    @abstractmethod
    def __call__(self, conversation: Conversation) -> list[TextSegment]:
        """Return the parts of a conversation; raises ``ValueError`` if it cannot be rendered."""

    @abstractmethod
    def render_prompt(self, conversation: Conversation) -> str:
        """Return the text of a conversation up to its next answer."""

    def close(self) -> None:  # noqa: B027
        """Release resources; the template can still be used afterwards."""


def prompt_text(template: ConversationTemplate, question: str) -> str:
    """Return a question rendered as the start of a conversation, up to its answer."""
    try:
        return template.render_prompt(Conversation((Message("user", question),)))
    except ValueError as error:
        raise DataError.for_key("prompt", question, str(error), "use another prompt") from error


class PlainTemplate(ConversationTemplate):
    """Template with titles in plain text and an end token after answers, for any tokenizer.

    It renders as ``PLAIN_TEMPLATE``, but starts no process: Jinja takes 2 s to start, and 40 times
    the time per conversation.
    """

    def __init__(self, end_of_text: str) -> None:
        super().__init__()
        self._end = end_of_text

    def __call__(self, conversation: Conversation) -> list[TextSegment]:
        """Return the parts of a conversation; raises ``ValueError`` for unsupported fields."""
        arguments = {
            "tools": conversation.tools,
            "documents": conversation.documents,
            "chat_template_kwargs": conversation.variables,
        }
        unsupported = [key for key, value in arguments.items() if value]
        segments = []
        for message in conversation.messages:
            unsupported += message.extra_fields
            if message.role == "tool":
                unsupported.append("a turn of 'tool'")
            if unsupported:
                raise ValueError(
                    f"has {unsupported[0]}, which requires a chat template: "
                    "set data.tokenizer=PATH to a tokenizer.json with one next to it"
                )
            title = f"### {message.role.capitalize()}:\n"
            if message.role == "assistant":
                answer = TextSegment(message.text + self._end, message.train)
                segments += [TextSegment(title, False), answer]
            else:
                segments.append(TextSegment(f"{title}{message.text}\n\n", False))
        return segments

    def render_prompt(self, conversation: Conversation) -> str:
        """Return the text of a conversation up to its next answer."""
        text = "".join(segment.text for segment in self(conversation))
        return f"{text}### Assistant:\n"


def template_sources(tokenizer: Path) -> list[Path]:
    """Return the files next to a tokenizer.json that decide its template and special tokens."""
    files = [path for name in TEMPLATE_SOURCES if (path := tokenizer.with_name(name)).is_file()]
    return [*files, *sorted(tokenizer.parent.glob("additional_chat_templates/*.jinja"))]


def load_template(tokenizer: Path) -> ConversationTemplate | None:
    """Return the chat template of a tokenizer.json; None if there is none.

    Raises ``DataError`` if it cannot be read.
    """
    hf_tokenizer = _load_hf_tokenizer(tokenizer)
    templates = getattr(hf_tokenizer, "chat_template", None)
    if hf_tokenizer is None or not templates:
        return None
    if isinstance(templates, str):
        templates = {"default": templates}
    template_file = tokenizer.with_name(TEMPLATE_FILE)
    path = template_file if template_file.is_file() else tokenizer.with_name(CONFIG_FILE)
    if "default" not in templates:
        reason = f"has chat templates {', '.join(templates)}, none of them named default"
        raise DataError.for_key("data.tokenizer", path, reason, "rename one of them to default")
    return ChatTemplate(path, templates, hf_tokenizer.special_tokens_map)


def _load_hf_tokenizer(file: Path) -> Any:
    """Load a tokenizer.json with the files next to it, as transformers does.

    Returns None if there is no chat_template.jinja, tokenizer_config.json or other declaration next
    to it. Raises ``DataError`` for files that cannot be read, and for a class that transformers
    cannot load.
    """
    is_declared = has_declarations(file)
    if not (
        is_declared or any(file.with_name(name).is_file() for name in (CONFIG_FILE, TEMPLATE_FILE))
    ):
        return None
    template, config = read_template(file)
    from transformers import PreTrainedTokenizerFast

    if is_declared:
        try:
            return load_with_transformers(file.parent)
        except Exception as error:  # transformers raises many classes
            raise conversion_error(str(file), file.parent, error) from error
    special_tokens = {
        key: token_text(token) for key, token in config.items() if key.endswith("_token")
    }
    try:
        tokenizer_class: Any = PreTrainedTokenizerFast
        return tokenizer_class(
            tokenizer_file=str(file),
            chat_template=template,
            **{key: token for key, token in special_tokens.items() if token and "add_" not in key},
        )
    except Exception as error:
        reason = f"cannot be read with {file.name} ({error})"
        raise DataError.for_key("data.tokenizer", file.with_name(CONFIG_FILE), reason) from error


def read_template(tokenizer: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the Jinja chat template of a tokenizer.json, and the tokenizer's configuration."""
    path, template_file = tokenizer.with_name(CONFIG_FILE), tokenizer.with_name(TEMPLATE_FILE)
    config: dict[str, Any] = {}
    try:
        if path.is_file():
            config = dict(json.loads(regular_files.read_text(path)))
        if template_file.is_file():
            return regular_files.read_text(template_file), config
    except (ValueError, TypeError) as error:
        raise DataError.for_key("data.tokenizer", path, f"cannot be read ({error})") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        by_name = {it.get("name"): it.get("template") for it in template if isinstance(it, dict)}
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise DataError.for_key("data.tokenizer", path, "has a chat_template that is not a text")
    return template, config


def read_end_of_text(tokenizer: Path) -> str:
    """Return the end-of-text token in the tokenizer's configuration; empty if there is none."""
    return token_text(read_template(tokenizer)[1].get("eos_token"))


class ChatTemplate(ConversationTemplate):
    """Jinja chat template, rendered by transformers in a separate process.

    ``path`` is the template file in error messages.
    """

    def __init__(self, path: Path, templates: dict[str, str], special_tokens: dict[str, str]):
        super().__init__()
        self._path = path
        self._setup = {
            "templates": templates,
            "special_tokens": special_tokens,
            "seconds": CPU_SECONDS,
        }
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, conversation: Conversation) -> list[TextSegment]:
        """Return the parts of a conversation as transformers renders it; raises ``ValueError``."""
        rendering = self._request_rendering(conversation, prompt=False)
        text, position, segments = rendering["text"], 0, []
        for start, stop in rendering["spans"]:
            answer = TextSegment(text[start:stop], True, marked=rendering["marked"])
            segments += [TextSegment(text[position:start], False), answer]
            position = stop
        for note, key in (
            (REWRITTEN_NOTE, "rewritten"),
            (SHORTENED_NOTE, "shortened"),
            (OMITTED_NOTE, "omitted"),
        ):
            self.notes[note] += rendering[key]
        return [*segments, TextSegment(text[position:], False)]

    def render_prompt(self, conversation: Conversation) -> str:
        """Return the text of a conversation with transformers' generation prompt."""
        return str(self._request_rendering(conversation, prompt=True)["text"])

    def close(self) -> None:
        """Stop the process; the next conversation starts a new one."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _request_rendering(self, conversation: Conversation, *, prompt: bool) -> dict[str, Any]:
        if (count := len(conversation.messages)) > MAX_MESSAGES:
            raise ValueError(
                f"has {count:,} messages, more than the {MAX_MESSAGES:,} that a chat template may "
                "render: split it into several records"
            )
        request = {
            "messages": [message.to_dict() for message in conversation.messages],
            "train": [message.train for message in conversation.messages],
            "tools": conversation.tools,
            "documents": conversation.documents,
            "variables": conversation.variables,
        }
        if self._process is None:
            self._start_process()
        response = self._send_request({"request": request, "prompt": prompt})
        if "error" in response:
            raise ValueError(response["error"])
        return response

    def _start_process(self) -> None:
        command = [sys.executable, "-P", "-m", "scalewise.data.chat_rendering"]
        quiet_env = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
        self._process = subprocess.Popen(  # noqa: S603  # a module of this package
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**environ, **quiet_env},
        )
        self._finalizer = weakref.finalize(self, _stop_process, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._setup) + "\n")
        response = self._send_request({"request": None})
        if "error" in response:
            self.close()
            fix = "repair the template, or put another one next to data.tokenizer"
            reason = f"the chat template {response['error']}"
            raise DataError.for_key("data.tokenizer", self._path, reason, fix)

    def _send_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response of the process; raises ``DataError`` if it exceeds a limit."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            status = process.wait()
            self.close()
            reason = f"takes more than {CPU_SECONDS:g} s of CPU time"
            if status != -signal.SIGPROF:
                reason = f"ends its process (exit status {status})"
            raise TemplateLimitError.for_template(self._path, reason)
        response: dict[str, Any] = json.loads(line)
        if "limit" in response:
            self.close()
            raise TemplateLimitError.for_template(self._path, response["limit"])
        return response


def _stop_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def token_text(token: object) -> str:
    """Return the text of a token, which configurations store as a text or as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
