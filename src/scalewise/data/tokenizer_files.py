"""The files of a tokenizer, and a tokenizer.json of what transformers makes of them."""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from scalewise import regular_files
from scalewise.data.build_cache import build_cached
from scalewise.errors import ConfigIssue, DataError
from scalewise.typed_override import format_override, shell_word

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEY = "data.tokenizer"
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
SENTENCEPIECE = "*.model"
VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken", SENTENCEPIECE)
"""Files of vocabularies that transformers converts."""
PACKAGES = ("sentencepiece", "google.protobuf", "tiktoken")
"""Packages of the extra ``hf`` with which transformers converts ``SENTENCEPIECE``."""
DECLARATIONS = (CONFIG, "special_tokens_map.json", "added_tokens.json")
"""Files beside a tokenizer.json that declare its class and further tokens."""
OTHERS = (*DECLARATIONS, "config.json")
"""Files beside a vocabulary that decide what transformers makes of it."""
FORMAT = 2
"""Increased when the same files are converted to another tokenizer.json."""
TEMPLATES = ("chat_template.jinja",)


def tokenizer_path(path: str) -> Path:
    """Returns the path of the tokenizer.json that ``data.tokenizer`` names; it may not exist.

    The files of the same tokenizer lie beside it.
    """
    given = Path(path).expanduser()
    if given.is_dir() or (_is_vocabulary(given) and given.is_file()):
        return (given if given.is_dir() else given.parent) / FILE
    return given


def tokenizer_files(path: str) -> list[Path]:
    """Returns the files of the tokenizer that ``data.tokenizer`` names, sorted by name."""
    file = tokenizer_path(path)
    if file.name != FILE:
        return [file] if file.is_file() else []
    names = (FILE, *VOCABULARIES, *OTHERS, *TEMPLATES)
    found = {it for name in names for it in file.parent.glob(name)}
    return sorted(it for it in found if it.is_file())


def tokenizer_issues(path: str) -> Iterator[ConfigIssue]:
    """Yields a path that does not exist, and a folder without a tokenizer."""
    given = Path(path).expanduser()
    fix = f"give the path of a tokenizer.json, or {KEY}=null to train one"
    if given.is_dir():
        if not any(True for name in (FILE, *VOCABULARIES) for _ in given.glob(name)):
            yield ConfigIssue(KEY, path, "is a folder without a tokenizer", fix)
    elif not given.is_file():
        yield ConfigIssue(KEY, path, "no such file", fix)


def resolve_tokenizer(path: str) -> Path:
    """Returns a tokenizer.json with what transformers makes of the files that ``path`` names.

    A tokenizer.json with none of ``DECLARATIONS`` beside it is returned as it is; others are
    converted once into the cache. Raises ``DataError`` for files that cannot be converted: their
    ids would not be those of transformers.
    """
    file = tokenizer_path(path)
    if file.is_file() and not has_declarations(file):
        return file
    try:
        digests = {found.name: _digest(found) for found in tokenizer_files(path)}
    except OSError as error:
        reason = f"cannot be read: {error.strerror} ({error.filename})"
        raise DataError.for_key(KEY, path, reason, "mend the file") from error
    versions = [version(package) for package in ("transformers", "tokenizers")]
    key = {"format": FORMAT, "files": digests, "versions": versions}
    return (
        build_cached(
            "tokenizer", key, partial(_convert_tokenizer, path, file), subfolder="tokenizers"
        )
        / FILE
    )


def has_declarations(file: Path) -> bool:
    """Returns whether files beside a tokenizer.json change what transformers makes of it."""
    return file.name == FILE and any(file.with_name(name).is_file() for name in DECLARATIONS)


def declared_tokens(path: str) -> set[str]:
    """Returns the tokens that are declared beside a tokenizer.json which lacks them."""
    file = tokenizer_path(path)
    if not (file.is_file() and has_declarations(file)):
        return set()
    converted = load_tokenizer(path, resolve_tokenizer(path)).get_vocab()
    return converted.keys() - load_tokenizer(path, file).get_vocab().keys()


