"""Tokenizer of a run: its files, converted to a tokenizer.json as transformers loads them."""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from scalewise import regular_files
from scalewise.data.build_cache import build_cached
from scalewise.data.text_files import Document
from scalewise.errors import ConfigIssue, DataError
from scalewise.typed_override import format_override, shell_word

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Documents = Callable[[], Iterator[str | Document]]
"""Function that iterates over the documents from the first one."""

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""256 bytes and the end-of-text token."""

KEY = "data.tokenizer"
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SENTENCEPIECE = "*.model"
VOCABULARY_FILES = (
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    SENTENCEPIECE,
)
"""Vocabulary files that transformers converts."""
CONVERSION_PACKAGES = ("sentencepiece", "google.protobuf", "tiktoken")
"""Packages of the extra ``hf`` with which transformers converts ``SENTENCEPIECE``."""
DECLARATION_FILES = (CONFIG_FILE, "special_tokens_map.json", "added_tokens.json")
"""Files next to a tokenizer.json that declare its class and additional tokens."""
CONVERSION_FILES = (*DECLARATION_FILES, "config.json")
"""Files next to a vocabulary that affect its conversion."""
FORMAT = 2
"""Cache format; increased when the same files are converted to another tokenizer.json."""
TEMPLATE_FILES = ("chat_template.jinja",)


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer.json, or a byte-level BPE of ``vocabulary`` tokens that is trained."""

    vocabulary: int
    """Vocabulary size of the trained BPE, in tokens."""
    tokenizer: str | None = None
    """Path of the given tokenizer; None: train one."""
    end_of_text: str = END_OF_TEXT
    """Token between documents."""
    special_tokens: bool = True
    """Whether documents get the special tokens of a given tokenizer's post-processor."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues of the vocabulary size, the tokenizer's path and the end-of-text token."""
        if not self.end_of_text:
            fix = f"set {format_override('data.end_of_text', END_OF_TEXT)}"
            yield ConfigIssue(
                "data.end_of_text", "", "is empty: a token has to separate documents", fix
            )
        if self.tokenizer is None and self.vocabulary < SMALLEST_VOCABULARY:
            reason = "is too small: a byte-level tokenizer has 256 bytes and an end-of-text token"
            fix = f"set data.vocabulary={SMALLEST_VOCABULARY} or more"
            yield ConfigIssue("data.vocabulary", self.vocabulary, reason, fix)
        if self.tokenizer is not None:
            yield from tokenizer_issues(self.tokenizer)

    def cache_identity(self) -> dict[str, object]:
        """Return the values that decide the tokenizer, besides its training text."""
        if self.tokenizer is None:
            return {"vocabulary": self.vocabulary, "end_of_text": self.end_of_text}
        return {
            "tokenizer": content_digest(self.tokenizer),
            "end_of_text": self.end_of_text,
            "special_tokens": self.special_tokens,
        }

    def load(self) -> Tokenizer | None:
        """Return the given tokenizer, or None to train one; may raise ``DataError``."""
        if self.tokenizer is None:
            return None
        file = resolve_tokenizer(self.tokenizer)
        tokenizer = load_tokenizer(self.tokenizer, file)
        if tokenizer.token_to_id(self.end_of_text) is None:
            reason = f"is not a token of {self.tokenizer}, which has to separate documents"
            override = format_override("data.end_of_text", "</s>")
            fix = f"set {override}, or the name of that token in the tokenizer"
            raise DataError.for_key("data.end_of_text", self.end_of_text, reason, fix)
        tokenizer.no_truncation()  # a tokenizer.json may hold the settings of one batch
        tokenizer.no_padding()
        return tokenizer

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise ``DataError`` for more tokens than ``vocabulary``, the model's vocabulary size."""
        tokenizer = self.load()
        size = vocabulary_size(tokenizer) if tokenizer else self.vocabulary
        if size <= vocabulary:
            return
        reason = f"has ids up to {size - 1}, but the model's vocabulary is {vocabulary}"
        fix = f"set model.vocabulary={size}"
        if tokenizer is None:
            raise DataError.for_key("data.vocabulary", size, reason, fix)
        excess_tokens = {it for it, token in tokenizer.get_vocab().items() if token >= vocabulary}
        if excess_tokens <= declared_tokens(str(self.tokenizer)):
            names = shorten(", ".join(sorted(excess_tokens)), 160, placeholder="...")
            reason += (
                f"; declared next to the tokenizer.json, beyond the model's embedding: {names}"
            )
            fix += " (for a transformers model: resize_token_embeddings); "
            fix += ignore_declarations_fix(str(self.tokenizer))
        raise DataError.for_key("data.tokenizer", self.tokenizer, reason, fix)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest token id of a tokenizer plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_path(path: str) -> Path:
    """Return the path of the tokenizer.json for ``data.tokenizer``; it may not exist.

    All files of the tokenizer are in the same folder.
    """
    user_path = regular_files.expand_home(path)
    if user_path.is_dir() or (_is_vocabulary(user_path) and user_path.is_file()):
        return (user_path if user_path.is_dir() else user_path.parent) / TOKENIZER_FILE
    return user_path


