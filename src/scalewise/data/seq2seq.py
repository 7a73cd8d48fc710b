"""The user's own questions and answers, apart: an encoder reads the one, a decoder the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from scalewise.config.registry import option
from scalewise.data.chat import Chat
from scalewise.data.conversations import conversation
from scalewise.data.templates import Piece, Template
from scalewise.errors import Complaint


@option("data", "seq2seq")
@dataclass(frozen=True)
class Seq2SeqData(Chat):
    """A question and its answer a row, each ended as a text is, and cut where it is longer.

    The question is the text before the last answer: one message as it stands, several by the
    template.
    """

    sequence: int = 256
    """Tokens of a row: of a question and of its answer."""
    target_length: int = 64
    """Tokens of these for the answer; the others are for the question."""

    kind: ClassVar[str] = "seq2seq"
    record: ClassVar[str] = "question with an answer"

    def complaints(self) -> Iterator[Complaint]:
        """Yields a target that leaves no room for a question, and what ``Chat`` does."""
        yield from super().complaints()
        if not 0 < self.target_length < self.sequence:
            yield self.no_target()
        if self.packing:
            reason = "is for texts that one model reads, and these are apart"
            yield Complaint("data.packing", True, reason, "set data.packing=false")

    def written(self, record: dict[str, Any], template: Template) -> tuple[list[Piece], ...]:
        """Returns a question, of which nothing is learnt, and its answer; raises ``ValueError``."""
        told = conversation(record)
        last = max(at for at, message in enumerate(told) if message.role == "assistant")
        asked, answer = told[:last], told[last]
        if not any(message.content.strip() for message in asked):
            raise ValueError("has no question")
        text = asked[0].content
        if len(asked) > 1:
            text = "".join(piece.text for piece in template((*asked, answer))[:-1])
        return (
            [Piece(text + self.end_of_text, False), Piece(answer.content + self.end_of_text, True)],
        )
