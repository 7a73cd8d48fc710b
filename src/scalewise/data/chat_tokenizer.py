"""Tokenizer of transformers for a tokenizer.json, with its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalewise.data.chat_templates import CONFIG_FILE, TEMPLATE_FILE, read_template, token_text
from scalewise.data.tokenizer_files import (
    conversion_error,
    has_declarations,
    load_with_transformers,
)
from scalewise.errors import DataError


def load_tokenizer(file: Path) -> Any:
    """Load a tokenizer.json with the files next to it, as transformers does.

    Returns None if there is no chat_template.jinja, tokenizer_config.json or other declaration next
    to it. Raises ``DataError`` for files that cannot be read, and for a class that transformers
    cannot load.
    """
    is_declared = has_declarations(file)
    if not (
        is_declared or any(file.with_name(name).is_file() for name in (CONFIG_FILE, TEMPLATE_FILE))
    ):
        return None
    template, config = read_template(file)
    from transformers import PreTrainedTokenizerFast

    if is_declared:
        try:
            return load_with_transformers(file.parent)
        except Exception as error:  # transformers raises many classes
            raise conversion_error(str(file), file.parent, error) from error
    special_tokens = {
        key: token_text(token) for key, token in config.items() if key.endswith("_token")
    }
    try:
        tokenizer_class: Any = PreTrainedTokenizerFast
        return tokenizer_class(
            tokenizer_file=str(file),
            chat_template=template,
            **{key: token for key, token in special_tokens.items() if token and "add_" not in key},
        )
    except Exception as error:
        reason = f"cannot be read with {file.name} ({error})"
        raise DataError.for_key("data.tokenizer", file.with_name(CONFIG_FILE), reason) from error
