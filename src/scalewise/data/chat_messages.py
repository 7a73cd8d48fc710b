"""Messages of a conversation, parsed from the turns of a record.

Each key is read, counted as metadata, or rejected; none is ignored silently.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scalewise.data.record_files import has_surrogate
from scalewise.data.text_files import parse_json
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
"""Roles by their names in files. The text of a ``function_call`` is a tool call in JSON."""
ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")
"""Keys of a turn's role and of its text, of OpenAI and of ShareGPT."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TRAIN_KEYS = ("weight", "train", "training")
"""Keys that enable or disable training on an answer: a weight of 0 or 1 (OpenAI), or a boolean
(Axolotl)."""

METADATA_KEYS = frozenset(
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
"""Keys that describe a record or a turn and are not part of the conversation."""
TRANSCRIPT_END = re.compile(r"\s*(assistant|gpt|ai|bot)\s*:", re.IGNORECASE)
"""Last line of a text that contains several turns, as in HH-RLHF: a header of the answer."""
TRANSCRIPT_NOTE = (
    "questions that end with the header of an answer, such as 'Assistant:', read as one turn "
    "(to read them as several, use records with messages)"
)
TRAINING_KEY_PATTERN = re.compile(
    "weight|train|loss|mask|learn|label|kto|reward|margin", re.IGNORECASE
)
"""Keys of numbers that would change how a record is trained on."""
MEASUREMENT_WORDS = frozenset(
    """
    bytes characters chars confidence cost count created date dislikes downvotes duration elo hash
    id ids idx index latency length likes line logprob month n num number offset order page
    perplexity position ppl price prob probability rank rating ratings row score scores seconds
    seed similarity size stars time timestamp tokens total ts turn updated upvotes version votes
    words year
    """.split()  # noqa: SIM905
)
"""Words in the keys of numbers that only count, date or rate a record or a turn."""


@dataclass(frozen=True)
class Message:
    """Turn of a conversation."""

    role: str
    """system, developer, user, assistant or tool."""
    content: str | None
    """Text; None for a tool call without a text."""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that chat templates read (tool_calls, reasoning_content, name, tool_call_id)."""
    train: bool = True
    """Whether it is trained on, if it is an answer."""

    @property
    def text(self) -> str:
        """Content; empty if there is none."""
        return self.content or ""

    @property
    def is_empty(self) -> bool:
        """Whether the turn has no text and no tool call."""
        return not (
            self.text.strip()
            or self.extra_fields.get("tool_calls")
            or REASONING_KEYS[0] in self.extra_fields
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the message as transformers expects it."""
        content = {} if self.content is None else {"content": self.content}
        return {"role": self.role, **content, **self.extra_fields}


@dataclass(frozen=True)
class Conversation:
    """Messages and the other arguments of transformers' ``apply_chat_template``."""

    messages: tuple[Message, ...]
    """Turns in order."""
    tools: list[Any] | None = None
    """JSON schemas of tools."""
    documents: list[Any] | None = None
    """Documents for retrieval."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template (``chat_template_kwargs``)."""


class RecordKeys:
    """User-defined keys to ignore; ``notes`` counts each ignored key."""

    def __init__(self, ignored: Collection[str] = (), notes: Counter[str] | None = None) -> None:
        self._ignored = frozenset(ignored)
        self._notes = Counter[str]() if notes is None else notes

    def select_fields(
        self,
        entry: Mapping[str, Any],
        read_keys: Collection[str],
        known_texts: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the non-empty entries of a record or turn that are in ``read_keys``.

        Raises ``ValueError`` for another entry that may be content or enable training. A text in
        ``known_texts`` only repeats other entries.
        """
        selected: dict[str, Any] = {}
        for key, value in entry.items():
            if value is None or value == "" or value == [] or value == {}:
                continue
            if key in read_keys:
                selected[key] = value
            elif (
                key in METADATA_KEYS
                or _is_annotation(key, value)
                or (isinstance(value, str) and value.strip() in known_texts)
            ):
                self.count_ignored(key)
            else:
                option = format_override("data.ignore_keys", [key])
                raise ValueError(
                    f"has {format_value(key)}, which is not supported (set {option} to ignore it)"
                )
        return selected

    def drop_ignored(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return a record or turn without the ignored keys."""
        for key in self._ignored & entry.keys():
            self.count_ignored(key)
        return {key: value for key, value in entry.items() if key not in self._ignored}

    def count_ignored(self, key: str) -> None:
        """Count an ignored key."""
        self._notes[f"ignored key {format_value(key)}, occurrences"] += 1

    def count_decoded(self, key: str) -> None:
        """Count messages that a record has as JSON text."""
        self._notes[f"JSON texts read as messages, in {key}"] += 1

    def question(self, text: str) -> Message:
        """Return a question, and count one that is a transcript of several turns."""
        if TRANSCRIPT_END.fullmatch(text.rstrip().rpartition("\n")[2]):
            self._notes[TRANSCRIPT_NOTE] += 1
        return Message("user", text)


def _is_annotation(key: str, value: object) -> bool:
    """Whether the key of a number marks it as metadata."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or TRAINING_KEY_PATTERN.search(key)
    ):
        return False
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", key).lower()
    return not MEASUREMENT_WORDS.isdisjoint(re.split(r"[^a-z]+", words))


def parse_turns(record: Mapping[str, Any], name: str, keys: RecordKeys) -> tuple[Message, ...]:
    """Return the messages of the turns under a key; raises ``ValueError`` with the reason."""
    turns = record[name]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"has no list of turns in {name}")
    return tuple(parse_turn(turn, keys) for turn in turns)


def parse_turn(turn: object, keys: RecordKeys) -> Message:
    """Return the message of a turn, an object with a role, a text and further fields."""
    if not isinstance(turn, dict):
        raise ValueError("has a turn that is not an object")
    turn = keys.drop_ignored(turn)
    name = _first_value(turn, ROLE_KEYS)
    role = ROLES.get(str(name))
    if role is None:
        raise ValueError(f"has a turn of {name!r}; supported roles: {', '.join(ROLES)}")
    read_keys = {*ROLE_KEYS, *CONTENT_KEYS, *TRAIN_KEYS, "name"}
    if role == "assistant":
        read_keys |= {*REASONING_KEYS, "tool_calls", "function_call"}
    if role == "tool":
        read_keys |= {"tool_call_id"}
    fields = keys.select_fields(turn, read_keys)
    if turn.get("channel") not in (None, "", "final"):
        raise ValueError(
            f"has a turn in the channel {turn['channel']!r}, which is not supported: put its text "
            f"into {REASONING_KEYS[0]} of the answer, or set data.ignore_keys=[channel]"
        )
    content = _content_text(_first_value(turn, CONTENT_KEYS), keys)
    extra_fields: dict[str, Any] = {k: fields[k] for k in ("name", "tool_call_id") if k in fields}
    if reasoning := _first_value(fields, REASONING_KEYS):
        if not isinstance(reasoning, str):
            raise ValueError("has reasoning that is not a text")
        extra_fields[REASONING_KEYS[0]] = reasoning
    if name == "function_call":
        extra_fields["tool_calls"], content = (
            _parse_tool_calls(content, "a function_call", keys),
            None,
        )
    else:
        calls, function_calls = (
            _parse_tool_calls(fields.get(key), key, keys) for key in ("tool_calls", "function_call")
        )
        functions, other_functions = (
            [call["function"] for call in it] for it in (calls, function_calls)
        )
        if calls and function_calls and functions != other_functions:
            raise ValueError("has a turn with different calls in tool_calls and function_call")
        if calls or function_calls:
            extra_fields["tool_calls"] = calls or function_calls
    check_json(extra_fields.get("tool_calls"), "tool_calls")
    if content is None and "tool_calls" not in extra_fields:
        text = "value" if "from" in turn else "content"
        raise ValueError(f"has a turn without a text in {text!r}")
    return Message(role, content, extra_fields, _is_trained(fields, role))


def _first_value(entry: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the value of the first name that has one; raises ``ValueError`` if values differ."""
    values = [entry[name] for name in names if entry.get(name) is not None]
    if any(value != values[0] for value in values[1:]):
        raise ValueError(f"has a turn with different values in {' and '.join(names)}")
    return values[0] if values else None


def _content_text(content: object, keys: RecordKeys) -> str | None:
    """Return the text of a content: a string, or a list of text parts."""
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else _part_text(part, keys) for part in content]
        return "".join(texts)
    if content is None or isinstance(content, str):
        return content
    raise ValueError("has a turn with a content that is not a text")


def _part_text(part: object, keys: RecordKeys) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ValueError(f"has a turn with a part of type {kind!r}: only text is supported")
    keys.select_fields(keys.drop_ignored(part), {"type", "text"})
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError("has a turn with a part that is not a text")
    return text


def check_json(value: object, name: str) -> None:
    """Raise ``ValueError`` for a value that is not JSON, such as a time of a parquet file."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"has {name} that cannot be written as JSON ({error})") from error


def _parse_json(value: object, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"has {name} that {error}") from error


def _parse_tool_calls(calls: object, name: str, keys: RecordKeys) -> list[dict[str, Any]]:
    """Return tool calls in the format of OpenAI and transformers, from objects or JSON text."""
    calls = _parse_json(calls, name)
    if not calls:
        return []
    parsed: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list) else [calls]:
        call = keys.drop_ignored(call) if isinstance(call, dict) else {}
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("has a tool call without a function name")
        outer = {"type": "function"} if function is call else call
        parsed.append({**outer, "function": keys.drop_ignored(function)})
    return parsed


def parse_tools(tools: object) -> list[Any] | None:
    """Return JSON schemas of tools in OpenAI's format, from a list or from JSON text."""
    tools = _parse_json(tools, "tools")
    if not tools:
        return None
    schemas = [
        _parse_json(tool, "tools") for tool in (tools if isinstance(tools, list) else [tools])
    ]
    if not all(isinstance(tool, dict) for tool in schemas):
        raise ValueError("has tools that are not a list of objects")
    return [
        {"type": "function", "function": tool}
        if "name" in tool and "function" not in tool
        else tool
        for tool in schemas
    ]


def _is_trained(turn_fields: Mapping[str, Any], role: str) -> bool:
    """Whether an answer is trained on, according to its turn."""
    values = {bool(value) for key in TRAIN_KEYS if (value := turn_fields.get(key)) is not None}
    invalid_keys = [key for key in TRAIN_KEYS if turn_fields.get(key) not in (None, 0, 1)]
    if invalid_keys or len(values) > 1:
        key = (
            invalid_keys[0]
            if invalid_keys
            else " and ".join(key for key in TRAIN_KEYS if key in turn_fields)
        )
        raise ValueError(f"has a turn whose {key} is not 0 or 1, false or true")
    if role != "assistant" and True in values:
        raise ValueError(f"has a turn of {role!r} to train on: only answers are trained on")
    return False not in values


def check_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return valid messages with an answer to train on; raises ``ValueError`` otherwise."""
    answers = [message for message in messages if message.role == "assistant"]
    if all(answer.is_empty for answer in answers):
        raise ValueError("has no answer")
    if any(answer.is_empty and answer.train for answer in answers):
        raise ValueError("has an empty answer among other answers")
    if not any(answer.train for answer in answers):
        raise ValueError("has no answer to train on: training is disabled for all")
    if has_surrogate([message.to_dict() for message in messages]):
        raise ValueError("has a lone surrogate (half a character)")
    return messages
