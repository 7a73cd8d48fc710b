"""Rendering of conversations with a chat template, and detection of the text to train on.

Chat templates are untrusted programs: they may loop forever or exhaust memory. They run in a
separate process (``python -m scalewise.data.chat_rendering``) that reads one JSON object per line
and writes a JSON response for each; ``scalewise.data.chat_templates`` starts it. The first line is
a ``RenderSetup``.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import signal
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from scalewise.compat.hugging_face import compile_template
from scalewise.data.message_forms import (
    REASONING_KEY,
    Messages,
    check_turns,
    choose_message_form,
    contains_text,
    has_arguments,
    is_answer,
    renders_same,
)
from scalewise.data.turn_spans import Span, TurnSpans

GENERATION_MARK = re.compile(r"{%-?\s*generation\s*-?%}")
"""Mark in a template with which transformers returns an assistant mask."""
MAX_TEXT_FACTOR, TEXT_ALLOWANCE = 100, 1_000_000
"""Maximum characters of a rendered text: a factor of its conversation's, plus a constant."""
TIMED_MESSAGES = 50
"""Number of messages per time limit; each message is rendered with all before it."""
MAX_MEMORY_BYTES = 1 << 30
"""Memory that rendering may allocate, in bytes."""


@dataclass(frozen=True)
class RenderSetup:
    """Settings of one tokenizer."""

    templates: dict[str, str]
    """Jinja templates by name."""
    special_tokens: dict[str, str]
    """Special tokens by attribute."""
    seconds: float
    """CPU time limit for ``TIMED_MESSAGES`` messages of one conversation."""


@dataclass
class RenderedChat:
    """Rendered conversation, with the spans of characters to train on."""

    text: str
    """Rendered text."""
    spans: list[Span]
    """Start and stop characters, in order."""
    marked: bool = False
    """Whether the template marks the spans."""
    rewritten: int = 0
    """Number of answers that the template changes in later turns; ``spans`` excludes them."""
    shortened: int = 0
    """Number of answers of which the template omits a part."""
    omitted: int = 0
    """Number of messages after the last answer that are not in the text."""


@dataclass(frozen=True)
class RenderRequest:
    """Conversation to render."""

    messages: Messages
    """Messages as transformers expects them, without ``None`` values."""
    train: list[bool] = field(default_factory=list)
    """Whether each message is trained on."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of tools."""
    documents: list[dict[str, Any]] | None = None
    """Documents for retrieval."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template."""


