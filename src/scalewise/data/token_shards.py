"""Flat files of token ids: memory-mapped, scanned once for their range, packed into sequences."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalewise import regular_files
from scalewise.data.build_cache import build_cached
from scalewise.data.compressed_files import check_pointer
from scalewise.data.datasets import PackedDataset
from scalewise.data.input_files import file_suffix, match_paths
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.text import PretokenizedData
from scalewise.data.tokenized_cache import too_short_error
from scalewise.errors import DataError

SCAN_TOKENS = 16 * 2**20
"""Number of ids that are scanned at once; bounds memory."""
NPY_MAGIC = b"\x93NUMPY"
"""First bytes of an .npy file."""


@dataclass(frozen=True)
class TokenShards:
    """Shards of token ids that glob patterns match."""

    key: str
    """Option that an error names."""
    paths: Sequence[str]
    """Glob patterns."""
    dtype: str
    """Integer type of .bin files."""

    def load_packed(self, sequence: int, vocabulary: int, split: str) -> PackedDataset:
        """Return packed sequences; raises ``DataError`` for invalid shards."""
        files = match_paths(self.paths)
        shards = [_open_shard(self.key, file, self.dtype) for file in files]
        for file, (low, high) in zip(files, _id_ranges(files, shards), strict=True):
            if low < 0 or high >= vocabulary:
                reason = f"has token id {min(low, high) if low < 0 else high}, outside the"
                reason += f" model's vocabulary of {vocabulary}"
                fix = f"set model.vocabulary={high + 1}, or the right data.dtype"
                raise DataError.for_key(self.key, file, reason, fix)
        dataset = PackedDataset(shards, sequence)
        if not len(dataset):
            raise too_short_error(split, max(map(len, shards)), sequence)
        return dataset


def _open_shard(key: str, path: Path, dtype: str) -> NDArray[np.integer]:
    """Return the ids of a shard as a memory map; raises ``DataError`` if it is invalid."""
    size = path.stat().st_size
    with regular_files.open_binary(path) as file:
        is_npy = file.read(len(NPY_MAGIC)) == NPY_MAGIC
    check_pointer(key, path)
    if is_npy or file_suffix(path) == ".npy":
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy raises many classes for a damaged header
            detail = " ".join(str(error).split())[:120] or type(error).__name__
            reason = f"is not a complete .npy file ({detail})"
            raise DataError.for_key(key, path, reason, "copy the file again") from error
        if not isinstance(ids, np.ndarray):
            reason = "is an .npz archive with the suffix .npy"
            raise DataError.for_key(key, path, reason, "save the flat ids with numpy.save")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            reason = f"contains {ids.dtype} of shape {ids.shape}, not a 1-D array of integers"
            raise DataError.for_key(key, path, reason, "save the flat ids")
    else:
        width = np.dtype(dtype).itemsize
        if size % width:
            reason = f"has {size} bytes, not a multiple of {width} ({dtype}): the file is truncated"
            raise DataError.for_key(key, path, reason, "copy the file again, or correct data.dtype")
        ids = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r") if size else ()
    if not len(ids):
        raise DataError.for_key(key, path, "has no tokens", "omit the file")
    return np.asarray(ids)


def _id_ranges(files: list[Path], shards: list[NDArray[np.integer]]) -> list[tuple[int, int]]:
    """Return the smallest and largest id of each shard, cached while the files stay the same."""
    stats = [(str(file.absolute()), file.stat()) for file in files]
    key = {
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "types": [shard.dtype.str for shard in shards],
    }

    def scan(folder: Path) -> None:
        ranges = [_id_range(shard) for shard in shards]
        (folder / "extremes.json").write_text(json.dumps(ranges), encoding="utf-8")

    folder = build_cached("scan", key, scan)
    return [(low, high) for low, high in json.loads((folder / "extremes.json").read_text())]


def _id_range(shard: NDArray[np.integer]) -> tuple[int, int]:
    chunks = [shard[start : start + SCAN_TOKENS] for start in range(0, len(shard), SCAN_TOKENS)]
    return min(int(c.min()) for c in chunks), max(int(c.max()) for c in chunks)


@prepare_splits.register(PretokenizedData)
def _prepare_token_shards(config: PretokenizedData, vocabulary: int, seed: int) -> DataSplits:
    """Return packed sequences; the first call reads every id to find the largest."""
    if issues := list(config.validate()):
        raise DataError(issues)
    dtype, length, validation_paths = config.dtype.value, config.sequence, config.validation_paths
    train = TokenShards("data.paths", config.paths, dtype).load_packed(length, vocabulary, "train")
    if not validation_paths:
        return DataSplits(train, None)
    shards = TokenShards("data.validation_paths", validation_paths, dtype)
    return DataSplits(train, shards.load_packed(length, vocabulary, "validation"))
