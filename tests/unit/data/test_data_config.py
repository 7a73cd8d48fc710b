"""Data configs: validation without reading files, YAML, no torch import."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from scalewise.config.schemas import schema_mirror
from scalewise.data.chat import CaptionData, ChatData, LabeledText, PreferenceData, Seq2SeqData
from scalewise.data.datasets import PackedDataset
from scalewise.data.mixture import MixtureData
from scalewise.data.prepare import prepare_splits
from scalewise.data.stdlib_corpus import StdlibCorpus, StdlibCorpusClasses, StdlibCorpusPairs
from scalewise.data.synthetic import DigitReversal, RandomTokens, SyntheticShapes
from scalewise.data.text import HFDatasetData, PretokenizedData, TextData
from scalewise.data.tokenized_cache import held_out_names
from scalewise.data.user_datamodule import UserDataModule
from scalewise.errors import DataError
from scalewise.registry import target_name

CONF = Path(__file__).parents[3] / "conf" / "data"
SPECS = {
    "captions": CaptionData,
    "chat": ChatData,
    "corpus": StdlibCorpus,
    "corpus_classes": StdlibCorpusClasses,
    "corpus_pairs": StdlibCorpusPairs,
    "labelled": LabeledText,
    "mixture": MixtureData,
    "text": TextData,
    "tokens": PretokenizedData,
    "hf": HFDatasetData,
    "module": UserDataModule,
    "preference": PreferenceData,
    "reversal": DigitReversal,
    "seq2seq": Seq2SeqData,
    "shapes": SyntheticShapes,
    "synthetic": RandomTokens,
}


def messages_of(data):
    return [str(issue) for issue in data.validate()]


@pytest.mark.parametrize("name", SPECS)
def test_data_yaml_matches_its_config(name):
    body = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert body.pop("defaults") == [f"/schema/data/{name}@_here_", "_self_"]
    values = OmegaConf.to_container(
        OmegaConf.merge(OmegaConf.structured(schema_mirror(SPECS[name])), body)
    )
    assert values.pop("_target_") == target_name(SPECS[name])
    assert set(values) == {field.name for field in dataclasses.fields(SPECS[name])}
    assert (CONF / f"{name}.yaml").read_text().startswith("# ")


def test_data_configs_all_have_a_yaml():
    assert {path.stem for path in CONF.glob("*.yaml")} == set(SPECS)


def test_data_preparation_imports_no_torch(tmp_path):
    code = (
        "import sys, scalewise.data.chat, scalewise.data.stdlib_corpus, scalewise.data.text\n"
        "import scalewise.data.synthetic, scalewise.data.user_datamodule\n"
        "from scalewise.data.prepare import prepare_splits\n"
        "heavy = {'torch', 'tokenizers', 'transformers', 'datasets', 'pyarrow', 'numpy'}\n"
        "assert not heavy & set(sys.modules)\n"
        "corpus = scalewise.data.stdlib_corpus.StdlibCorpus\n"
        "prepare_splits(corpus(vocabulary=300, megabytes=0.1, sequence=8), 300, 0)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "SCALEWISE_CACHE": str(tmp_path)},
    )


@pytest.mark.parametrize(
    ("data", "overrides"),
    [
        (StdlibCorpus(sequence=0), "data.sequence=0: must be positive; set data.sequence=256"),
        (
            StdlibCorpus(megabytes=-1),
            "data.megabytes=-1: must be positive; set data.megabytes=8.0",
        ),
        (
            StdlibCorpus(vocabulary=256),
            "data.vocabulary=256: is too small: a byte-level tokenizer has 256 bytes and an "
            "end-of-text token; "
            "set data.vocabulary=257 or more",
        ),
        (TextData(), "data.paths=[]: is empty; set 'data.paths=[my/*.txt]'"),
        (
            TextData(paths=("nowhere/*.txt",)),
            "data.paths=nowhere/*.txt: no such file; set 'data.paths=[my/*.txt]'",
        ),
        (
            TextData(paths=(__file__,), validation_fraction=1),
            "data.validation_fraction=1: must be at least 0 and below 1; "
            "set data.validation_fraction=0.05",
        ),
        (
            TextData(paths=(__file__,), tokenizer="none.json"),
            "data.tokenizer=none.json: no such file; "
            "set data.tokenizer to the path of a tokenizer.json, "
            "or data.tokenizer=null to train one",
        ),
        (PretokenizedData(), "data.paths=[]: is empty; set 'data.paths=[my/*.bin]'"),
        (
            PretokenizedData(paths=(__file__,)),
            f"data.paths={__file__}: unknown suffix '.py'; use one of .bin .npy",
        ),
        (
            HFDatasetData(),
            "data.path='': is empty; set data.path=roneneldan/TinyStories, or a folder",
        ),
        (
            HFDatasetData(path="./nowhere"),
            "data.path=./nowhere: no such folder; set data.path to a folder or a Hub name",
        ),
        (
            HFDatasetData(path="a/b", split=""),
            "data.split='': is empty; set data.split=NAME",
        ),
        (RandomTokens(rows=0), "data.rows=0: must be positive; set data.rows=100000"),
        (
            RandomTokens(vocabulary=0),
            "data.vocabulary=0: must be positive; set data.vocabulary=null",
        ),
        (RandomTokens(masked=1.0), "data.masked=1.0: must be at least 0 and below 1"),
        (RandomTokens(masked=-0.1), "data.masked=-0.1: must be at least 0 and below 1"),
    ],
)
def test_data_issues_name_key_value_and_fix(data, overrides):
    assert messages_of(data) == [overrides]


def test_data_validation_shards_are_checked(tmp_path):
    np.zeros(9, dtype="<u2").tofile(tmp_path / "a.bin")
    data = PretokenizedData(paths=(f"{tmp_path}/*.bin",), validation_paths=("nowhere.bin",))
    expected = "data.validation_paths=nowhere.bin: no such file; "
    assert messages_of(data) == [expected + "set 'data.validation_paths=[held/*.bin]'"]


def test_valid_data_configs_have_no_issues(tmp_path):
    np.zeros(9, dtype="<u2").tofile(tmp_path / "a.bin")
    configs = (
        StdlibCorpus(),
        TextData(paths=(__file__,)),
        PretokenizedData(paths=(str(tmp_path / "a.bin"),)),
    )
    for data in (*configs, HFDatasetData(path="a/b"), RandomTokens()):
        assert messages_of(data) == [], data


def test_data_requires_a_vocabulary():
    assert StdlibCorpus().required_vocabulary == 4096
    assert TextData(vocabulary=300).required_vocabulary == 300
    assert HFDatasetData(vocabulary=300).required_vocabulary == 300
    assert RandomTokens(vocabulary=7).required_vocabulary == 7
    for data in (
        TextData(tokenizer="a"),
        HFDatasetData(tokenizer="a"),
        PretokenizedData(),
        RandomTokens(),
    ):
        assert data.required_vocabulary is None, data


def test_validation_split_is_stable_when_files_are_added():
    names = [f"file{index}" for index in range(1000)]
    validation_names = held_out_names(names, 0.05)
    assert 30 < len(validation_names) < 70
    assert held_out_names([*names, "another"], 0.05) - {"another"} == validation_names


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_validation_split_has_files_on_both_sides(fraction):
    assert len(held_out_names(["a", "b"], fraction)) == 1


def test_token_sequences_do_not_cross_shards():
    dataset = PackedDataset([np.arange(9), np.arange(3), np.arange(100, 109)], 4)
    assert len(dataset) == 4
    gathered_BS = dataset.gather([3, 0, 2])
    assert gathered_BS.dtype == np.int64
    assert gathered_BS[:, 0].tolist() == [104, 0, 100]
    assert gathered_BS[0].tolist() == [104, 105, 106, 107, 108]


def test_random_tokens_depend_on_seed_and_index():
    splits = prepare_splits(RandomTokens(sequence=8, rows=40, vocabulary=50), 64, 3)
    assert (len(splits.train), len(splits.validation)) == (40, 2)
    dataset = splits.train.gather([5, 0, 5])
    assert dataset.shape == (3, 9)
    np.testing.assert_array_equal(dataset[0], dataset[2])
    np.testing.assert_array_equal(splits.train.gather([5])[0], dataset[0])
    assert (dataset[0] != dataset[1]).any()
    other_seed_splits = prepare_splits(RandomTokens(sequence=8, rows=40, vocabulary=50), 64, 4)
    assert (other_seed_splits.train.gather([5])[0] != dataset[0]).any()
    counts_V = np.bincount(splits.train.gather(range(40)).ravel(), minlength=50)
    assert len(counts_V) == 50
    assert counts_V.min() > 0


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.9])
def test_random_tokens_mask_the_configured_fraction(fraction):
    unmasked = prepare_splits(RandomTokens(sequence=64, rows=200, vocabulary=50), 50, 3)
    masked = prepare_splits(
        RandomTokens(sequence=64, rows=200, vocabulary=50, masked=fraction), 50, 3
    )
    for unmasked_dataset, masked_dataset in (
        (unmasked.train, masked.train),
        (unmasked.validation, masked.validation),
    ):
        assert masked_dataset.masked == (fraction > 0), masked_dataset
        assert not unmasked_dataset.masked, masked_dataset
        tokens = masked_dataset.gather(range(len(masked_dataset)))
        np.testing.assert_array_equal(
            np.where(tokens < 0, ~tokens, tokens),
            unmasked_dataset.gather(range(len(unmasked_dataset))),
        )
        if masked_dataset is masked.train:
            assert (tokens < 0).mean() == pytest.approx(fraction, abs=0.02), masked_dataset


def test_random_tokens_reject_a_larger_vocabulary_than_the_model():
    assert prepare_splits(RandomTokens(sequence=64), 3, 0).train.gather(range(9)).max() == 2
    with pytest.raises(DataError, match=r"data\.vocabulary=9: has ids up to 8, but the model's"):
        prepare_splits(RandomTokens(vocabulary=9), 8, 0)
