"""Token id shards: dtypes and rejections."""

import numpy as np
import pytest

from scalewise.data import token_shards
from scalewise.data.prepare import prepare_splits
from scalewise.data.text import PretokenizedData, TokenDtype
from scalewise.errors import DataError


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def test_token_shards_of_every_type_are_read(tmp_path):
    np.arange(9, dtype="<u2").tofile(tmp_path / "a.bin")
    np.arange(100, 109, dtype="<u2").tofile(tmp_path / "b.bin")
    np.save(tmp_path / "held.npy", np.arange(200, 205, dtype=np.int32))
    data = PretokenizedData(4, (f"{tmp_path}/*.bin",), (f"{tmp_path}/held.npy",))
    splits = prepare_splits(data, 300, 0)
    assert splits.train.gather(range(4))[:, 0].tolist() == [0, 4, 100, 104]
    assert splits.validation.gather([0]).tolist() == [[200, 201, 202, 203, 204]]
    assert splits.tokenizer is None


def test_token_shards_of_four_bytes_are_read(tmp_path):
    (np.arange(9, dtype="<u4") + 70_000).tofile(tmp_path / "a.bin")
    data = PretokenizedData(8, (f"{tmp_path}/a.bin",), dtype=TokenDtype.uint32)
    assert prepare_splits(data, 80_000, 0).train.gather([0])[0, 0] == 70_000


def test_token_ids_are_checked_once(tmp_path, monkeypatch):
    np.arange(99, dtype="<u2").tofile(tmp_path / "a.bin")
    scanned = []
    original = token_shards._id_range
    monkeypatch.setattr(token_shards, "SCAN_TOKENS", 10)
    monkeypatch.setattr(token_shards, "_id_range", lambda s: scanned.append(len(s)) or original(s))
    data = PretokenizedData(4, (f"{tmp_path}/a.bin",))
    prepare_splits(data, 99, 0)
    prepare_splits(data, 99, 0)
    with pytest.raises(DataError, match=r"a\.bin: has token id 98, outside the model's"):
        prepare_splits(data, 98, 0)
    assert scanned == [99]


def rejection_message(path, match, **options):
    with pytest.raises(DataError, match=match) as excinfo:
        prepare_splits(PretokenizedData(4, (str(path),), **options), 64, 0)
    assert len(excinfo.value.issues) == 1


def test_token_id_outside_the_vocabulary_is_rejected(tmp_path):
    np.array([1, 2, 3, 64, 5], dtype="<u2").tofile(tmp_path / "a.bin")
    match = r"data\.paths=.*a\.bin: has token id 64, outside the model's vocabulary of 64; set "
    rejection_message(tmp_path / "a.bin", match + r"model\.vocabulary=65, or the right data\.dtype")


def test_negative_token_id_is_rejected(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, -7, 3, 4, 5]))
    rejection_message(tmp_path / "a.npy", "has token id -7, outside")


def test_shard_truncated_within_an_id_is_rejected(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x" * 21)
    match = (
        r"data\.paths=.*a\.bin: has 21 bytes, not a multiple of 2 .uint16.: the file is truncated"
    )
    rejection_message(tmp_path / "a.bin", match)


def test_truncated_npy_is_rejected(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(50))
    path.write_bytes(path.read_bytes()[:-1])
    rejection_message(path, r"a\.npy: is not a complete \.npy file .*; copy the file again")


@pytest.mark.parametrize("content", [b"", b"not numpy at all"])
def test_invalid_npy_is_rejected(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    rejection_message(tmp_path / "a.npy", r"a\.npy: is not a complete \.npy file")


@pytest.mark.parametrize("array", [np.zeros((3, 3), dtype=np.int64), np.zeros(9)])
def test_npy_of_another_dtype_is_rejected(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    rejection_message(tmp_path / "a.npy", "not a 1-D array of integers; save the flat ids")


@pytest.mark.parametrize("name", ["a.bin", "a.npy"])
def test_empty_shard_is_rejected(tmp_path, name):
    if name == "a.npy":
        np.save(tmp_path / name, np.zeros(0, dtype=np.int64))
    else:
        (tmp_path / name).touch()
    rejection_message(tmp_path / name, r"data\.paths=.*: has no tokens; omit the file")


def test_shard_shorter_than_a_sequence_is_rejected(tmp_path):
    np.zeros(4, dtype="<u2").tofile(tmp_path / "a.bin")
    match = r"data\.sequence=4: the train split has 4 tokens, fewer than the 5 of one sequence"
    rejection_message(tmp_path / "a.bin", match)


def test_missing_shard_is_rejected(tmp_path):
    rejection_message(tmp_path / "a.bin", r"data\.paths=.*a\.bin: no such file; set 'data\.paths")
