"""The user's own questions and answers, apart: an encoder reads the one, a decoder the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from scalewise.config.registry import register_option
from scalewise.data.chat import ChatData
from scalewise.data.chat_formats import parse_conversation
from scalewise.data.chat_templates import ConversationTemplate, TemplatePiece
from scalewise.errors import ConfigIssue


@register_option("data", "seq2seq")
@dataclass(frozen=True)
class Seq2SeqData(ChatData):
    """Questions with answers for an encoder-decoder model, each truncated to its length.

    The question is the text before the last answer: one message as it is, several by the chat
    template.
    """

    sequence: int = 256
    """Length of a question with its answer, in tokens."""
    target_length: int = 64
    """Part of ``sequence`` that is for the answer, in tokens."""

    kind: ClassVar[str] = "seq2seq"
    record_description: ClassVar[str] = "question with an answer"

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields a target that leaves no room for a question, and what ``Chat`` does."""
        yield from super().validate()
        if not 0 < self.target_length < self.sequence:
            yield self.target_length_issue()
        if self.packing:
            reason = "is for texts that one model reads, and these are apart"
            yield ConfigIssue("data.packing", True, reason, "set data.packing=false")

    def render_record(
        self, record: dict[str, Any], template: ConversationTemplate
    ) -> tuple[list[TemplatePiece], ...]:
        """Returns a question, of which nothing is learnt, and its answer; raises ``ValueError``."""
        told = parse_conversation(record, self.record_keys(template))
        messages = told.messages
        last = max(at for at, message in enumerate(messages) if message.role == "assistant")
        asked, answer = messages[:last], messages[last]
        if not any(message.text.strip() for message in asked):
            raise ValueError("has no question")
        if answer.extra_fields:
            raise ValueError(
                f"has {next(iter(answer.extra_fields))} in its answer, which is to be a text"
            )
        if not answer.train:
            raise ValueError("has no answer to train on: the last is switched off")
        text = asked[0].text
        if len(asked) > 1 or asked[0].extra_fields or told.tools or told.documents:
            text = template.render_prompt(replace(told, messages=asked))
        question = TemplatePiece(text + self.end_of_text, trained=False)
        return (
            [question, TemplatePiece(answer.text + self.end_of_text, trained=True, separate=True)],
        )
