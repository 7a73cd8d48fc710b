"""Renders conversations with a chat template and finds the text to train on.

Chat templates are programs from outside: they may loop forever or fill the memory. They run in a
process of their own (``python -m scalewise.data.chat_rendering``) that reads one JSON object a line
and answers each by another; ``scalewise.data.chat_templates`` starts it. The first line is
``Setup``.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from scalewise.data.chat_forms import (
    ArgumentsForm,
    MessageForm,
    Messages,
    contains_text,
    has_arguments,
    has_json_arguments,
    is_answer,
)

GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
"""The mark that transformers looks for to return an assistant mask."""
TEXT_FACTOR, TEXT_ALLOWANCE = 100, 1_000_000
"""Characters of a rendered text, at most: a factor of its conversation's, and a constant."""
TIMED_MESSAGES = 50
"""Each message is rendered with all before it: a long conversation takes its time."""
REASONING = "reasoning_content"
MEMORY = 1 << 30
"""Bytes that rendering may allocate."""

Span = tuple[int, int]


@dataclass(frozen=True)
class RenderSetup:
    """What one tokenizer renders with: ``templates`` by name and ``special_tokens`` by attribute.

    ``seconds``: CPU time that ``TIMED_MESSAGES`` messages of one conversation may take.
    """

    templates: dict[str, str]
    special_tokens: dict[str, str]
    seconds: float


@dataclass
class RenderedChat:
    """A conversation as text, with the spans of characters to train on, in order.

    ``marked``: whether the template marks the spans. ``rewritten``: answers that the template
    writes otherwise once the conversation goes on; they are not in ``spans``. ``shortened``:
    answers of which it leaves out a part. ``omitted``: messages after the last answer that are not
    in the text.
    """

    text: str
    spans: list[Span]
    marked: bool = False
    rewritten: int = 0
    shortened: int = 0
    omitted: int = 0


@dataclass(frozen=True)
class RenderRequest:
    """A conversation to render: messages as transformers takes them, without ``None`` values.

    ``train`` says for each message whether its text is trained on.
    """

    messages: Messages
    train: list[bool] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


