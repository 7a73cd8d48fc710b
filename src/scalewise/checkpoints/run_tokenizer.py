"""Copy of the tokenizer in the run folder, which decodes the token ids of the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scalewise.data.prepare import DataSplits
from scalewise.errors import DataError
from scalewise.run_files import RecordError, copy_file, load_json

TOKENIZER_FILE = "tokenizer.json"


def save_tokenizer(splits: DataSplits, folder: Path) -> None:
    """Copy the tokenizer of the run's data, if there is one, into the run folder."""
    if splits.tokenizer is not None:
        copy_file(splits.tokenizer, folder / TOKENIZER_FILE)


def check_tokenizer(splits: DataSplits, folder: Path) -> None:
    """Raise ``DataError`` if the data have another tokenizer than the run in ``folder``."""
    saved_file = folder / TOKENIZER_FILE
    if (
        splits.tokenizer is None or not saved_file.is_file()
    ):  # token ids, or a run of an earlier version
        return
    if load_tokenizer(splits.tokenizer) != load_tokenizer(
        saved_file
    ):  # ignores the formatting of the JSON
        reason = (
            f"has another tokenizer than {saved_file}, which the run was trained with: "
            "the text that the tokenizer is trained on has changed"
        )
        fix = "restore the data, or start a new run"
        raise DataError.for_key("data", splits.tokenizer, reason, fix)


def load_tokenizer(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json; raises ``RecordError`` for a damaged file."""
    content = load_json(file)
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other class
        raise RecordError.for_file(file, f"is not a tokenizer: {error}") from None
    return content