def tokenizer_files(path: str) -> list[Path]:
    """Return the existing files of the tokenizer ``data.tokenizer``, sorted by name."""
    file = tokenizer_path(path)
    if file.name != TOKENIZER_FILE:
        return [file] if file.is_file() else []
    names = (TOKENIZER_FILE, *VOCABULARY_FILES, *CONVERSION_FILES, *TEMPLATE_FILES)
    files = {it for name in names for it in file.parent.glob(name)}
    return sorted(it for it in files if it.is_file())


def tokenizer_issues(path: str) -> Iterator[ConfigIssue]:
    """Yield an issue if a path does not exist, or is a folder without a tokenizer."""
    user_path = regular_files.expand_home(path)
    fix = f"set {KEY} to the path of a tokenizer.json, or {KEY}=null to train one"
    if user_path.is_dir():
        if not any(
            True for name in (TOKENIZER_FILE, *VOCABULARY_FILES) for _ in user_path.glob(name)
        ):
            yield ConfigIssue(KEY, path, "is a folder without a tokenizer", fix)
    elif not user_path.is_file():
        yield ConfigIssue(KEY, path, "no such file", fix)


def resolve_tokenizer(path: str) -> Path:
    """Return the path of a tokenizer.json equivalent to the tokenizer that transformers loads.

    A tokenizer.json without any of ``DECLARATION_FILES`` is used as it is; other tokenizers are
    converted once into the cache. Raises ``DataError`` for files that cannot be converted, since
    their ids would differ from those of transformers.
    """
    file = tokenizer_path(path)
    if file.is_file() and not has_declarations(file):
        return file
    try:
        digests = {source.name: _digest(source) for source in tokenizer_files(path)}
    except OSError as error:
        reason = f"cannot be read: {error.strerror} ({error.filename})"
        raise DataError.for_key(KEY, path, reason, "repair the file") from error
    versions = [version(package) for package in ("transformers", "tokenizers")]
    key = {"format": FORMAT, "files": digests, "versions": versions}
    return (
        build_cached(
            "tokenizer", key, partial(_convert_tokenizer, path, file), subfolder="tokenizers"
        )
        / TOKENIZER_FILE
    )


def has_declarations(file: Path) -> bool:
    """Whether files next to a tokenizer.json change the tokenizer that transformers loads."""
    return file.name == TOKENIZER_FILE and any(
        file.with_name(name).is_file() for name in DECLARATION_FILES
    )


