"""Hugging Face datasets, from the Hub or from local folders."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.text_files import Document, skip_nulls
from scalewise.data.tokenization import END_OF_TEXT, Documents, TokenizerSource
from scalewise.errors import ConfigError, ConfigIssue, DataError
from scalewise.registry import register_option

if TYPE_CHECKING:
    from scalewise.data.datasets import StreamedDataset


@register_option("data", "hf")
@dataclass(frozen=True)
class HFDatasetData(DataConfig):
    """A dataset of the ``datasets`` library, tokenized once or while streaming.

    A Hub dataset is tokenized again only when one of these options changes; set ``revision`` to pin
    its version. Dataset scripts are never executed.
    """

    sequence: int = 256
    """Sequence length, in tokens."""
    path: str = ""
    """Name on the Hub, folder of .jsonl or .parquet files, or ``save_to_disk`` folder."""
    configuration: str | None = None
    """Configuration (subset) of the dataset, if it has several."""
    revision: str | None = None
    """Commit, tag or branch on the Hub; null: the newest."""
    split: str = "train"
    """Training split; slices such as train[:95%] only without streaming."""
    validation_split: str | None = None
    """Validation split, always tokenized into the cache; null: no validation."""
    field: str = "text"
    """Column with the text."""
    streaming: bool = False
    """Whether text is tokenized while training, in stored order; every rank reads the whole
    stream."""
    tokenizer: str | None = None
    """Path of a tokenizer.json or of a tokenizer's folder; null: train a byte-level BPE on the
    text."""
    vocabulary: int = 4096
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    end_of_text: str = END_OF_TEXT
    """Token between documents, by its name in the given tokenizer."""
    special_tokens: bool = True
    """Whether documents get the special tokens that the tokenizer adds, such as a leading <bos>."""

    @property
    def required_vocabulary(self) -> int | None:
        """Vocabulary size of the tokenizer that is trained; None with a given one."""
        return self.vocabulary if self.tokenizer is None else None

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an empty path, an absent local folder, and values out of range."""
        yield from self.non_positive_issues("sequence")
        yield from self._tokenizer_source.validate()
        if not self.path:
            fix = "set data.path=roneneldan/TinyStories, or a folder"
            yield ConfigIssue("data.path", "''", "is empty", fix)
        elif self.path.startswith((".", "/", "~")) and not self._dataset_folder.is_dir():
            yield ConfigIssue(
                "data.path", self.path, "no such folder", "set data.path to a folder or a Hub name"
            )
        for field in ("split", "field"):
            if not getattr(self, field):
                yield ConfigIssue(f"data.{field}", "''", "is empty", f"set data.{field}=NAME")

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Return packed sequences, or with ``streaming``, sequences in stream order."""
        from scalewise.data.tokenized_cache import (
            TokenizeSource,
            build_tokenized,
            load_packed,
            load_splits,
            special_tokens_note,
        )

        if importlib.util.find_spec("datasets") is None:
            fix = "pip install 'scalewise[hf]'"
            raise ConfigError.for_key("data", "hf", "requires the package datasets", fix)
        if issues := list(self.validate()):
            raise DataError(issues)
        iter_train = partial(self._iter_documents, self.split)
        splits: dict[str, Documents] = {} if self.streaming else {"train": iter_train}
        if self.validation_split:
            splits["validation"] = partial(self._iter_documents, self.validation_split)
        source = TokenizeSource(
            name="hf",
            key="data.path",
            value=self.path,
            identity=self._cache_identity(),
            splits=splits,
            training_documents=iter_train,
            tokenizer_source=self._tokenizer_source,
        )
        folder = build_tokenized(source, vocabulary)
        has_validation = "validation" in splits
        if not self.streaming:
            return load_splits(folder, self.sequence, validation=has_validation)
        return DataSplits(
            self._open_stream(folder / "tokenizer.json", iter_train),
            load_packed(folder, "validation", self.sequence) if has_validation else None,
            folder / "tokenizer.json",
            special_tokens_note(folder),
        )

    @property
    def _tokenizer_source(self) -> TokenizerSource:
        return TokenizerSource(
            self.vocabulary, self.tokenizer, self.end_of_text, self.special_tokens
        )

    @property
    def _dataset_folder(self) -> Path:
        return Path(self.path).expanduser()

    def _cache_identity(self) -> dict[str, object]:
        from scalewise.data import content

        names = ("path", "configuration", "revision", "split", "validation_split", "field")
        identity: dict[str, object] = {name: getattr(self, name) for name in names}
        if self._dataset_folder.is_dir():
            files = sorted(path for path in self._dataset_folder.rglob("*") if path.is_file())
            parts = [str(file.relative_to(self._dataset_folder)) for file in files]
            identity["path"] = [*zip(parts, content.file_digests(files), strict=True)]
        return identity

    def _open_stream(self, tokenizer: Path, iter_train: Documents) -> StreamedDataset:
        from tokenizers import Tokenizer

        from scalewise.data.datasets import StreamedDataset
        from scalewise.data.encoding import encode_documents

        loaded_tokenizer = Tokenizer.from_file(str(tokenizer))
        dataset = StreamedDataset(
            lambda: encode_documents(loaded_tokenizer, self._tokenizer_source, iter_train()),
            self.sequence,
        )
        try:
            dataset.gather([0])
        except IndexError as error:
            reason = f"the split {self.split!r} is shorter than one sequence"
            fix = "add more text or set a smaller data.sequence"
            raise DataError.for_key("data.sequence", self.sequence, reason, fix) from error
        return dataset

    def _iter_documents(self, split: str) -> Iterator[Document]:
        """Yield the texts of a split in stored order; raises ``DataError`` if it cannot be read."""
        from datasets.exceptions import DatasetsError

        try:
            yield from skip_nulls(self._iter_texts(split), self.path, self.field)
        except (DatasetsError, ValueError, KeyError, OSError) as error:
            reason = f"split {split!r} cannot be read: {' '.join(str(error).split())}"
            fix = "check data.path, data.configuration and the split"
            raise DataError.for_key("data.path", self.path, reason, fix) from error

    def _iter_texts(self, split: str) -> Iterator[tuple[str, str | None]]:
        """Yield the location and the text of each record; the text may be null."""
        dataset = self._load_dataset(split)
        names: list[str] = list(dataset.column_names or ())
        if self.field in names:
            dataset = dataset.select_columns([self.field])  # avoids decoding other columns
        for number, record in enumerate(dataset, 1):
            text = record.get(self.field, 0)
            if not isinstance(text, str | None):
                columns_text = f"; its columns: {', '.join(names or record)}"
                reason = f"{self.path} has no such column{columns_text}"
                if self.field in record:
                    type_name = type(text).__name__
                    reason = (
                        f"row {number} of {self.path} has {type_name} in it, not text{columns_text}"
                    )
                raise DataError.for_key("data.field", self.field, reason, "set another data.field")
            yield f"{self.path} {split} row {number}", text

    def _load_dataset(self, split: str) -> Any:
        """Return the records of a split, as the ``datasets`` library reads them."""
        import datasets

        folder = self._dataset_folder
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(folder))[split]
        if (folder / "state.json").is_file():
            if split != "train":
                raise ValueError("the folder contains one saved dataset, whose split is train")
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(
            str(folder) if folder.is_dir() else self.path,
            self.configuration,
            split=split,
            revision=self.revision,
            streaming=self.streaming,
        )