class TemplateRenderer:
    """Renders requests with the templates of one tokenizer."""

    def __init__(self, setup: RenderSetup) -> None:
        self._templates, self.special_tokens = setup.templates, setup.special_tokens

    def check_syntax(self) -> None:
        """Raises ``ValueError`` for a template with an error of syntax."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        for template in self._templates.values():
            try:
                _compile_jinja_template(template)
            except TemplateError as error:
                raise ValueError(f"has an error: {error}") from error

    def render_prompt(self, request: RenderRequest) -> str:
        """Text of a conversation up to where an answer is to be generated."""
        return self.render_text(request, self._choose_message_form(request)[0], prompt=True)

    def render_chat(self, request: RenderRequest) -> RenderedChat:
        """Text of a conversation and the parts of it to train on.

        Raises ``ValueError`` for a conversation that the template cannot write in full.
        """
        rendered = self._render_chat(request)
        if rendered.spans:
            return rendered
        last = max(i for i, message in enumerate(request.messages) if is_answer(message))
        omitted = len(request.messages) - last - 1
        if omitted:
            kept = RenderRequest(
                request.messages[: last + 1],
                request.train[: last + 1],
                request.tools,
                request.documents,
                request.variables,
            )
            rendered = self._render_chat(kept)
        if not rendered.spans:
            why = "writes each otherwise as the conversation goes on" if rendered.rewritten else ""
            raise ValueError(f"has no answer to train on{why and f': the chat template {why}'}")
        rendered.omitted = omitted
        return rendered

    def _render_chat(self, request: RenderRequest) -> RenderedChat:
        messages, text = self._choose_message_form(request)
        self._check_complete(request, messages, text)
        turns = _TurnSpans(self, request, messages, text)
        trained = [index for index in turns.answer_indices if request.train[index]]
        rewritten = 0
        marked = bool(GENERATION.search(self._select_template(request)))
        if marked:
            _, spans = self._render(request, messages, return_spans=True)
            if len(trained) < len(turns.answer_indices):
                spans = turns.trained_spans(spans)
        else:
            found = {index: turns.answer_span(index) for index in trained}
            trained = [index for index, span in found.items() if span]
            spans = [span for span in found.values() if span]
            rewritten = len(found) - len(spans)
        shortened = sum(
            not all(contains_text(text, messages[index].get(key)) for key in ("content", REASONING))
            for index in trained
        )
        spans = [span for span in spans if span[0] < span[1]]
        return RenderedChat(text, spans, marked, rewritten, shortened)

    def _choose_message_form(self, request: RenderRequest) -> tuple[Messages, str]:
        """The form of the messages that the template writes best, and the text.

        Templates differ in whether arguments of tool calls are JSON objects or their text, and
        whether contents are strings or lists of parts. The first form that keeps all is taken; else
        the first that can be rendered.
        """
        first: tuple[Messages, str] | None = None
        failure: ValueError | None = None
        seen: list[Messages] = []
        developer = "developer" in self._select_template(request)
        for parts, empty, arguments in product((False, True), (False, True), ArgumentsForm):
            form = MessageForm(arguments, parts, empty, developer)
            messages = [form.convert(message) for message in request.messages]
            if messages in seen:
                continue
            seen.append(messages)
            try:
                text = self.render_text(request, messages)
            except ValueError as error:
                failure = failure or error
                continue
            if first is None or not has_json_arguments(*first):
                first = messages, text
            contents = [message["content"] for message in messages if not is_answer(message)]
            if (
                has_json_arguments(messages, text)
                and all(contains_text(text, content) for content in contents)
                and not (parts and "{'type': 'text'" in text)  # the list itself
            ):
                return messages, text
        if first is None:
            assert failure is not None
            raise failure
        return first

    def _check_complete(self, request: RenderRequest, messages: Messages, text: str) -> None:
        """Raises ``ValueError`` for a part of the conversation that the template leaves out."""
        for key in ("tools", "documents"):
            if getattr(request, key) and self._renders_same(request, messages, text, **{key: None}):
                raise ValueError(f"has {key}, which the chat template does not write")
        for index, message in enumerate(messages):
            if not is_answer(message) and not contains_text(text, message["content"]):
                changed = [*messages]
                changed[index] = message | {"content": "?"}
                if self._renders_same(request, changed, text):
                    role = message["role"]
                    reason = f"has a turn of {role!r}, which the chat template does not write"
                    raise ValueError(reason)
            for key in ("tool_calls", REASONING, "name"):
                if key not in message or (key == "name" and message["role"] == "tool"):
                    continue
                if key == REASONING and contains_text(text, message[key]):
                    continue
                told = messages[: index + 1]
                without = {k: v for k, v in message.items() if k != key}
                if self._renders_same(
                    request, [*told[:-1], without], self.render_text(request, told)
                ):
                    reason = f"has {key} in a turn, which the chat template does not write"
                    raise ValueError(reason)

    def _renders_same(
        self, request: RenderRequest, messages: Messages, text: str, **changed_fields: None
    ) -> bool:
        """Whether other messages, or other parts of the request, are rendered to the same text."""
        other = RenderRequest(**{**vars(request), **changed_fields})
        try:
            return self.render_text(other, messages) == text
        except ValueError:
            return False

    def render_text(
        self, request: RenderRequest, messages: Messages, *, prompt: bool = False
    ) -> str:
        """Messages as text, with a generation prompt if ``prompt``."""
        return self._render(request, messages, prompt=prompt)[0]

    def _select_template(self, request: RenderRequest) -> str:
        """The template that transformers uses: ``tool_use``, if there is one, for tools."""
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
        own = {"messages", *inspect.signature(render).parameters}
        if wrong := sorted(own & request.variables.keys()):
            raise ValueError(f"has chat_template_kwargs with {wrong[0]}, which is no variable")
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
        except Exception as error:  # a template may do whatever a sandbox lets it
            if "Undefined" in repr(error) and not has_arguments(messages):
                reason = "has a tool call without arguments, which the chat template writes"
                raise ValueError(f"{reason} (a call without any has an empty object)") from error
            raise ValueError(f"is rejected by the chat template: {error}") from error
        given = len(json.dumps(messages)) + len(json.dumps([request.tools, request.documents]))
        if len(texts[0]) > TEXT_ALLOWANCE + TEXT_FACTOR * given:
            raise MemoryError
        return texts[0], [(start, stop) for start, stop in spans[0]] if return_spans else []


class _TurnSpans:
    """Where the turns of a conversation are in its text, by renderings of its beginnings."""

    def __init__(
        self, renderer: TemplateRenderer, request: RenderRequest, messages: Messages, text: str
    ) -> None:
        self._renderer = renderer
        self._special = tuple(filter(None, renderer.special_tokens.values()))
        self._request, self._messages, self._full_text = request, messages, text
        self.answer_indices = [i for i, message in enumerate(messages) if is_answer(message)]

    def answer_span(self, index: int) -> Span | None:
        """Span of an answer as a model would generate it; None if the text has another there."""
        told = self._prefix_text(index)
        if told is None:
            return None
        start = self._answer_start(index, told)
        stop = self._prefix_end(told)
        return (start, stop) if start is not None and start < stop else None

    def trained_spans(self, spans: Sequence[Span]) -> list[Span]:
        """The marked spans that are in answers to train on."""
        train = self._request.train
        stops: list[int] = []
        for index in range(len(self._messages)):
            told = self._prefix_text(index)
            stops.append(0 if told is None else self._prefix_end(told))
        if stops[0] and stops == sorted(stops):
            owners = [next(i for i, stop in enumerate(stops) if span[0] < stop) for span in spans]
        elif len(spans) == len(self.answer_indices):
            owners = self.answer_indices
        else:
            raise ValueError(
                "has answers not to train on, which cannot be told apart: the chat template "
                "writes earlier turns otherwise as the conversation goes on"
            )
        return [span for span, owner in zip(spans, owners, strict=True) if train[owner]]

    def _prefix_text(self, index: int) -> str | None:
        """Text of the conversation up to a message."""
        if index == len(self._messages) - 1:
            return self._full_text
        try:
            return self._render(self._messages[: index + 1])
        except ValueError:
            return None

    def _render(self, messages: Messages, *, prompt: bool = False) -> str:
        return self._renderer.render_text(self._request, messages, prompt=prompt)

    def _answer_start(self, index: int, prefix_text: str) -> int | None:
        """Where an answer begins: after what the template writes to ask for it."""
        if index:
            try:
                asked = self._render(self._messages[:index], prompt=True)
            except ValueError:
                asked = None
            if asked and prefix_text.startswith(asked):
                return len(asked) if self._full_text.startswith(asked) else None
        # The generation prompt holds more than the answer begins with, as an opened thought.
        header = self._answer_header(index)
        if header is None:
            return None
        if not (prefix_text.startswith(header) and self._full_text.startswith(header)):
            return None
        return len(header)

    def _answer_header(self, index: int) -> str | None:
        """Text up to an answer: what renderings with different answers begin with."""
        message = self._messages[index]
        texts = {"content", *({REASONING} & message.keys())}
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        for kept in (message, plain):
            probes = [kept | dict.fromkeys(texts, letter) for letter in ("A", "B")]
            try:
                one, other = (self._render([*self._messages[:index], probe]) for probe in probes)
            except ValueError:
                continue
            if one != other:
                return _common_start(one, other)
        return None

    def _prefix_end(self, prefix_text: str) -> int:
        """Where the text up to a message ends within the whole text; 0 if it is not in there.

        What a template adds at the end of a conversation alone (special tokens, whitespace) may be
        absent.
        """
        while prefix_text and not self._full_text.startswith(prefix_text):
            outcome = next((token for token in self._special if prefix_text.endswith(token)), "")
            if not outcome and not prefix_text[-1].isspace():
                return 0
            prefix_text = prefix_text[: -len(outcome) or -1]
        return len(prefix_text)


def _common_start(first: str, second: str) -> str:
    pairs = zip(first, second, strict=False)
    return first[: next((i for i, (one, other) in enumerate(pairs) if one != other), len(first))]


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


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
        return {"limit": "takes too much memory or writes too much text"}
    except RecursionError:
        return {"error": "is nested too deep for the chat template"}


def serve_requests() -> None:
    """Answers requests until the input ends.

    A timer of CPU time ends the process within one request that takes too long.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # standard output carries answers alone
    setup = RenderSetup(**json.loads(sys.stdin.readline()))
    renderer = TemplateRenderer(setup)
    import transformers.utils.chat_template_utils  # noqa: F401  # before the limits

    _limit_memory()
    for line in sys.stdin:
        answer = json.dumps(_render_request(renderer, line, setup.seconds))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    serve_requests()
