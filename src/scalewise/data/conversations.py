"""Conversations in files: three usual formats of records, told apart by their keys.

Alpaca's has ``instruction``, ``input`` and ``output``; ShareGPT's ``conversations`` of ``from`` and
``value``; the OpenAI API's ``messages`` of ``role`` and ``content``.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from scalewise.errors import DataError

SUFFIXES = frozenset({".jsonl", ".json", ".parquet"})
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
"""What files call the speakers, and what templates do."""


@dataclass(frozen=True)
class Message:
    """What one speaker says; ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Bad:
    """A record that is no conversation to learn from, and why."""

    path: Path
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.number} {self.reason}"


Conversation = tuple[Message, ...]
Written = TypeVar("Written")


def records(path: Path, write: Callable[[dict[str, Any]], Written]) -> Iterator[Written | Bad]:
    """Yields what ``write`` makes of each record of a file, or what is wrong with it.

    ``number`` is a line of .jsonl, else a record, both from 1. ``write`` raises ``ValueError`` for
    what it cannot write. Raises ``DataError`` for a file that cannot be read at all.
    """
    for number, record in _records(path):
        try:
            if isinstance(record, ValueError):
                raise record
            if not isinstance(record, dict):
                raise ValueError("is no object")
            yield write(record)
        except ValueError as error:
            yield Bad(path, number, str(error))


def conversation(record: dict[str, Any]) -> Conversation:
    """Returns a record's messages; raises ``ValueError`` with what is wrong with them."""
    if record.get("messages") is not None:
        found = said(record["messages"], "role", "content")
    elif record.get("conversations") is not None:
        found = said(record["conversations"], "from", "value")
    elif "instruction" in record and "output" in record:
        found = _instruction(record)
    else:
        keys = ", ".join(map(str, record)) or "nothing"
        raise ValueError(f"has no messages, conversations or instruction and output; it has {keys}")
    return sound(found)


def sound(found: Conversation) -> Conversation:
    """Returns a conversation that has an answer, all in whole characters; raises otherwise."""
    answers = [message.content for message in found if message.role == "assistant"]
    if not any(answer.strip() for answer in answers):
        raise ValueError("has no answer")
    if any("\ud800" <= letter <= "\udfff" for message in found for letter in message.content):
        raise ValueError("has half a character (a lone surrogate)")
    return found


def said(turns: object, speaker: str, text: str) -> Conversation:
    """Returns the messages of turns that are tables of a speaker and a text."""
    if not isinstance(turns, list) or not turns:
        raise ValueError("has no list of turns")
    return tuple(_message(turn, speaker, text) for turn in turns)


def _message(turn: object, speaker: str, text: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError("has a turn that is no object")
    content = turn.get(text)
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str):
        raise ValueError(f"has a turn without a text in {text!r}")
    role = ROLES.get(str(turn.get(speaker)))
    if role is None:
        known = ", ".join(ROLES)
        raise ValueError(f"has a turn of {turn.get(speaker)!r}; known are {known}")
    return Message(role, content)


def _joined(parts: list[Any]) -> str | None:
    """Returns the text of parts of which all are text; None where some are not."""
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return None


def _instruction(record: dict[str, Any]) -> Conversation:
    system, asked, given, answer = (
        record.get(key) or "" for key in ("system", "instruction", "input", "output")
    )
    if not all(isinstance(part, str) for part in (system, asked, given, answer)):
        raise ValueError("has an instruction, input or output that is no text")
    told = (Message("system", system),) if system else ()
    question = f"{asked}\n\n{given}" if given else asked
    return (*told, Message("user", question), Message("assistant", answer))


def _records(path: Path) -> Iterator[tuple[int, object]]:
    """Yields each record with its number; a ValueError stands for one that cannot be read."""
    try:
        if path.suffix == ".jsonl":
            yield from _lines(path)
        elif path.suffix == ".json":
            yield from enumerate(_list(path), 1)
        else:
            yield from enumerate(_rows(path), 1)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise DataError.one("data.paths", path, reason, "mend or omit it") from error


def _lines(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(BOM_UTF8) if number == 1 else line
            if text.strip():
                try:
                    yield number, json.loads(text.decode("utf-8"))
                except json.JSONDecodeError as error:
                    yield number, ValueError(f"is not JSON ({error.msg})")
                except (UnicodeDecodeError, RecursionError) as error:
                    yield number, ValueError(f"is not JSON in UTF-8 ({error})")


def _list(path: Path) -> list[object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = f"is not JSON in UTF-8 ({error})"
        raise DataError.one("data.paths", path, reason, "mend the file") from error
    if not isinstance(found, list):
        raise DataError.one("data.paths", path, "is no list of records", "use .jsonl")
    return found


def _rows(path: Path) -> Iterator[object]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        cure = "pip install 'scalewise[hf]'"
        raise DataError.one("data.paths", path, "reading .parquet needs pyarrow", cure) from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        reason = f"is not whole parquet ({error})"
        raise DataError.one("data.paths", path, reason, "copy the file again") from error
