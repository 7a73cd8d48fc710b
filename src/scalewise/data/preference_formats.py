"""Two answers to a question in files, one preferred: ``chosen`` and ``rejected``.

Each is a text, a turn, or a list of turns that may be the whole conversation, as TRL's and
UltraFeedback's are. What comes before is a ``prompt``, or the turns or the question of the formats
in ``conversations``.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from scalewise.data.chat_formats import TURNS, assemble_messages, parse_alpaca, parse_history
from scalewise.data.chat_messages import (
    Conversation,
    Message,
    RecordKeys,
    check_messages,
    parse_turn,
    parse_turns,
)
from scalewise.data.chat_templates import ConversationTemplate, TemplatePiece

SIDES = ("chosen", "rejected")
"""What files call the two answers, the preferred one first."""


def parse_pair(
    record: dict[str, Any], template: ConversationTemplate, keys: RecordKeys
) -> tuple[list[TemplatePiece], ...]:
    """Returns both conversations of a record as a template writes them.

    What they begin with alike is not learnt, be there answers in it. Raises ``ValueError`` with
    what is wrong.
    """
    record = keys.drop_ignored(record)
    asked, read = _prompt_messages(record, keys)
    chosen, rejected = (template(_with_answer(record, key, asked, keys, read)) for key in SIDES)
    alike = len(list(takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False))))
    if not all(side[alike:] and side[alike].trained for side in (chosen, rejected)):
        raise ValueError("has no two answers to one prompt")
    return tuple(
        [replace(piece, trained=False) for piece in side[:alike]] + side[alike:]
        for side in (chosen, rejected)
    )


def _prompt_messages(
    record: Mapping[str, Any], keys: RecordKeys
) -> tuple[tuple[Message, ...], set[str]]:
    """Returns the messages before the answers, and the keys of the record that hold them.

    Answers that are whole conversations may have none before them.
    """
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        return (*parse_history(record), Message("user", prompt)), {"prompt", "history"}
    named = next((key for key in ("prompt", *TURNS) if record.get(key) is not None), None)
    if named:
        return parse_turns(record[named], keys), {named}
    if record.get("instruction") is not None:
        return parse_alpaca(record), {"instruction", "input", "history"}
    return (), set()


def _with_answer(
    record: Mapping[str, Any],
    key: str,
    prompt_messages: tuple[Message, ...],
    keys: RecordKeys,
    read_keys: set[str],
) -> Conversation:
    """Returns the conversation with one of the answers."""
    answer = record.get(key)
    if answer is None:
        raise ValueError(f"has no {key}; it has {', '.join(map(str, record)) or 'nothing'}")
    if isinstance(answer, str):
        if not prompt_messages:
            raise ValueError("has a text for an answer, and no prompt")
        told = (*prompt_messages, Message("assistant", answer))
    elif isinstance(answer, dict):
        told = (*prompt_messages, parse_turn(answer, keys))
    else:
        given = parse_turns(answer, keys)
        whole = given[0].role != "assistant"
        told = given if whole else (*prompt_messages, *given)
        # UltraFeedback's messages are those of the chosen side.
        checked = () if read_keys == {"messages"} and key != SIDES[0] else prompt_messages
        if whole and not all(_contains_answer(said, given) for said in checked):
            raise ValueError(f"has a prompt that is not in its {key}")
    repeated = {
        name for name in TURNS if name not in read_keys and record.get(name) == record[SIDES[0]]
    }
    return assemble_messages(
        record,
        check_messages(told),
        keys if key == SIDES[0] else RecordKeys(),
        {*SIDES, *read_keys, *repeated},
    )


def _contains_answer(message: Message, conversation: tuple[Message, ...]) -> bool:
    return any(message.text.strip() == other.text.strip() for other in conversation)
