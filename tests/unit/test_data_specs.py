"""The data specs: what they refuse before reading, their YAML, and no torch."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from scalewise.config.registry import target
from scalewise.config.schema import twin
from scalewise.data.captions import Captions
from scalewise.data.chat import Chat
from scalewise.data.corpus import Corpus, held_out
from scalewise.data.corpus_classes import CorpusClasses
from scalewise.data.corpus_pairs import CorpusPairs
from scalewise.data.hf import HuggingFace
from scalewise.data.labelled import Labelled
from scalewise.data.module import UserData
from scalewise.data.preference import Preference
from scalewise.data.reversal import Reversal
from scalewise.data.rows import PackedRows
from scalewise.data.seq2seq import Seq2SeqData
from scalewise.data.shapes import Shapes
from scalewise.data.synthetic import Synthetic
from scalewise.data.text import Text
from scalewise.data.tokens import Tokens
from scalewise.errors import DataError

CONF = Path(__file__).parents[2] / "conf" / "data"
SPECS = {
    "captions": Captions,
    "chat": Chat,
    "corpus": Corpus,
    "corpus_classes": CorpusClasses,
    "corpus_pairs": CorpusPairs,
    "labelled": Labelled,
    "text": Text,
    "tokens": Tokens,
    "hf": HuggingFace,
    "module": UserData,
    "preference": Preference,
    "reversal": Reversal,
    "seq2seq": Seq2SeqData,
    "shapes": Shapes,
    "synthetic": Synthetic,
}


def said(data):
    return [str(complaint) for complaint in data.complaints()]


@pytest.mark.parametrize("name", SPECS)
def test_yaml_fits_the_spec(name):
    body = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert body.pop("defaults") == [f"/schema/data/{name}@_here_", "_self_"]
    values = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(twin(SPECS[name])), body))
    assert values.pop("_target_") == target(SPECS[name])
    assert set(values) == {field.name for field in dataclasses.fields(SPECS[name])}
    assert (CONF / f"{name}.yaml").read_text().startswith("# ")


def test_there_is_a_yaml_for_every_spec():
    assert {path.stem for path in CONF.glob("*.yaml")} == set(SPECS)


def test_preparing_imports_no_torch(tmp_path):
    code = (
        "import sys, scalewise.data.corpus, scalewise.data.text, scalewise.data.tokens\n"
        "import scalewise.data.hf, scalewise.data.synthetic\n"
        "assert not {'torch', 'tokenizers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "scalewise.data.corpus.Corpus(vocabulary=300, megabytes=0.1, sequence=8).prepare(300, 0)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "SCALEWISE_CACHE": str(tmp_path)},
    )


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (Corpus(sequence=0), "data.sequence=0: must be positive; give data.sequence=256"),
        (Corpus(megabytes=-1), "data.megabytes=-1: must be positive; give data.megabytes=8.0"),
        (
            Corpus(vocabulary=256),
            "data.vocabulary=256: a byte-level tokenizer has 256 bytes and an end-of-text token; "
            "give data.vocabulary=257 or more",
        ),
        (Text(), "data.paths=[]: is empty; give 'data.paths=[my/*.txt]'"),
        (
            Text(paths=("nowhere/*.txt",)),
            "data.paths=nowhere/*.txt: no such file; give 'data.paths=[my/*.txt]'",
        ),
        (
            Text(paths=(__file__,), validation_fraction=1),
            "data.validation_fraction=1: is a share of the text, from 0 to below 1; "
            "give data.validation_fraction=0.05",
        ),
        (
            Text(paths=(__file__,), tokenizer="none.json"),
            "data.tokenizer=none.json: no such file; "
            "give the path of a tokenizer.json, or data.tokenizer=null to train one",
        ),
        (Tokens(), "data.paths=[]: is empty; give 'data.paths=[my/*.bin]'"),
        (
            Tokens(paths=(__file__,)),
            f"data.paths={__file__}: unknown suffix '.py'; use one of .bin .npy",
        ),
        (
            HuggingFace(),
            "data.path='': is empty; give data.path=roneneldan/TinyStories, or a folder",
        ),
        (
            HuggingFace(path="./nowhere"),
            "data.path=./nowhere: no such folder; give a folder or a Hub name",
        ),
        (
            HuggingFace(path="a/b", split=""),
            "data.split='': is empty; give data.split=NAME",
        ),
        (Synthetic(rows=0), "data.rows=0: must be positive; give data.rows=100000"),
        (Synthetic(vocabulary=0), "data.vocabulary=0: must be positive; give data.vocabulary=null"),
        (Synthetic(masked=1.0), "data.masked=1.0: is a share, in [0, 1)"),
        (Synthetic(masked=-0.1), "data.masked=-0.1: is a share, in [0, 1)"),
    ],
)
def test_complaints_name_key_value_and_cure(data, line):
    assert said(data) == [line]


def test_held_out_shards_are_looked_for_too(tmp_path):
    np.zeros(9, dtype="<u2").tofile(tmp_path / "a.bin")
    data = Tokens(paths=(f"{tmp_path}/*.bin",), validation_paths=("nowhere.bin",))
    expected = "data.validation_paths=nowhere.bin: no such file; "
    assert said(data) == [expected + "give 'data.validation_paths=[held/*.bin]'"]


def test_sound_specs_have_no_complaint(tmp_path):
    np.zeros(9, dtype="<u2").tofile(tmp_path / "a.bin")
    good = (Corpus(), Text(paths=(__file__,)), Tokens(paths=(str(tmp_path / "a.bin"),)))
    for data in (*good, HuggingFace(path="a/b"), Synthetic()):
        assert said(data) == []


def test_vocabulary_needed():
    assert Corpus().vocabulary_needed == 4096
    assert Text(vocabulary=300).vocabulary_needed == 300
    assert HuggingFace(vocabulary=300).vocabulary_needed == 300
    assert Synthetic(vocabulary=7).vocabulary_needed == 7
    for data in (Text(tokenizer="a"), HuggingFace(tokenizer="a"), Tokens(), Synthetic()):
        assert data.vocabulary_needed is None


def test_held_out_names_stay_when_others_come():
    names = [f"file{index}" for index in range(1000)]
    held = held_out(names, 0.05)
    assert 30 < len(held) < 70
    assert held_out([*names, "another"], 0.05) - {"another"} == held


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_both_sides_get_a_file(fraction):
    assert len(held_out(["a", "b"], fraction)) == 1


def test_packed_rows_cross_no_shard():
    rows = PackedRows([np.arange(9), np.arange(3), np.arange(100, 109)], 4)
    assert len(rows) == 4
    gathered = rows.gather([3, 0, 2])
    assert gathered.dtype == np.int64
    assert gathered[:, 0].tolist() == [104, 0, 100]
    assert gathered[0].tolist() == [104, 105, 106, 107, 108]


def test_synthetic_rows_are_a_function_of_seed_and_index():
    splits = Synthetic(sequence=8, rows=40, vocabulary=50).prepare(64, 3)
    assert (len(splits.train), len(splits.validation)) == (40, 2)
    rows = splits.train.gather([5, 0, 5])
    assert rows.shape == (3, 9)
    np.testing.assert_array_equal(rows[0], rows[2])
    np.testing.assert_array_equal(splits.train.gather([5])[0], rows[0])
    assert (rows[0] != rows[1]).any()
    other = Synthetic(sequence=8, rows=40, vocabulary=50).prepare(64, 4)
    assert (other.train.gather([5])[0] != rows[0]).any()
    drawn = np.bincount(splits.train.gather(range(40)).ravel(), minlength=50)
    assert len(drawn) == 50
    assert drawn.min() > 0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_synthetic_masks_its_share_of_the_same_tokens(share):
    whole = Synthetic(sequence=64, rows=200, vocabulary=50).prepare(50, 3)
    masked = Synthetic(sequence=64, rows=200, vocabulary=50, masked=share).prepare(50, 3)
    for plain, some in ((whole.train, masked.train), (whole.validation, masked.validation)):
        assert some.masked == (share > 0)
        assert not plain.masked
        tokens = some.gather(range(len(some)))
        np.testing.assert_array_equal(
            np.where(tokens < 0, ~tokens, tokens), plain.gather(range(len(plain)))
        )
        if some is masked.train:
            assert (tokens < 0).mean() == pytest.approx(share, abs=0.02)


def test_synthetic_takes_the_models_vocabulary_and_refuses_a_larger_one():
    assert Synthetic(sequence=64).prepare(3, 0).train.gather(range(9)).max() == 2
    with pytest.raises(DataError, match=r"data\.vocabulary=9: makes ids up to 8, but the model's"):
        Synthetic(vocabulary=9).prepare(8, 0)