class TemplateRenderer:
    """Renderer for the templates of one tokenizer."""

    def __init__(self, setup: RenderSetup) -> None:
        self._templates, self.special_tokens = setup.templates, setup.special_tokens

    def check_syntax(self) -> None:
        """Raise ``ValueError`` for a template with a syntax error."""
        from jinja2 import TemplateError

        for template in self._templates.values():
            try:
                compile_template(template)
            except TemplateError as error:
                raise ValueError(f"has an error: {error}") from error

    def render_prompt(self, request: RenderRequest) -> str:
        """Return the text of a conversation up to the answer to generate."""
        messages, text = self._choose_message_form(request)
        self._check_complete(request, messages, text)
        return self.render_text(request, messages, prompt=True)

    def render_chat(self, request: RenderRequest) -> RenderedChat:
        """Return the text of a conversation and the parts of it to train on.

        Raises ``ValueError`` for a conversation that the template cannot render completely.
        """
        rendered = self._render_chat(request)
        if rendered.spans:
            return rendered
        last = max(i for i, message in enumerate(request.messages) if is_answer(message))
        omitted = len(request.messages) - last - 1
        if omitted:
            messages, train = request.messages[: last + 1], request.train[: last + 1]
            rendered = self._render_chat(replace(request, messages=messages, train=train))
        if not rendered.spans:
            detail = "changes each in later turns" if rendered.rewritten else ""
            raise ValueError(
                f"has no answer to train on{detail and f': the chat template {detail}'}"
            )
        rendered.omitted = omitted
        return rendered

    def _render_chat(self, request: RenderRequest) -> RenderedChat:
        messages, text = self._choose_message_form(request)
        self._check_complete(request, messages, text)
        render = partial(self.render_text, request)
        special_tokens = tuple(filter(None, self.special_tokens.values()))
        turns = TurnSpans(render, special_tokens, messages, text)
        trained = [index for index in turns.answer_indices if request.train[index]]
        rewritten = 0
        marked = bool(GENERATION_MARK.search(self._select_template(request)))
        if marked:
            _, spans = self._render(request, messages, return_spans=True)
            if len(trained) < len(turns.answer_indices):
                spans = turns.trained_spans(spans, request.train)
        else:
            answer_spans = {index: turns.answer_span(index) for index in trained}
            trained = [index for index, span in answer_spans.items() if span]
            spans = [span for span in answer_spans.values() if span]
            rewritten = len(answer_spans) - len(spans)
        shortened = sum(
            not all(
                contains_text(text, messages[index].get(key)) for key in ("content", REASONING_KEY)
            )
            for index in trained
        )
        spans = [span for span in spans if span[0] < span[1]]
        return RenderedChat(text, spans, marked, rewritten, shortened)

    def _choose_message_form(self, request: RenderRequest) -> tuple[Messages, str]:
        """Return the messages in the format that the template renders best, and the text."""
        developer_role = "developer" in self._select_template(request)
        return choose_message_form(
            request.messages, partial(self.render_text, request), developer_role=developer_role
        )

    def _check_complete(self, request: RenderRequest, messages: Messages, text: str) -> None:
        """Raise ``ValueError`` for a part of the conversation that the template omits."""
        for key in ("tools", "documents"):
            omitted: dict[str, Any] = {key: None}
            render = partial(self.render_text, replace(request, **omitted))
            if getattr(request, key) and renders_same(render, messages, text):
                raise ValueError(f"has {key}, which the chat template omits")
        template = self._select_template(request)
        for name, value in request.variables.items():
            if value and not re.search(rf"\b{re.escape(name)}\b", template):
                raise ValueError(
                    f"has chat_template_kwargs with {name}, which the chat template omits"
                )
        check_turns(messages, text, partial(self.render_text, request))

    def render_text(
        self, request: RenderRequest, messages: Messages, *, prompt: bool = False
    ) -> str:
        """Return the text of messages, with a generation prompt if ``prompt``."""
        return self._render(request, messages, prompt=prompt)[0]

    def _select_template(self, request: RenderRequest) -> str:
        """Return the template that transformers uses: with tools, ``tool_use`` if it exists."""
        templates = self._templates
        return templates["tool_use" if request.tools and "tool_use" in templates else "default"]

    def _render(
        self,
        request: RenderRequest,
        messages: Messages,
        *,
        prompt: bool = False,
        return_spans: bool = False,
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        reserved = {"messages", *inspect.signature(render).parameters}
        if invalid := sorted(reserved & request.variables.keys()):
            raise ValueError(f"has chat_template_kwargs with {invalid[0]}, which is not a variable")
        try:
            texts, spans = render(
                [messages],
                tools=request.tools,
                documents=request.documents,
                chat_template=self._select_template(request),
                return_assistant_tokens_mask=return_spans,
                add_generation_prompt=prompt,
                **{**self.special_tokens, **request.variables},
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise any error in its sandbox
            if "Undefined" in repr(error) and not has_arguments(messages):
                reason = "has a tool call without arguments, which the chat template requires"
                raise ValueError(f"{reason} (an empty object is allowed)") from error
            raise ValueError(f"is rejected by the chat template: {error}") from error
        input_length = len(json.dumps(messages)) + len(
            json.dumps([request.tools, request.documents])
        )
        if len(texts[0]) > TEXT_ALLOWANCE + MAX_TEXT_FACTOR * input_length:
            raise MemoryError
        return texts[0], [(start, stop) for start, stop in spans[0]] if return_spans else []


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, used + MAX_MEMORY_BYTES))


def _render_request(renderer: TemplateRenderer, text: str, seconds: float) -> dict[str, Any]:
    try:
        line = json.loads(text)
        messages = len(line["request"]["messages"]) if line["request"] else 0
        signal.setitimer(signal.ITIMER_PROF, seconds * max(1, messages / TIMED_MESSAGES))
        if line["request"] is None:
            renderer.check_syntax()
            return {}
        request = RenderRequest(**line["request"])
        if line["prompt"]:
            return {"text": renderer.render_prompt(request)}
        return vars(renderer.render_chat(request))
    except ValueError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"limit": "takes too much memory or renders too much text"}
    except RecursionError:
        return {"error": "is nested too deeply for the chat template"}


def serve_requests() -> None:
    """Respond to requests until the input ends.

    A CPU timer ends the process if a request takes too long.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    responses = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # standard output contains only responses
    setup = RenderSetup(**json.loads(sys.stdin.readline()))
    renderer = TemplateRenderer(setup)
    import transformers.utils.chat_template_utils  # noqa: F401  # import before limiting memory

    _limit_memory()
    for line in sys.stdin:
        response = json.dumps(_render_request(renderer, line, setup.seconds))
        signal.setitimer(signal.ITIMER_PROF, 0)
        responses.write(f"{response}\n")
        responses.flush()


if __name__ == "__main__":
    serve_requests()
