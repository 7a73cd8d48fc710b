"""Messages of a conversation, read from the turns of a record.

A key is read, is known to carry no content and counted, or is rejected: none is left out silently.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scalewise.errors import format_value
from scalewise.typed_override import format_override

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_call": "assistant",
}
"""Roles by the names that files use. The text of a ``function_call`` is a tool call in JSON."""
SPEAKERS, TEXTS = ("role", "from"), ("content", "value")
"""Keys of a turn's role and of its text: OpenAI's, then ShareGPT's."""
REASONING = ("reasoning_content", "reasoning", "thinking")
SWITCHES = ("weight", "train", "training")
"""Whether an answer is trained on: a weight of 0 or 1 as OpenAI has it, a boolean as axolotl."""

METADATA = frozenset(
    """
    annotations author authors avatar avatarUrl categories category channel complexity
    conversation_hash conversation_id country created created_at custom_id
    data_source data_type dataset dataset_id dataset_name date datetime detoxify_moderation
    difficulty doc_id domain domains evolution_type example_id file filename generator hash
    hashed_ip header id idx index instance_id item_id key lang language languages length lengths
    level license message_id meta metadata model model_name n_tokens name_of_source num_messages
    num_tokens num_turns openai_moderation origin original_index pair_id parent_id prompt_id
    quality question_id rank rating record_id redacted row_id sample_id scenario score scores
    session_id skip_prompt_formatting source source_id split split_name style subcategory subject
    subset tag tags task task_id task_name task_type template_name time timestamp title
    token_count tokens tone topic topics toxic turn turns type uid url user_id uuid version views
    """.split()  # noqa: SIM905
)
"""Keys that describe a record or a turn and are no part of what is said."""
MEANINGFUL = re.compile("weight|train|loss|mask|learn|label|kto|reward|margin", re.IGNORECASE)
"""Keys of numbers that would change how a record is trained on."""
MEASURES = frozenset(
    """
    bytes characters chars confidence cost count created date dislikes downvotes duration elo hash
    id ids idx index latency length likes line logprob month n num number offset order page
    perplexity position ppl price prob probability rank rating ratings row score scores seconds
    seed similarity size stars time timestamp tokens total ts turn updated upvotes version votes
    words year
    """.split()  # noqa: SIM905
)
"""Words of keys of numbers that count, date, number or rate a record or a turn."""


@dataclass(frozen=True)
class Message:
    """A turn of a conversation.

    ``role``: system, developer, user, assistant or tool. ``content`` is None for a tool call
    without a text. ``extra_fields``: what else chat templates read (tool_calls, reasoning_content,
    name, tool_call_id). ``train``: whether it is trained on, if it is an answer.
    """

    role: str
    content: str | None
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    train: bool = True

    @property
    def text(self) -> str:
        """The content, empty if there is none."""
        return self.content or ""

    @property
    def is_empty(self) -> bool:
        """Whether the turn says nothing and calls no tool."""
        return not (
            self.text.strip()
            or self.extra_fields.get("tool_calls")
            or REASONING[0] in self.extra_fields
        )

    def to_dict(self) -> dict[str, Any]:
        """The message as transformers takes it."""
        content = {} if self.content is None else {"content": self.content}
        return {"role": self.role, **content, **self.extra_fields}


@dataclass(frozen=True)
class Conversation:
    """Messages, with what else transformers' ``apply_chat_template`` takes.

    ``variables``: arguments for the template (``chat_template_kwargs``).
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


class RecordKeys:
    """The keys of records: those to leave out because the user says so, and counts of these.

    ``notes`` counts each key that is left out.
    """

    def __init__(self, ignored: Collection[str] = (), notes: Counter[str] | None = None) -> None:
        self._ignored = frozenset(ignored)
        self._notes = Counter[str]() if notes is None else notes

    def select_fields(
        self,
        entry: Mapping[str, Any],
        read_keys: Collection[str],
        known_texts: Collection[str] = (),
    ) -> dict[str, Any]:
        """Entries of a record or turn that are in ``read_keys`` and hold something.

        Raises ``ValueError`` for an entry that may be content or a switch and is not in
        ``read_keys``. A text that is one of the texts ``known_texts`` repeats what is read.
        """
        found: dict[str, Any] = {}
        for key, value in entry.items():
            if value is None or value == "" or value == [] or value == {}:
                continue
            if key in read_keys:
                found[key] = value
            elif (
                key in METADATA
                or _is_annotation(key, value)
                or (isinstance(value, str) and value.strip() in known_texts)
            ):
                self.count_ignored(key)
            else:
                option = format_override("data.ignore_keys", [key])
                raise ValueError(
                    f"has {format_value(key)}, which is not read ({option} leaves it out)"
                )
        return found

    def drop_ignored(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A record or turn without the keys that the user wants left out."""
        for key in self._ignored & entry.keys():
            self.count_ignored(key)
        return {key: value for key, value in entry.items() if key not in self._ignored}

    def count_ignored(self, key: str) -> None:
        """Counts a key that is left out."""
        self._notes[f"key {format_value(key)} is not read, times"] += 1


def _is_annotation(key: str, value: object) -> bool:
    """Returns whether a number is none of what is said or trained on, by the name of its key."""
    if isinstance(value, bool) or not isinstance(value, int | float) or MEANINGFUL.search(key):
        return False
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", key).lower()
    return not MEASURES.isdisjoint(re.split(r"[^a-z]+", words))


