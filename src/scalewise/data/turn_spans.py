"""Positions of the answers of a conversation in its rendered text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scalewise.data.message_forms import REASONING_KEY, Messages, is_answer

Span = tuple[int, int]
"""Start and stop character."""


class TurnSpans:
    """Positions of the turns of a conversation in its text, found by rendering its prefixes."""

    def __init__(
        self,
        render: Callable[..., str],
        special_tokens: tuple[str, ...],
        messages: Messages,
        text: str,
    ) -> None:
        """Initialize the spans; ``render(messages, prompt=bool)`` returns a rendered text."""
        self._render, self._special = render, special_tokens
        self._messages, self._full_text = messages, text
        self.answer_indices = [i for i, message in enumerate(messages) if is_answer(message)]

    def answer_span(self, index: int) -> Span | None:
        """Return the span of an answer as a model would generate it; None if there is none."""
        prefix_text = self._prefix_text(index)
        if prefix_text is None:
            return None
        start = self._answer_start(index, prefix_text)
        stop = self._prefix_end(prefix_text)
        return (start, stop) if start is not None and start < stop else None

    def trained_spans(self, spans: Sequence[Span], train: Sequence[bool]) -> list[Span]:
        """Return the marked spans of the answers to train on."""
        stops: list[int] = []
        for index in range(len(self._messages)):
            prefix_text = self._prefix_text(index)
            stops.append(0 if prefix_text is None else self._prefix_end(prefix_text))
        if stops[0] and stops == sorted(stops):
            owners = [next(i for i, stop in enumerate(stops) if span[0] < stop) for span in spans]
        elif len(spans) == len(self.answer_indices):
            owners = self.answer_indices
        else:
            raise ValueError(
                "has answers not to train on, which cannot be distinguished: the chat template "
                "changes earlier turns in later ones"
            )
        return [span for span, owner in zip(spans, owners, strict=True) if train[owner]]

    def _prefix_text(self, index: int) -> str | None:
        """Return the text of the conversation up to and including a message."""
        if index == len(self._messages) - 1:
            return self._full_text
        try:
            return self._render(self._messages[: index + 1])
        except ValueError:
            return None

    def _answer_start(self, index: int, prefix_text: str) -> int | None:
        """Return the start of an answer, after the generation prompt."""
        if index:
            try:
                prompt_text = self._render(self._messages[:index], prompt=True)
            except ValueError:
                prompt_text = None
            if prompt_text and prefix_text.startswith(prompt_text):
                return len(prompt_text) if self._full_text.startswith(prompt_text) else None
        # The generation prompt may be longer than the header, such as by an opened thought.
        header = self._answer_header(index)
        if header is not None and not prefix_text.startswith(header):
            header = self._partial_prompt(index, prefix_text)
        if header is None:
            return None
        if not (prefix_text.startswith(header) and self._full_text.startswith(header)):
            return None
        return self._prompt_end(index, header)

    def _partial_prompt(self, index: int, prefix_text: str) -> str | None:
        """Return the part of the generation prompt that begins an answer; None if there is none.

        A text with reasoning tags may continue it otherwise than other texts.
        """
        try:
            earlier_text, prompt_text = (
                self._render(self._messages[:index], prompt=it) for it in (False, True)
            )
        except ValueError:
            return None
        shared = _common_prefix(prompt_text, prefix_text)
        is_longer = len(shared) > len(_common_prefix(earlier_text, prompt_text))
        return shared if is_longer else None

    def _prompt_end(self, index: int, header: str) -> int:
        """Return the end of the generation prompt in a header; the header's if it has none.

        The text before the last turn may differ from that of the prompt, and the header may
        continue after it, as by a channel in gpt-oss.
        """
        try:
            earlier_text = self._render(self._messages[: max(0, index - 1)])
            prompt_text = self._render(self._messages[:index], prompt=True)
        except ValueError:
            return len(header)
        last_turn = prompt_text[len(_common_prefix(earlier_text, prompt_text)) :]
        start = header.rfind(last_turn)
        return len(header) if start < 0 else start + len(last_turn)

    def _answer_header(self, index: int) -> str | None:
        """Return the text before an answer: the common prefix for different answers."""
        message = self._messages[index]
        text_keys = {"content", *({REASONING_KEY} & message.keys())}
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        for base_message in (message, plain):
            probes = [base_message | dict.fromkeys(text_keys, letter) for letter in ("A", "B")]
            try:
                one, other = (self._render([*self._messages[:index], probe]) for probe in probes)
            except ValueError:
                continue
            if one != other:
                return _common_prefix(one, other)
        return None

    def _prefix_end(self, prefix_text: str) -> int:
        """Return the end of the text up to a message within the full text; 0 if it is not a prefix.

        Special tokens and whitespace that a template adds only at the end of a conversation are
        ignored.
        """
        while prefix_text and not self._full_text.startswith(prefix_text):
            end_token = next((token for token in self._special if prefix_text.endswith(token)), "")
            if not end_token and not prefix_text[-1].isspace():
                return 0
            prefix_text = prefix_text[: -len(end_token) or -1]
        return len(prefix_text)


def _common_prefix(first: str, second: str) -> str:
    pairs = zip(first, second, strict=False)
    return first[: next((i for i, (one, other) in enumerate(pairs) if one != other), len(first))]
