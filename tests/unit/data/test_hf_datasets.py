"""Datasets in the formats of the Hugging Face Hub, from local files."""

import importlib.util
import itertools
import json
import sys

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from scalewise.data import text_files
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.datasets import StreamedDataset
from scalewise.data.encoding import train_tokenizer
from scalewise.data.prepare import prepare_splits
from scalewise.data.text import HFDatasetData
from scalewise.data.tokenizer import TokenizerSource
from scalewise.errors import ConfigError, DataError

TEXTS = [f"{index} bottles of milk stand on the wall.\n" for index in range(80)]
DATA_OPTIONS = {"vocabulary": 300, "sequence": 8}


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    for split, texts in (("train", TEXTS), ("test", TEXTS[::5])):
        lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts)
        (path / f"{split}.jsonl").write_text(lines)
    return path


def all_text(dataset):
    return dataset.gather(range(len(dataset)))


def test_hf_streamed_and_cached_sequences_are_equal(folder):
    options = {"path": str(folder), "validation_split": "test", **DATA_OPTIONS}
    cached = prepare_splits(HFDatasetData(**options), 300, 0)
    streamed_splits = prepare_splits(HFDatasetData(**options, streaming=True), 300, 0)
    assert not cached.train.streamed
    assert streamed_splits.train.streamed
    assert len(streamed_splits.train) == sys.maxsize
    assert cached.tokenizer.read_text() == streamed_splits.tokenizer.read_text()
    expected = all_text(cached.train)
    np.testing.assert_array_equal(streamed_splits.train.gather(range(len(expected))), expected)
    np.testing.assert_array_equal(all_text(cached.validation), all_text(streamed_splits.validation))


def test_hf_reads_parquet_folders_and_slices(folder, tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(tmp_path / "pq" / "train.parquet")
    splits = prepare_splits(HFDatasetData(path=str(tmp_path / "pq"), **DATA_OPTIONS), 300, 0)
    jsonl = prepare_splits(HFDatasetData(path=str(folder), **DATA_OPTIONS), 300, 0)
    np.testing.assert_array_equal(all_text(splits.train), all_text(jsonl.train))
    sliced_splits = prepare_splits(
        HFDatasetData(
            path=str(folder), split="train[:75%]", validation_split="train[75%:]", **DATA_OPTIONS
        ),
        300,
        0,
    )
    assert len(sliced_splits.validation) < len(sliced_splits.train) < len(splits.train)


@pytest.mark.parametrize("streaming", [False, True])
def test_hf_reads_saved_datasets(folder, tmp_path, streaming):
    saved_dataset = datasets.Dataset.from_dict({"text": TEXTS})
    saved_dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved_dataset, "held": saved_dataset}).save_to_disk(
        tmp_path / "both"
    )
    options = {"streaming": streaming, **DATA_OPTIONS}
    dataset = prepare_splits(HFDatasetData(path=str(tmp_path / "one"), **options), 300, 0).train
    data = HFDatasetData(path=str(tmp_path / "both"), validation_split="held", **options)
    splits = prepare_splits(data, 300, 0)
    np.testing.assert_array_equal(dataset.gather(range(40)), splits.train.gather(range(40)))
    np.testing.assert_array_equal(splits.validation.gather([3]), splits.train.gather([0, 3])[1:])


def test_hf_stream_resumes_and_is_split_by_rank(folder):
    def batches(**split_options):
        dataset = prepare_splits(
            HFDatasetData(path=str(folder), streaming=True, **DATA_OPTIONS), 300, 0
        ).train
        start = split_options.pop("start", 0)
        loader = TrainLoader(
            dataset, BatchShare(4, 2, **split_options), seed=0, steps=6, start=start
        )
        return [batch["inputs"].numpy() for batch in loader]

    splits = batches()
    np.testing.assert_array_equal(batches(start=5), splits[5:])
    ranks = [batches(rank=rank, ranks=2) for rank in range(2)]
    np.testing.assert_array_equal(list(itertools.chain(*zip(*ranks, strict=True))), splits)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_hf_reads_arrow_string_types_and_nulls(tmp_path, streaming, kind, capfd):
    text_files.warn_once.cache_clear()
    types = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    column = pyarrow.array([*TEXTS, None]).cast(types.get(kind) or getattr(pyarrow, kind)())
    (tmp_path / "pq").mkdir()
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "pq" / "train.parquet")
    data = HFDatasetData(path=str(tmp_path / "pq"), streaming=streaming, **DATA_OPTIONS)
    expected = prepare_splits(
        HFDatasetData(path=str(tmp_path / "pq"), **DATA_OPTIONS), 300, 0
    ).train
    dataset = prepare_splits(data, 300, 0).train
    np.testing.assert_array_equal(dataset.gather(range(9)), expected.gather(range(9)))
    note = f"skipped 1 record of {tmp_path / 'pq'} without text (null), first: "
    assert note + f"{tmp_path / 'pq'} train row {len(TEXTS) + 1}\n" in capfd.readouterr().err


