"""Records of data options, rendered as texts with the parts to train on.

Three formats of conversations are detected by their keys. Alpaca records have ``instruction``,
``input`` and ``output``; ShareGPT records have ``conversations`` of ``from`` and ``value``; OpenAI
records have ``messages`` of ``role`` and ``content``.

A preference record has two answers to one prompt, ``chosen`` and ``rejected``. Each answer is a
text, a turn, or a list of turns that may be the whole conversation, as in TRL and UltraFeedback.
The context is a ``prompt``, or the turns or the question of a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatch
from itertools import takewhile
from typing import Any

from scalewise.data.chat import ChatData, LabeledText, PreferenceData, Seq2SeqData
from scalewise.data.chat_messages import (
    Conversation,
    Message,
    RecordKeys,
    check_json,
    check_messages,
    parse_tools,
    parse_turn,
    parse_turns,
)
from scalewise.data.chat_templates import ConversationTemplate, RenderedRecord, TextSegment
from scalewise.data.json_messages import decode_messages
from scalewise.data.record_files import has_surrogate

TEMPLATE_KEYS = frozenset({"tools", "functions", "documents", "chat_template_kwargs"})
"""Keys of a record that are passed to the chat template."""
TURN_KEYS = ("messages", "conversations", "conversation")
"""Keys of a record's list of turns."""
SYSTEM_KEYS = ("system", "system_prompt")
ALPACA_KEYS = frozenset({"instruction", "input", "output"})
CALL_OPTIONS = frozenset({"parallel_tool_calls", "tool_choice", "temperature", "top_p", "seed"})
"""Keys of requests to the OpenAI API that are not part of the conversation."""
ANSWER_KEYS = ("chosen", "rejected")
"""Keys of the two answers, the preferred one first."""


@singledispatch
def render_record(
    config: ChatData, record: dict[str, Any], template: ConversationTemplate
) -> RenderedRecord:
    """Return the rendered texts of a record; raises ``ValueError`` with the reason."""
    return (template(parse_conversation(record, record_keys(config, template))),)


def record_keys(config: ChatData, template: ConversationTemplate) -> RecordKeys:
    """Return the keys to ignore, which are counted in the notes of the template."""
    return RecordKeys(config.ignore_keys, template.notes)


@render_record.register(Seq2SeqData)
def _render_question(
    config: Seq2SeqData, record: dict[str, Any], template: ConversationTemplate
) -> RenderedRecord:
    """Return a question without labels, and its answer; raises ``ValueError``."""
    conversation = parse_conversation(record, record_keys(config, template))
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
    question = TextSegment(text + config.end_of_text, trained=False)
    return ([question, TextSegment(answer.text + config.end_of_text, trained=True, separate=True)],)


@render_record.register(LabeledText)
def _render_labeled(
    config: LabeledText, record: dict[str, Any], template: ConversationTemplate
) -> RenderedRecord:
    """Return the text and its class index; raises ``ValueError``."""
    for key in (config.text, config.label):
        if record.get(key) is None:
            raise ValueError(f"has no {key}; its keys: {', '.join(map(str, record)) or 'none'}")
    text, label = record[config.text], record[config.label]
    for key in record:
        if key not in (config.text, config.label):
            record_keys(config, template).count_ignored(key)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"has no text in {config.text}")
    return (parse_labeled(text, _class_index(config, label)),)


def _class_index(config: LabeledText, label: object) -> int:
    if str(label) in config.classes:
        return config.classes.index(str(label))
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(config.classes):
        return int(label)
    raise ValueError(
        f"has class {label!r}, which is not one of data.classes: {', '.join(config.classes)}"
    )


def parse_labeled(text: str, class_index: int) -> list[TextSegment]:
    """Return a text without labels, followed by its class index."""
    return [
        TextSegment(text, trained=False),
        TextSegment("", trained=True, label=class_index, separate=True),
    ]


@render_record.register(PreferenceData)
def _render_pair(
    config: PreferenceData, record: dict[str, Any], template: ConversationTemplate
) -> RenderedRecord:
    """Return the conversations with the chosen and with the rejected answer."""
    return parse_pair(record, template, record_keys(config, template))


def parse_pair(
    record: dict[str, Any], template: ConversationTemplate, keys: RecordKeys
) -> RenderedRecord:
    """Return both rendered conversations of a record.

    Their common beginning is not trained on, even if it contains answers. Raises ``ValueError``
    with the reason.
    """
    names = ("prompt", *ANSWER_KEYS, *TURN_KEYS)
    record = decode_messages(keys.drop_ignored(record), names, keys)
    prompt_messages, read_keys = _prompt_messages(record, keys)
    is_full = read_keys == {"messages"} and isinstance(record.get(ANSWER_KEYS[0]), list)
    if prompt_messages and prompt_messages[-1].role == "assistant" and not is_full:
        key = next(iter(read_keys))
        raise ValueError(f"has an answer at the end of its {key}, which must end with a question")
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
        return (*parse_history(record), keys.question(prompt)), {"prompt", "history"}
    turns_key = next((key for key in ("prompt", *TURN_KEYS) if record.get(key) is not None), None)
    if turns_key:
        return parse_turns(record, turns_key, keys), {turns_key}
    if record.get("instruction") is not None:
        return parse_alpaca(record, keys), {"instruction", "input", "history"}
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
        turns = parse_turns(record, key, keys)
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


