"""Conversations in files: three common record formats, detected by their keys.

Alpaca records have ``instruction``, ``input`` and ``output``; ShareGPT records have
``conversations`` of ``from`` and ``value``; OpenAI records have ``messages`` of ``role`` and
``content``.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from scalewise.data.chat_messages import (
    Conversation,
    Message,
    RecordKeys,
    check_messages,
    has_nul,
    has_surrogate,
    parse_tools,
    parse_turns,
)
from scalewise.data.file_patterns import file_suffix
from scalewise.data.text_files import (
    check_columns,
    iter_json_lines,
    no_constant,
    read_error,
    read_text,
)
from scalewise.errors import DataError

SUFFIXES = frozenset({".jsonl", ".json", ".parquet"})
TEMPLATE_KEYS = frozenset({"tools", "functions", "documents", "chat_template_kwargs"})
"""Keys of a record that are passed to the chat template."""
TURN_KEYS = ("messages", "conversations", "conversation")
"""Keys of a record's list of turns."""
SYSTEM_KEYS = ("system", "system_prompt")
ALPACA_KEYS = frozenset({"instruction", "input", "output"})
CALL_OPTIONS = frozenset({"parallel_tool_calls", "tool_choice", "temperature", "top_p", "seed"})
"""Keys of requests to the OpenAI API that are not part of the conversation."""


@dataclass(frozen=True)
class BadRecord:
    """Invalid record, with the reason."""

    path: Path
    """File of the record."""
    number: int
    """Line of a .jsonl file, or index from 1 of the record in another file."""
    reason: str
    """Reason, without a subject."""

    def __str__(self) -> str:
        return f"{self.path.name}:{self.number} {self.reason}"


class TemplateLimitError(DataError):
    """Chat template that exceeds the time or memory limit."""

    @classmethod
    def for_template(cls, template: Path, reason: str) -> "TemplateLimitError":
        """Return the error of a template file."""
        fix = "repair the template, or put another one next to data.tokenizer"
        return cls.for_key("data.tokenizer", template, f"the chat template {reason}", fix)

    def with_record(self, record: str) -> "TemplateLimitError":
        """Return the same error with the name of the record."""
        return TemplateLimitError(
            replace(issue, reason=f"{issue.reason} at {record}") for issue in self.issues
        )


ParsedRecord = TypeVar("ParsedRecord")


def iter_records(
    path: Path, parse_record: Callable[[dict[str, Any]], ParsedRecord]
) -> Iterator[ParsedRecord | BadRecord]:
    """Yield the result of ``parse_record`` for each record of a file, or a ``BadRecord``.

    ``parse_record`` raises ``ValueError`` for invalid records. Raises ``DataError`` for a file that
    cannot be read at all.
    """
    for number, record in _iter_file_records(path):
        try:
            if isinstance(record, ValueError):
                raise record
            if not isinstance(record, dict):
                raise ValueError("is not an object")
            if has_nul(record):
                raise ValueError("has a NUL character, which is not text")
            yield parse_record(record)
        except TemplateLimitError as error:
            raise error.with_record(f"{path.name}:{number}") from error
        except ValueError as error:
            yield BadRecord(path, number, str(error))
        except RecursionError:
            yield BadRecord(path, number, "is nested too deeply")


def parse_conversation(record: dict[str, Any], keys: RecordKeys) -> Conversation:
    """Return the conversation of a record; raises ``ValueError`` with the reason."""
    record = keys.drop_ignored(record)
    turns_key = next((key for key in TURN_KEYS if record.get(key) is not None), None)
    if turns_key:
        messages, read_keys = parse_turns(record[turns_key], keys), {turns_key}
    elif "instruction" in record and "output" in record:
        if not isinstance(record["output"], str | None):
            raise ValueError("has an instruction, input or output that is not a text")
        answer = Message("assistant", record["output"] or "")
        messages, read_keys = (*parse_alpaca(record), answer), {*ALPACA_KEYS, "history"}
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
    functions = [
        *(parse_tools(fields.get("tools")) or []),
        *(parse_tools(fields.get("functions")) or []),
    ]
    documents = fields.get("documents")
    if documents is not None and not all(isinstance(document, dict) for document in documents):
        raise ValueError("has documents that are not a list of objects")
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise ValueError("has chat_template_kwargs that are not an object")
    if has_surrogate([system, functions, documents, variables]):
        raise ValueError("has a lone surrogate (half a character)")
    return Conversation(messages, functions or None, documents, variables)


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


def parse_alpaca(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the earlier turns of an Alpaca record, and its question."""
    instruction, input_text = (record.get(key) or "" for key in ("instruction", "input"))
    if not isinstance(instruction, str) or not isinstance(input_text, str):
        raise ValueError("has an instruction, input or output that is not a text")
    return (
        *parse_history(record),
        Message("user", f"{instruction}\n\n{input_text}" if input_text else instruction),
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


def _iter_file_records(path: Path) -> Iterator[tuple[int, object]]:
    """Yield each record with its number; a ValueError for one that cannot be read."""
    try:
        if file_suffix(path) == ".jsonl":
            yield from iter_json_lines(path)
        elif file_suffix(path) == ".json":
            yield from enumerate(_iter_json_list(path), 1)
        else:
            yield from enumerate(_iter_parquet_rows(path), 1)
    except OSError as error:
        raise read_error(path, error) from error


def _iter_json_list(path: Path) -> list[object]:
    try:
        # a lone surrogate is an error of its record, not of the file
        records = json.loads(read_text(path), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        reason = f"is not valid JSON ({error})"
        raise DataError.for_key("data.paths", path, reason, "repair the file") from error
    if not isinstance(records, list):
        raise DataError.for_key("data.paths", path, "is not a list of records", "use .jsonl")
    return records


def _iter_parquet_rows(path: Path) -> Iterator[object]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        fix = "pip install 'scalewise[hf]'"
        raise DataError.for_key(
            "data.paths", path, "reading .parquet requires pyarrow", fix
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            check_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches():
                yield from map(_without_nulls, batch.to_pylist())
    except pyarrow.ArrowInvalid as error:
        reason = f"is not a complete parquet file ({error})"
        raise DataError.for_key("data.paths", path, reason, "copy the file again") from error


def _without_nulls(value: Any) -> Any:
    """Return a row without null entries, which parquet adds for missing keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
