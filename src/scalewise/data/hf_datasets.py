"""Splits of Hugging Face datasets, tokenized into the cache or while streaming."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scalewise.data.chunked_encoding import encode_documents
from scalewise.data.datasets import StreamedDataset
from scalewise.data.input_files import file_digests
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.record_files import skip_nulls
from scalewise.data.text import HFDatasetData
from scalewise.data.text_files import Document
from scalewise.data.tokenized_cache import (
    TokenizeSource,
    build_tokenized,
    load_packed,
    load_splits,
    special_tokens_note,
    tokenize_source,
)
from scalewise.data.tokenizer import Documents
from scalewise.errors import ConfigError, DataError


@prepare_splits.register(HFDatasetData)
def _prepare_hf_dataset(config: HFDatasetData, vocabulary: int, seed: int) -> DataSplits:
    """Return packed sequences, or with ``streaming``, sequences in stream order."""
    source = tokenize_source(config)
    folder, has_validation = build_tokenized(source, vocabulary), "validation" in source.splits
    if not config.streaming:
        return load_splits(folder, config.sequence, validation=has_validation)
    return DataSplits(
        _open_stream(config, folder / "tokenizer.json", source.training_documents),
        load_packed(folder, "validation", config.sequence) if has_validation else None,
        folder / "tokenizer.json",
        special_tokens_note(folder),
    )


@tokenize_source.register(HFDatasetData)
def _hf_source(config: HFDatasetData) -> TokenizeSource:
    if importlib.util.find_spec("datasets") is None:
        fix = "pip install 'scalewise[hf]'"
        raise ConfigError.for_key("data", "hf", "requires the package datasets", fix)
    if issues := list(config.validate()):
        raise DataError(issues)
    iter_train = partial(_iter_documents, config, config.split)
    splits: dict[str, Documents] = {} if config.streaming else {"train": iter_train}
    if config.validation_split:
        splits["validation"] = partial(_iter_documents, config, config.validation_split)
    return TokenizeSource(
        name="hf",
        key="data.path",
        value=config.path,
        identity=_cache_identity(config),
        splits=splits,
        training_documents=iter_train,
        tokenizer_source=config.tokenizer_source,
        is_fixed=config.dataset_folder.is_dir(),
    )


def _cache_identity(config: HFDatasetData) -> dict[str, object]:

    names = ("path", "configuration", "revision", "split", "validation_split", "field")
    identity: dict[str, object] = {name: getattr(config, name) for name in names}
    if config.dataset_folder.is_dir():
        files = sorted(path for path in config.dataset_folder.rglob("*") if path.is_file())
        parts = [str(file.relative_to(config.dataset_folder)) for file in files]
        identity["path"] = [*zip(parts, file_digests(files), strict=True)]
    return identity


def _open_stream(config: HFDatasetData, tokenizer: Path, iter_train: Documents) -> StreamedDataset:

    loaded_tokenizer = Tokenizer.from_file(str(tokenizer))
    dataset = StreamedDataset(
        lambda: encode_documents(loaded_tokenizer, config.tokenizer_source, iter_train()),
        config.sequence,
    )
    try:
        dataset.gather([0])
    except IndexError as error:
        reason = f"the split {config.split!r} is shorter than one sequence"
        fix = "add more text or set a smaller data.sequence"
        raise DataError.for_key("data.sequence", config.sequence, reason, fix) from error
    return dataset


def _iter_documents(config: HFDatasetData, split: str) -> Iterator[Document]:
    """Yield the texts of a split in stored order; raises ``DataError`` if it cannot be read."""
    from datasets.exceptions import DatasetsError

    try:
        yield from skip_nulls(_iter_texts(config, split), config.path, config.field)
    except (DatasetsError, ValueError, KeyError, OSError) as error:
        reason = f"split {split!r} cannot be read: {' '.join(str(error).split())}"
        fix = "check data.path, data.configuration and the split"
        raise DataError.for_key("data.path", config.path, reason, fix) from error


def _iter_texts(config: HFDatasetData, split: str) -> Iterator[tuple[str, str | None]]:
    """Yield the location and the text of each record; the text may be null."""
    dataset = _load_dataset(config, split)
    names: list[str] = list(dataset.column_names or ())
    if config.field in names:
        dataset = dataset.select_columns([config.field])  # avoids decoding other columns
    for number, record in enumerate(dataset, 1):
        text = record.get(config.field, 0)
        if not isinstance(text, str | None):
            columns_text = f"; its columns: {', '.join(names or record)}"
            reason = f"{config.path} has no such column{columns_text}"
            if config.field in record:
                type_name = type(text).__name__
                reason = (
                    f"row {number} of {config.path} has {type_name} in it, not text{columns_text}"
                )
            raise DataError.for_key("data.field", config.field, reason, "set another data.field")
        yield f"{config.path} {split} row {number}", text


def _load_dataset(config: HFDatasetData, split: str) -> Any:
    """Return the records of a split, as the ``datasets`` library reads them."""
    import datasets

    folder = config.dataset_folder
    if (folder / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(folder))[split]
    if (folder / "state.json").is_file():
        if split != "train":
            raise ValueError("the folder contains one saved dataset, whose split is train")
        return datasets.load_from_disk(str(folder))
    return datasets.load_dataset(
        str(folder) if folder.is_dir() else config.path,
        config.configuration,
        split=split,
        revision=config.revision,
        streaming=config.streaming,
    )