def parse_turns(turns: object, keys: RecordKeys) -> tuple[Message, ...]:
    """Messages of a list of turns; raises ``ValueError`` with what is wrong with one."""
    if not isinstance(turns, list) or not turns:
        raise ValueError("has no list of turns")
    return tuple(parse_turn(turn, keys) for turn in turns)


def parse_turn(turn: object, keys: RecordKeys) -> Message:
    """The message of a turn, a table of a role, a text and what goes with them."""
    if not isinstance(turn, dict):
        raise ValueError("has a turn that is no object")
    turn = keys.drop_ignored(turn)
    name = _first_value(turn, SPEAKERS)
    role = ROLES.get(str(name))
    if role is None:
        raise ValueError(f"has a turn of {name!r}; known are {', '.join(ROLES)}")
    read = {*SPEAKERS, *TEXTS, *SWITCHES, "name"}
    if role == "assistant":
        read |= {*REASONING, "tool_calls", "function_call"}
    if role == "tool":
        read |= {"tool_call_id"}
    given = keys.select_fields(turn, read)
    content = _content_text(_first_value(turn, TEXTS), keys)
    more: dict[str, Any] = {k: given[k] for k in ("name", "tool_call_id") if k in given}
    if thoughts := _first_value(given, REASONING):
        if not isinstance(thoughts, str):
            raise ValueError("has reasoning that is no text")
        more[REASONING[0]] = thoughts
    if name == "function_call":
        more["tool_calls"], content = (
            list(_iter_tool_calls(_parse_json(content, "a function_call"))),
            None,
        )
    elif "tool_calls" in given:
        more["tool_calls"] = list(_iter_tool_calls(_parse_json(given["tool_calls"], "tool_calls")))
    elif "function_call" in given:
        more["tool_calls"] = list(_iter_tool_calls(given["function_call"]))
    if content is None and "tool_calls" not in more:
        text = "value" if "from" in turn else "content"
        raise ValueError(f"has a turn without a text in {text!r}")
    return Message(role, content, more, _is_trained(given, role))


def _first_value(entry: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The value of the first name that has one; ``ValueError`` where two have different ones."""
    values = [entry[name] for name in names if entry.get(name) is not None]
    if any(value != values[0] for value in values[1:]):
        raise ValueError(f"has a turn with different values in {' and '.join(names)}")
    return values[0] if values else None


def _content_text(content: object, keys: RecordKeys) -> str | None:
    """The text of a content: a string, or a list of parts that are all text."""
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else _part_text(part, keys) for part in content]
        return "".join(texts)
    if content is None or isinstance(content, str):
        return content
    raise ValueError("has a turn with a content that is no text")


def _part_text(part: object, keys: RecordKeys) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ValueError(f"has a turn with a part of type {kind!r}: only text is read")
    text = keys.select_fields(keys.drop_ignored(part), {"type", "text"}).get("text", "")
    if not isinstance(text, str):
        raise ValueError("has a turn with a part that is no text")
    return text


def _parse_json(value: object, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has {name} that is not JSON ({error})") from error


def _iter_tool_calls(calls: object) -> Iterator[dict[str, Any]]:
    """Yields tool calls in OpenAI's form, which is that of transformers."""
    for call in calls if isinstance(calls, list) else [calls]:
        call = call if isinstance(call, dict) else {}
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("has a tool call without the name of a function")
        yield call if function is not call else {"type": "function", "function": call}


def parse_tools(tools: object) -> list[Any] | None:
    """Tools as JSON schemas in OpenAI's form: of a list, or of its text in JSON."""
    tools = _parse_json(tools, "tools")
    if not tools:
        return None
    given = [_parse_json(tool, "tools") for tool in (tools if isinstance(tools, list) else [tools])]
    if not all(isinstance(tool, dict) for tool in given):
        raise ValueError("has tools that are no list of objects")
    return [
        {"type": "function", "function": tool}
        if "name" in tool and "function" not in tool
        else tool
        for tool in given
    ]


def _is_trained(turn_fields: Mapping[str, Any], role: str) -> bool:
    """Whether an answer is trained on, as its turn says."""
    values = {bool(value) for key in SWITCHES if (value := turn_fields.get(key)) is not None}
    wrong = [key for key in SWITCHES if turn_fields.get(key) not in (None, 0, 1)]
    if wrong or len(values) > 1:
        key = wrong[0] if wrong else " and ".join(key for key in SWITCHES if key in turn_fields)
        raise ValueError(f"has a turn whose {key} is not 0 or 1, false or true")
    if role != "assistant" and True in values:
        raise ValueError(f"has a turn of {role!r} to train on: only answers are")
    return False not in values


def check_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Returns messages with an answer to train on, all in whole characters; raises otherwise."""
    answers = [message for message in messages if message.role == "assistant"]
    if all(answer.is_empty for answer in answers):
        raise ValueError("has no answer")
    if any(answer.is_empty and answer.train for answer in answers):
        raise ValueError("has an empty answer among others")
    if not any(answer.train for answer in answers):
        raise ValueError("has no answer to train on: all are switched off")
    if has_surrogate([message.to_dict() for message in messages]):
        raise ValueError("has half a character (a lone surrogate)")
    return messages


def has_surrogate(value: object) -> bool:
    """Whether a JSON value has a text with a lone surrogate, which no encoding can write."""
    return any(map(_is_surrogate, _texts(value)))


def has_nul(value: object) -> bool:
    """Whether a JSON value has a text with a NUL character."""
    return any("\0" in text for text in _texts(value))


def _is_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _texts(value: object) -> Iterator[str]:
    """Yields the texts of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
