"""Conversations in files: three usual formats of records, told apart by their keys.

Alpaca's has ``instruction``, ``input`` and ``output``; ShareGPT's ``conversations`` of ``from`` and
``value``; the OpenAI API's ``messages`` of ``role`` and ``content``.
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
OF_TEMPLATE = frozenset({"tools", "functions", "documents", "chat_template_kwargs"})
"""Keys of a record that the chat template reads."""
TURNS = ("messages", "conversations", "conversation")
"""Keys of a record's list of turns."""
SYSTEM = ("system", "system_prompt")
OF_ALPACA = frozenset({"instruction", "input", "output"})
CALL_OPTIONS = frozenset({"parallel_tool_calls", "tool_choice", "temperature", "top_p", "seed"})
"""Keys of requests to the OpenAI API that say nothing of the conversation."""


@dataclass(frozen=True)
class BadRecord:
    """A record that is no conversation to learn from, and why."""

    path: Path
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.number} {self.reason}"


class TemplateLimitError(DataError):
    """A chat template that takes too much time or memory to write a conversation."""

    @classmethod
    def for_template(cls, template: Path, reason: str) -> "TemplateLimitError":
        """The error of a template in a file."""
        fix = "repair the template, or put another beside data.tokenizer"
        return cls.for_key("data.tokenizer", template, f"the chat template {reason}", fix)

    def with_record(self, record: str) -> "TemplateLimitError":
        """The same error, naming the record."""
        return TemplateLimitError(
            replace(issue, reason=f"{issue.reason} at {record}") for issue in self.issues
        )


Written = TypeVar("Written")


def iter_records(
    path: Path, parse_record: Callable[[dict[str, Any]], Written]
) -> Iterator[Written | BadRecord]:
    """Yields what ``parse_record`` makes of each record of a file, or what is wrong with it.

    ``number`` is a line of .jsonl, else a record, both from 1. ``parse_record`` raises
    ``ValueError`` for
    what it cannot write. Raises ``DataError`` for a file that cannot be read at all.
    """
    for number, record in _iter_file_records(path):
        try:
            if isinstance(record, ValueError):
                raise record
            if not isinstance(record, dict):
                raise ValueError("is no object")
            if has_nul(record):
                raise ValueError("has a NUL character, which text has not")
            yield parse_record(record)
        except TemplateLimitError as error:
            raise error.with_record(f"{path.name}:{number}") from error
        except ValueError as error:
            yield BadRecord(path, number, str(error))
        except RecursionError:
            yield BadRecord(path, number, "is nested too deeply")


def parse_conversation(record: dict[str, Any], keys: RecordKeys) -> Conversation:
    """Returns a record's conversation; raises ``ValueError`` with what is wrong with it."""
    record = keys.drop_ignored(record)
    named = next((key for key in TURNS if record.get(key) is not None), None)
    if named:
        messages, own = parse_turns(record[named], keys), {named}
    elif "instruction" in record and "output" in record:
        if not isinstance(record["output"], str | None):
            raise ValueError("has an instruction, input or output that is no text")
        answer = Message("assistant", record["output"] or "")
        messages, own = (*parse_alpaca(record), answer), {*OF_ALPACA, "history"}
    else:
        names = ", ".join(map(str, record)) or "nothing"
        raise ValueError(
            f"has no messages, conversations or instruction and output; it has {names}"
        )
    return assemble_messages(record, check_messages(messages), keys, own)


def assemble_messages(
    record: Mapping[str, Any],
    messages: tuple[Message, ...],
    keys: RecordKeys,
    read_keys: set[str],
) -> Conversation:
    """Messages with the system text, tools and other parts of their record.

    ``read_keys``: keys that are read in the messages.
    """
    said = {message.text.strip() for message in messages} | _alpaca_texts(record)
    given = keys.select_fields(record, {*read_keys, *SYSTEM, *OF_TEMPLATE, *CALL_OPTIONS}, said)
    for key in sorted(CALL_OPTIONS & given.keys()):
        keys.count_ignored(key)
    system = next((given[key] for key in SYSTEM if key in given), "")
    if any(given.get(key, system) != system for key in SYSTEM):
        raise ValueError(f"has different texts in {' and '.join(SYSTEM)}")
    if not isinstance(system, str):
        raise ValueError("has a system that is no text")
    if system.strip():
        others = [m.text for m in messages if m.role in ("system", "developer")]
        if others and others[0] != system:
            raise ValueError("has a system, and another one in its turns")
        if not others:
            messages = (Message("system", system), *messages)
    functions = [
        *(parse_tools(given.get("tools")) or []),
        *(parse_tools(given.get("functions")) or []),
    ]
    documents = given.get("documents")
    if documents is not None and not all(isinstance(document, dict) for document in documents):
        raise ValueError("has documents that are no list of objects")
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise ValueError("has chat_template_kwargs that are no object")
    if has_surrogate([system, functions, documents, variables]):
        raise ValueError("has half a character (a lone surrogate)")
    return Conversation(messages, functions or None, documents, variables)


def _alpaca_texts(record: Mapping[str, Any]) -> set[str]:
    """Returns a record in Alpaca's format as its authors write it for a model.

    Their files have it as a key ``text``.
    """
    asked, given, answer = (record.get(key) or "" for key in ("instruction", "input", "output"))
    if not asked or not answer:
        return set()
    context = ", paired with an input that provides further context" if given else ""
    parts = [
        f"Below is an instruction that describes a task{context}. "
        "Write a response that appropriately completes the request.",
        f"### Instruction:\n{asked}",
        *([f"### Input:\n{given}"] if given else []),
        f"### Response:\n{answer}",
    ]
    return {"\n\n".join(parts).strip()}


def parse_alpaca(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Returns the earlier turns of a record in Alpaca's format, and its question."""
    asked, given = (record.get(key) or "" for key in ("instruction", "input"))
    if not isinstance(asked, str) or not isinstance(given, str):
        raise ValueError("has an instruction, input or output that is no text")
    return (*parse_history(record), Message("user", f"{asked}\n\n{given}" if given else asked))


def parse_history(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Returns the turns of a record's ``history``, a list of questions with their answers."""
    found: list[Message] = []
    history = record.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_text, pair))):
            raise ValueError("has a history that is no list of pairs of texts")
        found += [Message("user", pair[0]), Message("assistant", pair[1])]
    return tuple(found)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _iter_file_records(path: Path) -> Iterator[tuple[int, object]]:
    """Yields each record with its number; a ValueError stands for one that cannot be read."""
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
        # a lone surrogate is an error of its record
        found = json.loads(read_text(path), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        reason = f"is not JSON that can be read ({error})"
        raise DataError.for_key("data.paths", path, reason, "mend the file") from error
    if not isinstance(found, list):
        raise DataError.for_key("data.paths", path, "is no list of records", "use .jsonl")
    return found


def _iter_parquet_rows(path: Path) -> Iterator[object]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        fix = "pip install 'scalewise[hf]'"
        raise DataError.for_key(
            "data.paths", path, "reading .parquet needs pyarrow", fix
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            check_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches():
                yield from map(_without_nulls, batch.to_pylist())
    except pyarrow.ArrowInvalid as error:
        reason = f"is not whole parquet ({error})"
        raise DataError.for_key("data.paths", path, reason, "copy the file again") from error


def _without_nulls(value: Any) -> Any:
    """A row without the keys that parquet adds to tables which do not have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
