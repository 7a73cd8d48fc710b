"""Formats of preference records: two answers to one prompt, ``chosen`` and ``rejected``.

Each answer is a text, a turn, or a list of turns that may be the whole conversation, as in TRL and
UltraFeedback. The context is a ``prompt``, or the turns or the question of a format in
``chat_formats``.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from scalewise.data.chat_formats import TURN_KEYS, assemble_messages, parse_alpaca, parse_history
from scalewise.data.chat_messages import (
    Conversation,
    Message,
    RecordKeys,
    check_messages,
    parse_turn,
    parse_turns,
)
from scalewise.data.chat_templates import ConversationTemplate, TextSegment

ANSWER_KEYS = ("chosen", "rejected")
"""Keys of the two answers, the preferred one first."""


def parse_pair(
    record: dict[str, Any], template: ConversationTemplate, keys: RecordKeys
) -> tuple[list[TextSegment], ...]:
    """Return both rendered conversations of a record.

    Their common beginning is not trained on, even if it contains answers. Raises ``ValueError``
    with the reason.
    """
    record = keys.drop_ignored(record)
    prompt_messages, read_keys = _prompt_messages(record, keys)
    chosen, rejected = (
        template(_with_answer(record, key, prompt_messages, keys, read_keys)) for key in ANSWER_KEYS
    )
    pairs = zip(chosen, rejected, strict=False)
    num_common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if not all(side[num_common:] and side[num_common].trained for side in (chosen, rejected)):
        raise ValueError("does not have two different answers to one prompt")
    return tuple(
        [replace(segment, trained=False) for segment in side[:num_common]] + side[num_common:]
        for side in (chosen, rejected)
    )


def _prompt_messages(
    record: Mapping[str, Any], keys: RecordKeys
) -> tuple[tuple[Message, ...], set[str]]:
    """Return the messages before the answers, and the keys of the record that contain them.

    There are none if the answers are whole conversations.
    """
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        return (*parse_history(record), Message("user", prompt)), {"prompt", "history"}
    turns_key = next((key for key in ("prompt", *TURN_KEYS) if record.get(key) is not None), None)
    if turns_key:
        return parse_turns(record[turns_key], keys), {turns_key}
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
    """Return the conversation with one of the answers."""
    answer = record.get(key)
    if answer is None:
        raise ValueError(f"has no {key}; its keys: {', '.join(map(str, record)) or 'none'}")
    if isinstance(answer, str):
        if not prompt_messages:
            raise ValueError("has an answer that is a text, and no prompt")
        messages = (*prompt_messages, Message("assistant", answer))
    elif isinstance(answer, dict):
        messages = (*prompt_messages, parse_turn(answer, keys))
    else:
        turns = parse_turns(answer, keys)
        is_conversation = turns[0].role != "assistant"
        messages = turns if is_conversation else (*prompt_messages, *turns)
        # In UltraFeedback, ``messages`` equals the chosen conversation.
        required = () if read_keys == {"messages"} and key != ANSWER_KEYS[0] else prompt_messages
        if is_conversation and not all(_contains_answer(message, turns) for message in required):
            raise ValueError(f"has a prompt that is not part of its {key}")
    repeated = {
        name
        for name in TURN_KEYS
        if name not in read_keys and record.get(name) == record[ANSWER_KEYS[0]]
    }
    return assemble_messages(
        record,
        check_messages(messages),
        keys if key == ANSWER_KEYS[0] else RecordKeys(),
        {*ANSWER_KEYS, *read_keys, *repeated},
    )


def _contains_answer(message: Message, conversation: tuple[Message, ...]) -> bool:
    return any(message.text.strip() == other.text.strip() for other in conversation)
