"""Synthetic images of one shape each, with verifiable captions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.tokenization import END_OF_TEXT
from scalewise.errors import ConfigIssue, DataError
from scalewise.registry import register_option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SIZES = ("small", "large")
COLORS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "pink": (1, 0, 1),
    "white": (1, 1, 1),
}
"""Colors of a shape, with the RGB channels in which it is bright."""
SHAPES = ("square", "cross", "ring")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
CAPTION_PARTS: tuple[Collection[str], ...] = (SIZES, COLORS, SHAPES, ROWS, COLUMNS)
CAPTIONS = tuple(product(*(range(len(part)) for part in CAPTION_PARTS)))
"""All captions, as the indices of their words in each part."""
WORDS = (END_OF_TEXT, "a", *(word for part in CAPTION_PARTS for word in part))
CAPTION_TOKENS = len(CAPTION_PARTS) + 2
"""Number of tokens of a caption, with the leading ``a`` and the end token."""
HELD_OUT_INTERVAL = 10
"""Number of captions per held-out caption, all of whose images are held out."""
MIN_IMAGE_SIZE = 24
"""Smallest image side at which all shapes can be distinguished, in pixels."""


@register_option("data", "shapes")
@dataclass(frozen=True)
class SyntheticShapes(DataConfig):
    """Drawn images with captions such as ``a small red square top left``.

    Held-out captions are never trained on.
    """

    sequence: int = CAPTION_TOKENS
    """Caption length with its end token, in tokens."""
    image_size: int = 32
    """Image side, in pixels."""
    rows: int = 10_000
    """Number of images per epoch, in samples; 10 % more are held out."""

    @property
    def required_vocabulary(self) -> int:
        """Number of words and the end token."""
        return len(WORDS)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield too small captions or images."""
        yield from self.non_positive_issues("rows")
        for key, minimum in (("sequence", CAPTION_TOKENS), ("image_size", MIN_IMAGE_SIZE)):
            if (value := getattr(self, key)) < minimum:
                reason = f"is below {minimum}, the minimum for a caption or an image"
                yield ConfigIssue(f"data.{key}", value, reason, f"set data.{key}={minimum}")

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Return images that are a function of ``seed`` and their index."""
        import numpy as np

        from scalewise.data.build_cache import build_cached

        if vocabulary < len(WORDS):
            reason = f"is below the {len(WORDS)} token ids of the data"
            fix = "use a model with a larger vocabulary"
            raise DataError.for_key("model.vocabulary", vocabulary, reason, fix)
        captions_NP = np.array(CAPTIONS)[np.random.default_rng(seed).permutation(len(CAPTIONS))]
        held_out = len(CAPTIONS) // HELD_OUT_INTERVAL
        tokenizer_path = (
            build_cached("shapes", {"words": WORDS}, _write_tokenizer) / "tokenizer.json"
        )
        size = (self.sequence, self.image_size)
        return DataSplits(
            ShapeDataset(captions_NP[held_out:], seed, 0, self.rows, *size),
            ShapeDataset(captions_NP[:held_out], seed, self.rows, max(1, self.rows // 10), *size),
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
        import numpy as np

        tokens_BT = np.full((len(indices), self.sequence), ~0, dtype=np.int64)
        starts_P = 2 + np.cumsum([0, *map(len, CAPTION_PARTS[:-1])])
        for tokens_T, index in zip(tokens_BT, indices, strict=True):
            caption_P, _ = self._sample_caption(int(index))
            tokens_T[:CAPTION_TOKENS] = [1, *(starts_P + caption_P), 0]
        return tokens_BT

    def gather_pixels(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return ``pixels_BCHW``: a bright shape on dark noise, within its ninth of the image."""
        import numpy as np

        return np.stack([self._draw_image(*self._sample_caption(int(index))) for index in indices])

    def _sample_caption(self, index: int) -> tuple[NDArray[np.int64], np.random.Generator]:
        """Return the caption of an image, and the random generator for its other properties."""
        import numpy as np

        generator = np.random.default_rng((self.seed, self.first + index))
        return self.captions[generator.integers(len(self.captions))], generator

    def _draw_image(
        self, caption_P: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.uint8]:
        import numpy as np

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
