"""The tokenizer in a run's folder: what the ids of its weights stand for, whatever the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scalewise.data.base import DataSplits
from scalewise.errors import DataError
from scalewise.tracking.run_files import RecordError, copy_file, load_json

NAME = "tokenizer.json"


def save_tokenizer(splits: DataSplits, folder: Path) -> None:
    """Copies the tokenizer of a run's data into its folder, where the data are text."""
    if splits.tokenizer is not None:
        copy_file(splits.tokenizer, folder / NAME)


def check_tokenizer(splits: DataSplits, folder: Path) -> None:
    """Raises ``DataError`` where an earlier run's ids stood for other text than ``splits`` do."""
    kept = folder / NAME
    if splits.tokenizer is None or not kept.is_file():  # token ids, or written before it was kept
        return
    if load_tokenizer(splits.tokenizer) != load_tokenizer(kept):  # however they are formatted
        reason = (
            f"gives another tokenizer than {kept}, of which the weights of that run were made: "
            "what it was trained on has changed since"
        )
        fix = "put the data back as they were; a new run takes them as they are"
        raise DataError.for_key("data", splits.tokenizer, reason, fix)


def load_tokenizer(file: Path) -> dict[str, Any]:
    """Returns the content of a tokenizer.json; raises ``RecordError`` where it is damaged."""
    content = load_json(file)
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other class
        raise RecordError.for_file(file, f"is no tokenizer: {error}") from None
    return content
