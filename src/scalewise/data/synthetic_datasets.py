"""Datasets of random token ids, reversed digits and drawn shapes, as functions of a seed.

Shapes: B samples, S = sequence + 1 tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalewise.data.build_cache import build_cached
from scalewise.data.prepare import FIRST_TOKEN_OFFSET, NO_TOKEN, DataSplits, prepare_splits
from scalewise.data.synthetic import (
    CAPTION_PARTS,
    CAPTION_TOKENS,
    CAPTIONS,
    COLORS,
    DIGIT_VOCABULARY,
    SEPARATOR,
    SHAPES,
    WORDS,
    DigitReversal,
    RandomTokens,
    SyntheticShapes,
)
from scalewise.data.tokenizer import END_OF_TEXT
from scalewise.errors import DataError

MEAN_TEXT_TOKENS = 32
"""Mean length of a random text, in tokens."""
HELD_OUT_INTERVAL = 10
"""Number of distinct prompts or captions per held-out one."""


@prepare_splits.register(RandomTokens)
def _prepare_random_tokens(config: RandomTokens, vocabulary: int, seed: int) -> DataSplits:
    """Return samples that are a function of ``seed`` and their index."""
    vocabulary_size = config.vocabulary or vocabulary
    if vocabulary_size > vocabulary:
        reason = f"has ids up to {vocabulary_size - 1}, but the model's vocabulary is {vocabulary}"
        raise DataError.for_key(
            "data.vocabulary", vocabulary_size, reason, "set data.vocabulary=null"
        )
    held_out = max(1, config.rows // 20)
    options = (config.sequence, config.masked, config.pairs, config.packing, config.target_length)
    return DataSplits(
        RandomDataset(seed, vocabulary_size, 0, config.rows, *options),
        RandomDataset(seed, vocabulary_size, config.rows, held_out, *options),
    )


@dataclass(frozen=True)
class RandomDataset:
    """``num_samples`` samples of random ids, from index ``first`` of an endless keyed table.

    A sample of ``pairs`` consists of two sequences of the table. With ``packing``, a text begins at
    each token with probability 1 / ``MEAN_TEXT_TOKENS``. With a ``target_length``, the masked
    fraction of the encoder's tokens is missing.
    """

    seed: int
    """Key of the table."""
    vocabulary: int
    """Number of distinct ids."""
    first: int
    """Index of the first sample in the table."""
    num_samples: int
    """Number of samples."""
    sequence: int
    """Sequence length, in tokens."""
    masked_fraction: float = 0.0
    """Fraction of the tokens without a label."""
    pairs: bool = False
    """Whether a sample consists of two sequences."""
    packing: bool = False
    """Whether a sequence contains several texts."""
    target_length: int = 0
    """Number of decoder tokens at the end of a sample."""
    streamed: bool = False
    """Whether indices must be read in increasing order."""

    @property
    def masked(self) -> bool:
        """Whether some tokens have no label."""
        return self.masked_fraction > 0 or self.packing or self.target_length > 0

    def __len__(self) -> int:
        return self.num_samples

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``: a hash of (seed, sample, position), modulo the vocabulary."""
        if self.pairs:
            index_B2 = 2 * np.asarray(indices)[:, None] + np.arange(2)
            single = replace(self, pairs=False, first=2 * self.first)
            return single.gather(index_B2.flatten()).reshape(*index_B2.shape, -1)
        width = self.sequence + 1
        index_B = np.asarray(indices, dtype=np.int64) + self.first
        position_BS = (index_B[:, None] * width + np.arange(width)).astype(np.uint64)
        key = splitmix64(np.array([self.seed], dtype=np.uint64))
        hash_BS = splitmix64(position_BS + key)
        tokens_BS = (hash_BS % np.uint64(self.vocabulary)).astype(np.int64)
        if self.masked:
            uniform_BS = splitmix64(hash_BS).astype(np.float64) / 2.0**64
            tokens_BS = np.where(uniform_BS < self.masked_fraction, ~tokens_BS, tokens_BS)
        if self.target_length:
            tokens_BS = tokens_BS[:, 1:]
            source_BS = tokens_BS[:, : -self.target_length]
            source_BS[:] = np.where(source_BS < 0, NO_TOKEN, ~source_BS)
        if self.packing:
            first_BS = splitmix64(~hash_BS) % np.uint64(MEAN_TEXT_TOKENS) == 0
            token_BS = np.where(tokens_BS < 0, ~tokens_BS, tokens_BS)
            tokens_BS = np.where(first_BS, ~(token_BS + FIRST_TOKEN_OFFSET), tokens_BS)
        return tokens_BS


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the SplitMix64 hash of each element (Steele, Lea and Flood, 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@prepare_splits.register(DigitReversal)
def _prepare_digit_reversal(config: DigitReversal, vocabulary: int, seed: int) -> DataSplits:
    """Return distinct random prompts."""
    if vocabulary < DIGIT_VOCABULARY:
        reason, fix = (
            f"is below the {DIGIT_VOCABULARY} token ids of the data",
            f"set model.vocabulary={DIGIT_VOCABULARY}",
        )
        raise DataError.for_key("model.vocabulary", vocabulary, reason, fix)
    digits_ND = RandomDataset(seed, 10, 0, config.rows, config.answer_length - 1).gather(
        range(config.rows)
    )
    _, first_indices = np.unique(digits_ND, axis=0, return_index=True)
    distinct_ND = digits_ND[np.sort(first_indices)]
    held_out = max(1, len(distinct_ND) // HELD_OUT_INTERVAL)
    if held_out == len(distinct_ND):
        reason = "leaves no training data next to the held-out prompts"
        raise DataError.for_key("data.rows", config.rows, reason, "increase data.rows")
    return DataSplits(
        DigitReversalDataset(distinct_ND[held_out:]),
        DigitReversalDataset(distinct_ND[:held_out]),
    )


@dataclass(frozen=True, eq=False)
class DigitReversalDataset:
    """Sequences of ``digits_ND``, a separator, and the reversed digits."""

    digits: NDArray[np.int64]

    streamed = False
    masked = True
    packing = False
    target_length = 0

    def __len__(self) -> int:
        return len(self.digits)

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``; prompts have no labels."""
        digits_BD = self.digits[np.asarray(indices, dtype=np.int64)]
        separator_B1 = np.full((len(digits_BD), 1), ~SEPARATOR)
        return np.concatenate([~digits_BD, separator_B1, digits_BD[:, ::-1]], axis=1)


@prepare_splits.register(SyntheticShapes)
def _prepare_shapes(config: SyntheticShapes, vocabulary: int, seed: int) -> DataSplits:
    """Return images that are a function of ``seed`` and their index."""
    if vocabulary < len(WORDS):
        reason = f"is below the {len(WORDS)} token ids of the data"
        fix = "use a model with a larger vocabulary"
        raise DataError.for_key("model.vocabulary", vocabulary, reason, fix)
    captions_NP = np.array(CAPTIONS)[np.random.default_rng(seed).permutation(len(CAPTIONS))]
    held_out = len(CAPTIONS) // HELD_OUT_INTERVAL
    tokenizer_path = build_cached("shapes", {"words": WORDS}, _write_tokenizer) / "tokenizer.json"
    size = (config.sequence, config.image_size)
    return DataSplits(
        ShapeDataset(captions_NP[held_out:], seed, 0, config.rows, *size),
        ShapeDataset(captions_NP[:held_out], seed, config.rows, max(1, config.rows // 10), *size),
        tokenizer_path,
    )


def _write_tokenizer(folder: Path) -> None:
    """Write a word-level tokenizer."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass(frozen=True, eq=False)
class ShapeDataset:
    """``num_samples`` images, from index ``first`` of an endless table with key ``seed``."""

    captions: NDArray[np.int64]
    """``captions_NP``, word indices of the captions to sample from."""
    seed: int
    """Key of the table."""
    first: int
    """Index of the first image in the table."""
    num_samples: int
    """Number of images."""
    sequence: int
    """Caption length, in tokens."""
    image_size: int
    """Image side, in pixels."""

    streamed = False
    masked = True
    packing = False

    @property
    def target_length(self) -> int:
        """Number of tokens of a caption; the decoder generates all of them."""
        return self.sequence

    def __len__(self) -> int:
        return self.num_samples

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BT``: captions with an end token, padded with ids without a label."""
        tokens_BT = np.full((len(indices), self.sequence), ~0, dtype=np.int64)
        starts_P = 2 + np.cumsum([0, *map(len, CAPTION_PARTS[:-1])])
        for tokens_T, index in zip(tokens_BT, indices, strict=True):
            caption_P, _ = self._sample_caption(int(index))
            tokens_T[:CAPTION_TOKENS] = [1, *(starts_P + caption_P), 0]
        return tokens_BT

    def gather_pixels(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return ``pixels_BCHW``: a bright shape on dark noise, within its ninth of the image."""
        return np.stack([self._draw_image(*self._sample_caption(int(index))) for index in indices])

    def _sample_caption(self, index: int) -> tuple[NDArray[np.int64], np.random.Generator]:
        """Return the caption of an image, and the random generator for its other properties."""
        generator = np.random.default_rng((self.seed, self.first + index))
        return self.captions[generator.integers(len(self.captions))], generator

    def _draw_image(
        self, caption_P: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.uint8]:
        size, color, shape, *cell = (int(number) for number in caption_P)
        side = self.image_size
        radius = side * (0.16 if size else 0.09)
        center = (np.array(cell) + 0.5) * side / 3 + generator.uniform(-0.02, 0.02, 2) * side
        y_HW, x_HW = np.abs(np.indices((side, side)) + 0.5 - center[:, None, None])
        distance_HW = np.maximum(y_HW, x_HW)
        inside_HW = distance_HW <= radius
        if SHAPES[shape] == "cross":
            inside_HW &= np.minimum(y_HW, x_HW) <= radius / 3
        if SHAPES[shape] == "ring":
            inside_HW &= distance_HW > radius / 2
        pixels_CHW = generator.integers(0, 60, (3, side, side))
        bright_C = np.array([*COLORS.values()][color], dtype=bool)
        pixels_CHW[bright_C[:, None, None] & inside_HW] = generator.integers(160, 256)
        return pixels_CHW.astype(np.uint8)