def content_digest(path: str) -> str:
    """Returns a digest of the tokenizer that ``data.tokenizer`` names, wherever it lies."""
    file = resolve_tokenizer(path)
    try:
        return _digest(file)
    except OSError as error:
        raise DataError.for_key(
            KEY, path, f"cannot be read: {error.strerror}", "mend it"
        ) from error


def _digest(file: Path) -> str:
    return hashlib.sha256(regular_files.read_bytes(file)).hexdigest()


def _is_vocabulary(path: Path) -> bool:
    return any(path.match(name) for name in VOCABULARIES)


def _has_file(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it lies in
        return False


def _convert_tokenizer(path: str, file: Path, folder: Path) -> None:
    """Writes the tokenizer.json of a tokenizer whose files lie beside ``file``."""
    if file.is_file():
        load_tokenizer(path, file)  # names a damaged file; the error of transformers does not
    try:
        tokenizer = _backend_tokenizer(file.parent)
    except Exception as error:  # of many kinds, of many classes
        raise conversion_error(path, file.parent, error) from error
    if tokenizer.encode_special_tokens:
        reason = (
            f"split_special_tokens=true in {file.with_name(CONFIG)} is not supported: a "
            "tokenizer.json does not store it, so that a run and its export would give other ids"
        )
        raise DataError.for_key(KEY, path, reason, f"remove it from {CONFIG}")
    tokenizer.save(str(folder / FILE))


def load_tokenizer(path: str, file: Path) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json; raises ``DataError`` with the given ``path``."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        reason = f"is not a tokenizer.json ({error})"
        raise DataError.for_key(KEY, path, reason) from error


def load_with_transformers(folder: Path) -> Any:
    """Returns the tokenizer that transformers loads from a folder, without its messages."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoTokenizer.from_pretrained(
                str(folder), use_fast=True, local_files_only=True, trust_remote_code=False
            )
    finally:
        logging.set_verbosity(verbosity)


def _backend_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    loaded = load_with_transformers(folder)
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"{type(loaded).__name__} has no tokenizer.json")
    return tokenizer


def conversion_error(path: str, folder: Path, error: Exception) -> DataError:
    """Returns the error of files that transformers does not convert, with what may help."""
    pieces = [*folder.glob(SENTENCEPIECE)]
    lacking = [package.rpartition(".")[2] for package in PACKAGES if not _has_file(package)]
    said = shorten(" ".join(str(error).split()), 160, placeholder="...")
    if (folder / FILE).is_file():
        reason = f"transformers cannot load the class that {CONFIG} configures ({said})"
        return DataError.for_key(KEY, path, reason, f"correct it; {ignore_declarations_fix(path)}")
    if pieces and lacking:
        reason = f"{pieces[0].name} is converted by transformers with {', '.join(lacking)}"
        return DataError.for_key(KEY, path, reason, "pip install 'scalewise[hf]'")
    fix = "give the path of a tokenizer.json"
    if not (folder / CONFIG).is_file():
        config = shell_word(folder / CONFIG)
        known = "GPT2Tokenizer" if (folder / "vocab.json").is_file() else "BertTokenizer"
        known = "LlamaTokenizer" if pieces else known
        fix = f"""name its class: echo '{{"tokenizer_class": "{known}"}}' > {config}"""
    reason = f"transformers makes no tokenizer.json of {folder} ({said})"
    return DataError.for_key(KEY, path, reason, fix)


def ignore_declarations_fix(path: str) -> str:
    """Returns what to type for the ids of a tokenizer.json alone."""
    file = tokenizer_path(path)
    plain = file.with_name("plain.json")
    copied = f"cp {shell_word(file)} {shell_word(plain)}"
    return f"for the ids of {FILE} alone: {copied}, then {format_override(KEY, str(plain))}"
