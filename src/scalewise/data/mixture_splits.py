"""Splits of a mixture, prepared with one tokenizer for all sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from scalewise.data.build_cache import build_cached
from scalewise.data.encoding import TRAINING_CHARACTERS, iter_training_text, train_tokenizer
from scalewise.data.mixture import MixtureData, source_issue, trains_shared_tokenizer
from scalewise.data.mixture_dataset import ConcatenatedDataset, MixtureDataset
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.tokenized_cache import FORMAT, TokenizeSource, tokenize_source
from scalewise.errors import ConfigError, DataError


@prepare_splits.register(MixtureData)
def _prepare_mixture(config: MixtureData, vocabulary: int, seed: int) -> DataSplits:
    """Prepare each source with the tokenizer of the mixture."""
    if issues := list(config.validate()):
        raise DataError(issues)
    if config.trains_tokenizer:
        config = replace(config, tokenizer=str(_train_shared_tokenizer(config, vocabulary)))
    splits: dict[str, DataSplits] = {}
    for name, source in config.source_configs().items():
        with _errors_of_source(name):
            splits[name] = prepare_splits(source, vocabulary, seed)
    validation = {name: it.validation for name, it in splits.items() if it.validation is not None}
    notes = [f"{name}: {note}" for name, it in splits.items() for note in it.note.splitlines()]
    return DataSplits(
        MixtureDataset({name: it.train for name, it in splits.items()}, config),
        ConcatenatedDataset(validation) if validation else None,
        next((it.tokenizer for it in splits.values() if it.tokenizer), None),
        "\n".join(notes),
        validation,
    )


@contextmanager
def _errors_of_source(name: str) -> Iterator[None]:
    """Let errors of a source name the keys of the mixture."""
    try:
        yield
    except ConfigError as error:
        raise type(error)([source_issue(name, issue) for issue in error.issues]) from error


def _train_shared_tokenizer(config: MixtureData, vocabulary: int) -> Path:
    """Return the tokenizer.json that is trained on the texts of all sources, in equal parts."""
    config.tokenizer_source.check_vocabulary(vocabulary)
    sources: list[TokenizeSource] = []
    for name, data in config.source_configs().items():
        if trains_shared_tokenizer(data):
            with _errors_of_source(name):
                sources.append(tokenize_source(data))

    def write(folder: Path) -> None:
        documents = partial(_iter_training_text, sources)
        tokenizer = train_tokenizer(config.tokenizer_source, documents)
        tokenizer.save(str(folder / "tokenizer.json"))

    identity = {
        "format": FORMAT,
        "tokenizers": version("tokenizers"),
        "sources": [dict(source.identity) for source in sources],
        **config.tokenizer_source.cache_identity(),
    }
    return build_cached("mixture", identity, write) / "tokenizer.json"


def _iter_training_text(sources: Sequence[TokenizeSource]) -> Iterator[str]:
    """Yield the start of the text of each source, as much of each."""
    for source in sources:
        documents = source.training_documents()
        yield from iter_training_text(documents, TRAINING_CHARACTERS // len(sources))