def declared_tokens(path: str) -> set[str]:
    """Return the tokens that are declared next to a tokenizer.json which lacks them."""
    file = tokenizer_path(path)
    if not (file.is_file() and has_declarations(file)):
        return set()
    converted = load_tokenizer(path, resolve_tokenizer(path)).get_vocab()
    return converted.keys() - load_tokenizer(path, file).get_vocab().keys()


def content_digest(path: str) -> str:
    """Return a digest of the tokenizer ``data.tokenizer``, independent of its path."""
    file = resolve_tokenizer(path)
    try:
        return _digest(file)
    except OSError as error:
        raise DataError.for_key(
            KEY, path, f"cannot be read: {error.strerror}", "repair the file"
        ) from error


def _digest(file: Path) -> str:
    return hashlib.sha256(regular_files.read_bytes(file)).hexdigest()


def _is_vocabulary(path: Path) -> bool:
    return any(path.match(name) for name in VOCABULARY_FILES)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


def _convert_tokenizer(path: str, file: Path, folder: Path) -> None:
    """Write the tokenizer.json of a tokenizer whose files are next to ``file``."""
    if file.is_file():
        load_tokenizer(path, file)  # names a damaged file, unlike the error of transformers
    try:
        tokenizer = _backend_tokenizer(file.parent)
    except Exception as error:  # transformers raises many classes
        raise conversion_error(path, file.parent, error) from error
    if tokenizer.encode_special_tokens:
        reason = (
            f"split_special_tokens=true in {file.with_name(CONFIG_FILE)} is not supported: a "
            "tokenizer.json does not store it, so that a run and its export would have other ids"
        )
        raise DataError.for_key(KEY, path, reason, f"remove it from {CONFIG_FILE}")
    tokenizer.save(str(folder / TOKENIZER_FILE))


def load_tokenizer(path: str, file: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json; raises ``DataError`` with the user's ``path``."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        reason = f"is not a tokenizer.json ({error})"
        raise DataError.for_key(KEY, path, reason) from error


def load_with_transformers(folder: Path) -> Any:
    """Return the tokenizer that transformers loads from a folder, without its messages."""
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
    """Return the error of files that transformers cannot convert, with a fix."""
    sentencepiece_files = [*folder.glob(SENTENCEPIECE)]
    missing_packages = [
        package.rpartition(".")[2] for package in CONVERSION_PACKAGES if not _is_installed(package)
    ]
    detail = shorten(" ".join(str(error).split()), 160, placeholder="...")
    if (folder / TOKENIZER_FILE).is_file():
        reason = f"transformers cannot load the class that {CONFIG_FILE} configures ({detail})"
        return DataError.for_key(KEY, path, reason, f"correct it; {ignore_declarations_fix(path)}")
    if sentencepiece_files and missing_packages:
        reason = f"converting {sentencepiece_files[0].name} requires {', '.join(missing_packages)}"
        return DataError.for_key(KEY, path, reason, "pip install 'scalewise[hf]'")
    fix = "give the path of a tokenizer.json"
    if not (folder / CONFIG_FILE).is_file():
        config = shell_word(folder / CONFIG_FILE)
        tokenizer_class = "GPT2Tokenizer" if (folder / "vocab.json").is_file() else "BertTokenizer"
        tokenizer_class = "LlamaTokenizer" if sentencepiece_files else tokenizer_class
        fix = f"""name its class: echo '{{"tokenizer_class": "{tokenizer_class}"}}' > {config}"""
    reason = f"transformers cannot convert {folder} to a tokenizer.json ({detail})"
    return DataError.for_key(KEY, path, reason, fix)


def ignore_declarations_fix(path: str) -> str:
    """Return the commands that make a run use the ids of a tokenizer.json alone."""
    file = tokenizer_path(path)
    copied_file = file.with_name("plain.json")
    copy_command = f"cp {shell_word(file)} {shell_word(copied_file)}"
    override = format_override(KEY, str(copied_file))
    return f"for the ids of {TOKENIZER_FILE} alone: {copy_command}, then {override}"