def parse_conversation(record: dict[str, Any], keys: RecordKeys) -> Conversation:
    """Return the conversation of a record; raises ``ValueError`` with the reason."""
    record = decode_messages(keys.drop_ignored(record), TURN_KEYS, keys)
    turns_key = next((key for key in TURN_KEYS if record.get(key) is not None), None)
    if turns_key:
        messages, read_keys = parse_turns(record, turns_key, keys), {turns_key}
    elif "instruction" in record and "output" in record:
        if not isinstance(record["output"], str | None):
            raise ValueError("has an instruction, input or output that is not a text")
        answer = Message("assistant", record["output"] or "")
        messages, read_keys = (*parse_alpaca(record, keys), answer), {*ALPACA_KEYS, "history"}
    else:
        names = ", ".join(map(str, record)) or "none"
        raise ValueError(
            f"has no messages, conversations or instruction and output; its keys: {names}"
        )
    return assemble_messages(record, check_messages(messages), keys, read_keys)


def assemble_messages(
    record: Mapping[str, Any],
    messages: tuple[Message, ...],
    keys: RecordKeys,
    read_keys: set[str],
) -> Conversation:
    """Return a conversation of messages and the system text, tools and other parts of their record.

    ``read_keys``: keys that are already read into the messages.
    """
    known_texts = {message.text.strip() for message in messages} | _alpaca_texts(record)
    fields = keys.select_fields(
        record, {*read_keys, *SYSTEM_KEYS, *TEMPLATE_KEYS, *CALL_OPTIONS}, known_texts
    )
    for key in sorted(CALL_OPTIONS & fields.keys()):
        keys.count_ignored(key)
    system = next((fields[key] for key in SYSTEM_KEYS if key in fields), "")
    if any(fields.get(key, system) != system for key in SYSTEM_KEYS):
        raise ValueError(f"has different texts in {' and '.join(SYSTEM_KEYS)}")
    if not isinstance(system, str):
        raise ValueError("has a system that is not a text")
    if system.strip():
        system_texts = [m.text for m in messages if m.role in ("system", "developer")]
        if system_texts and system_texts[0] != system:
            raise ValueError("has a system, and a different one in its turns")
        if not system_texts:
            messages = (Message("system", system), *messages)
    tools, functions = (parse_tools(fields.get(key)) for key in ("tools", "functions"))
    if tools and functions and tools != functions:
        raise ValueError("has different lists in tools and functions")
    functions = tools or functions
    documents = fields.get("documents")
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(it, dict) for it in documents)
    ):
        raise ValueError("has documents that are not a list of objects")
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise ValueError("has chat_template_kwargs that are not an object")
    arguments = {"tools": functions, "documents": documents, "chat_template_kwargs": variables}
    for key, value in arguments.items():
        check_json(value, key)
    if has_surrogate([system, functions, documents, variables]):
        raise ValueError("has a lone surrogate (half a character)")
    return Conversation(messages, functions, documents, variables)


def _alpaca_texts(record: Mapping[str, Any]) -> set[str]:
    """Return the prompt format of the Alpaca authors for a record.

    Their files repeat it under the key ``text``.
    """
    instruction, input_text, answer = (
        record.get(key) or "" for key in ("instruction", "input", "output")
    )
    if not instruction or not answer:
        return set()
    context = ", paired with an input that provides further context" if input_text else ""
    parts = [
        f"Below is an instruction that describes a task{context}. "
        "Write a response that appropriately completes the request.",
        f"### Instruction:\n{instruction}",
        *([f"### Input:\n{input_text}"] if input_text else []),
        f"### Response:\n{answer}",
    ]
    return {"\n\n".join(parts).strip()}


def parse_alpaca(record: Mapping[str, Any], keys: RecordKeys) -> tuple[Message, ...]:
    """Return the earlier turns of an Alpaca record, and its question."""
    instruction, input_text = (record.get(key) or "" for key in ("instruction", "input"))
    if not isinstance(instruction, str) or not isinstance(input_text, str):
        raise ValueError("has an instruction, input or output that is not a text")
    return (
        *parse_history(record),
        keys.question("\n\n".join(it for it in (instruction, input_text) if it.strip())),
    )


def parse_history(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the turns of a record's ``history``, a list of questions with their answers."""
    messages: list[Message] = []
    history = record.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_text, pair))):
            raise ValueError("has a history that is not a list of pairs of texts")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    return tuple(messages)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
