"""Folders of models: a local path, the Hub's local cache, or a download from the Hub."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten

from scalewise import regular_files
from scalewise.errors import ConfigError

KEY = "model.path"
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of the tokenizer and of the chat format."""


def model_folder(path: str, files: tuple[str, ...]) -> Path:
    """Return a folder with those of ``files`` that the model has; the first one is required.

    Raises:
        ConfigError: There is no such folder, and neither the cache nor the Hub has the model.
    """
    folder = regular_files.expand_home(path)
    if folder.is_dir():
        return folder
    fix = "set model.path=FOLDER written by save_pretrained, or HF_HOME=CACHE with the model"
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError.for_key(KEY, path, "does not exist", fix)
    try:
        return _download(path, files)
    except Exception as error:  # the Hub's client and the network raise many types
        reason = (
            f"is not a folder, not in the Hub cache and cannot be downloaded ({_hub_error(error)})"
        )
        raise ConfigError.for_key(KEY, path, reason, fix) from error


def model_tokenizer(path: str) -> Path | None:
    """Return the tokenizer.json of a model, or None."""
    try:
        file = model_folder(path, TOKENIZER_FILES) / TOKENIZER_FILES[0]
    except ConfigError:
        return None
    return file if file.is_file() else None


def _download(name: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # not needed for a local folder
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, allow_patterns=[*files], local_files_only=True))
        if any(cached.glob(files[0])):
            return cached
    except LocalEntryNotFoundError:
        pass
    return Path(snapshot_download(name, allow_patterns=[*files]))


def _hub_error(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 120, placeholder="...")
