"""User-defined questions and answers for encoder-decoder models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from scalewise.data.chat import ChatData
from scalewise.data.chat_formats import parse_conversation
from scalewise.data.chat_templates import ConversationTemplate, TextSegment
from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


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
        """Yield an invalid ``target_length``, and the issues of ``ChatData``."""
        yield from super().validate()
        if not 0 < self.target_length < self.sequence:
            yield self.target_length_issue()
        if self.packing:
            reason = "is not supported with separate encoder and decoder texts"
            yield ConfigIssue("data.packing", True, reason, "set data.packing=false")

    def render_record(
        self, record: dict[str, Any], template: ConversationTemplate
    ) -> tuple[list[TextSegment], ...]:
        """Return a question without labels, and its answer; raises ``ValueError``."""
        conversation = parse_conversation(record, self.record_keys(template))
        messages = conversation.messages
        answer_index = max(
            index for index, message in enumerate(messages) if message.role == "assistant"
        )
        prompt_messages, answer = messages[:answer_index], messages[answer_index]
        if not any(message.text.strip() for message in prompt_messages):
            raise ValueError("has no question")
        if answer.extra_fields:
            raise ValueError(
                f"has {next(iter(answer.extra_fields))} in its answer, which must be only text"
            )
        if not answer.train:
            raise ValueError("has no answer to train on: training is disabled for the last one")
        text = prompt_messages[0].text
        if (
            len(prompt_messages) > 1
            or prompt_messages[0].extra_fields
            or conversation.tools
            or conversation.documents
        ):
            text = template.render_prompt(replace(conversation, messages=prompt_messages))
        question = TextSegment(text + self.end_of_text, trained=False)
        return (
            [question, TextSegment(answer.text + self.end_of_text, trained=True, separate=True)],
        )
