"""Folders of models: on this machine, in the Hub's local cache, or from the Hub."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from scalewise.errors import ConfigError
from scalewise.models.safetensors_files import INDEX

KEY = "model.path"
CONFIGURATION = ("config.json", "generation_config.json")
WEIGHTS = ("*.safetensors", INDEX)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""With what decides how conversations are written."""


def model_folder(path: str, files: tuple[str, ...]) -> Path:
    """Returns the folder of a model with the ``files`` that it has, the first being needed.

    Raises ``ConfigError``, in one line, where there is none: no folder here, and a name that
    neither the cache nor the Hub gives.
    """
    here = Path(path).expanduser()
    if here.is_dir():
        return here
    fix = "give model.path=FOLDER that save_pretrained wrote, or HF_HOME=CACHE that has it"
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError.for_key(KEY, path, "there is no such folder", fix)
    try:
        return _download(path, files)
    except Exception as error:  # of its client, of its network: there are many kinds
        reason = f"is no folder, and neither in the Hub's cache nor to be had ({_hub_error(error)})"
        raise ConfigError.for_key(KEY, path, reason, fix) from error


def model_tokenizer(path: str) -> Path | None:
    """Returns the tokenizer.json of a model; None where it has none."""
    try:
        found = model_folder(path, TOKENIZER) / TOKENIZER[0]
    except ConfigError:
        return None
    return found if found.is_file() else None


def _download(name: str, files: tuple[str, ...]) -> Path:
    try:
        cached = Path(snapshot_download(name, allow_patterns=[*files], local_files_only=True))
        if any(cached.glob(files[0])):
            return cached
    except LocalEntryNotFoundError:
        pass
    return Path(snapshot_download(name, allow_patterns=[*files]))


def _hub_error(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 120, placeholder="...")
