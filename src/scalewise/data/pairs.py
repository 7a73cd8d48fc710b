"""Two answers to a question in files, one preferred: ``chosen`` and ``rejected``.

Each is a text, a turn, or a list of turns that may be the whole conversation, as TRL's and
UltraFeedback's are. What comes before is a ``prompt``, or the turns or the question of the formats
in ``conversations``.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from scalewise.data.chat_messages import Conversation, Keys, Message, message, sound, turns
from scalewise.data.conversations import OF_ALPACA, OF_TEMPLATE, alpaca_question, assembled
from scalewise.data.templates import Piece, Template

SIDES = ("chosen", "rejected")
"""What files call the two answers, the preferred one first."""
TURNS = ("messages", "conversations")
READ = {*SIDES, *TURNS, *OF_TEMPLATE, "prompt", "system"}


def written(record: dict[str, Any], template: Template, keys: Keys) -> tuple[list[Piece], ...]:
    """Returns both conversations of a record as a template writes them.

    What they begin with alike is not learnt, be there answers in it. Raises ``ValueError`` with
    what is wrong.
    """
    record = keys.without_ignored(record)
    asked = _asked(record, keys)
    chosen, rejected = (template(_side(record, key, asked, keys)) for key in SIDES)
    alike = len(list(takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False))))
    if not all(side[alike:] and side[alike].learnt for side in (chosen, rejected)):
        raise ValueError("has no two answers to one prompt")
    return tuple(
        [replace(piece, learnt=False) for piece in side[:alike]] + side[alike:]
        for side in (chosen, rejected)
    )


def _asked(record: Mapping[str, Any], keys: Keys) -> tuple[Message, ...]:
    """Returns the messages before the answers; none where the answers hold them."""
    found = [record[key] for key in TURNS if record.get(key) is not None]
    prompt = record.get("prompt")
    if prompt is not None:
        return (Message("user", prompt),) if isinstance(prompt, str) else turns(prompt, keys)
    if found:
        return turns(found[0], keys)
    return alpaca_question(record) if record.get("instruction") is not None else ()


def _side(
    record: Mapping[str, Any], key: str, asked: tuple[Message, ...], keys: Keys
) -> Conversation:
    """Returns the conversation with one of the answers."""
    answer = record.get(key)
    if answer is None:
        raise ValueError(f"has no {key}; it has {', '.join(map(str, record)) or 'nothing'}")
    if isinstance(answer, str):
        if not asked:
            raise ValueError("has a text for an answer, and no prompt")
        told = (*asked, Message("assistant", answer))
    elif isinstance(answer, dict):
        told = (*asked, message(answer, keys))
    else:
        given = turns(answer, keys)
        whole = given[0].role != "assistant"
        told = given if whole else (*asked, *given)
        if whole and not all(_is_in(said, given) for said in asked):
            raise ValueError(f"has a prompt that is not in its {key}")
    read = {*READ, *(OF_ALPACA | {"history"} if "instruction" in record else ())} - {"output"}
    return assembled(record, sound(told), keys if key == SIDES[0] else Keys(), read)


def _is_in(one: Message, conversation: tuple[Message, ...]) -> bool:
    return any(one.text.strip() == other.text.strip() for other in conversation)
