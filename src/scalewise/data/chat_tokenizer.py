"""The tokenizer of transformers that belongs to a tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalewise.data.chat_templates import CONFIG, OWN_FILE, read_template, token_text
from scalewise.data.tokenizer_files import (
    conversion_error,
    has_declarations,
    load_with_transformers,
)
from scalewise.errors import DataError


def load_tokenizer(file: Path) -> Any:
    """Loads a tokenizer.json with the files beside it as transformers does.

    Returns None if no chat_template.jinja, tokenizer_config.json or other declaration is beside it,
    since the file alone says all. Raises ``DataError`` for files that cannot be read, and for a
    class that transformers cannot load.
    """
    declared = has_declarations(file)
    if not (declared or any(file.with_name(name).is_file() for name in (CONFIG, OWN_FILE))):
        return None
    source, config = read_template(file)
    from transformers import PreTrainedTokenizerFast

    if declared:
        try:
            return load_with_transformers(file.parent)
        except Exception as error:  # of many kinds, of many classes
            raise conversion_error(str(file), file.parent, error) from error
    special = {key: token_text(token) for key, token in config.items() if key.endswith("_token")}
    try:
        of_file: Any = PreTrainedTokenizerFast
        return of_file(
            tokenizer_file=str(file),
            chat_template=source,
            **{key: token for key, token in special.items() if token and "add_" not in key},
        )
    except Exception as error:
        reason = f"cannot be read with {file.name} ({error})"
        raise DataError.for_key("data.tokenizer", file.with_name(CONFIG), reason) from error
