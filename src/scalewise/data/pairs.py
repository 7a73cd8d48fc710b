"""Two answers to a question in files, one preferred: ``prompt``, ``chosen`` and ``rejected``.

Each is a text, or a list of messages as TRL's and UltraFeedback's are: then the answers may hold
the whole conversation, and a prompt is not needed.
"""

from dataclasses import replace
from itertools import takewhile
from typing import Any

from scalewise.data.conversations import Conversation, Message, said, sound
from scalewise.data.templates import Piece, Template

SIDES = ("chosen", "rejected")
"""What files call the two answers, the preferred one first."""


def written(record: dict[str, Any], template: Template) -> tuple[list[Piece], ...]:
    """Returns both conversations of a record as a template writes them.

    What they begin with alike is not learnt, be there answers in it. Raises ``ValueError`` with
    what is wrong.
    """
    chosen, rejected = (template(sound(_side(record, key))) for key in SIDES)
    alike = len(list(takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False))))
    if not all(side[alike:] and side[alike].learnt for side in (chosen, rejected)):
        raise ValueError("has no two answers to one prompt")
    return tuple(
        [replace(piece, learnt=False) for piece in side[:alike]] + side[alike:]
        for side in (chosen, rejected)
    )


def _side(record: dict[str, Any], key: str) -> Conversation:
    prompt, answer = record.get("prompt"), record.get(key)
    if answer is None:
        raise ValueError(f"has no {key}; it has {', '.join(map(str, record)) or 'nothing'}")
    asked: Conversation = ()
    if prompt is not None:
        text = isinstance(prompt, str)
        asked = (Message("user", prompt),) if text else said(prompt, "role", "content")
    if not isinstance(answer, str):
        told = said(answer, "role", "content")
        return told if told[0].role != "assistant" else (*asked, *told)
    if not asked:
        raise ValueError("has a text for an answer, and no prompt")
    return (*asked, Message("assistant", answer))