def test_hf_column_of_another_type_is_rejected(tmp_path):
    table = {"id": [1], "parts": [["a"]], "raw": [b"a"], "text": ["a"]}
    (tmp_path / "pq").mkdir()
    parquet.write_table(pyarrow.table(table), tmp_path / "pq" / "train.parquet")
    for field, kind in (("id", "int"), ("parts", "list"), ("raw", "bytes")):
        match = (
            rf"data\.field={field}: row 1 of .* has {kind} in it, not text; its columns: id, parts"
        )
        with pytest.raises(DataError, match=match):
            prepare_splits(
                HFDatasetData(path=str(tmp_path / "pq"), field=field, **DATA_OPTIONS), 300, 0
            )


def test_hf_stream_repeats_and_rewinds():
    epoch_starts = []

    def start():
        epoch_starts.append(1)
        yield from (np.arange(3), np.arange(3, 12))

    dataset = StreamedDataset(start, 4)
    assert dataset.gather([0, 1, 1])[:, 0].tolist() == [0, 4, 4]
    assert len(epoch_starts) == 1
    assert dataset.gather([2, 5])[:, 0].tolist() == [0, 4]
    assert dataset.gather([0])[0].tolist() == [0, 1, 2, 3, 4]
    assert len(epoch_starts) == 3


def test_hf_uses_a_given_tokenizer(folder, tmp_path):
    tokenizer = train_tokenizer(TokenizerSource(320), lambda: iter(TEXTS))
    tokenizer.save(str(tmp_path / "own.json"))
    data = HFDatasetData(path=str(folder), tokenizer=str(tmp_path / "own.json"), sequence=8)
    sequence = prepare_splits(data, 400, 0).train.gather([0])[0]
    assert sequence.tolist() == [*tokenizer.encode(TEXTS[0]).ids, 0][:9]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("match", "options"),
    [
        (
            r"data\.field=body: .* has no such column; its columns: text, id; set another",
            {"field": "body"},
        ),
        (r"data\.field=id: .* has int in it, not text", {"field": "id"}),
        (r"data\.path=.*: split 'none' cannot be read: .*; check data\.path", {"split": "none"}),
        (r"data\.sequence=99999: the .*split.* sequence", {"sequence": 99_999}),
        (r"data\.vocabulary=301: has ids up to 300", {"vocabulary": 301}),
    ],
)
def test_hf_rejects_invalid_settings(folder, match, options, streaming):
    data = HFDatasetData(**{"path": str(folder), "streaming": streaming, **DATA_OPTIONS, **options})
    with pytest.raises(DataError, match=match):
        prepare_splits(data, 300, 0)


def test_hf_unavailable_dataset_is_rejected(tmp_path):
    with pytest.raises(DataError, match=r"data\.path='': is empty"):
        prepare_splits(HFDatasetData(), 4096, 0)
    with pytest.raises(DataError, match=r"data\.path=nobody/nothing: split 'train' cannot be read"):
        prepare_splits(HFDatasetData(path="nobody/nothing"), 4096, 0)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "one")
    with pytest.raises(DataError, match="contains one saved dataset, whose split is train"):
        prepare_splits(HFDatasetData(path=str(tmp_path / "one"), split="text"), 4096, 0)


def test_hf_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'scalewise\[hf\]'"):
        prepare_splits(HFDatasetData(path="a/b"), 4096, 0)
