"""Pictures of one shape each, with captions: nothing is read, and every caption can be checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise.config.registry import register_option
from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.tokenization import END_OF_TEXT
from scalewise.errors import ConfigIssue, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SIZES = ("small", "large")
COLOURS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "pink": (1, 0, 1),
    "white": (1, 1, 1),
}
"""Those of a shape, with the channels of these in which it is bright."""
SHAPES = ("square", "cross", "ring")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
PARTS: tuple[Collection[str], ...] = (SIZES, COLOURS, SHAPES, ROWS, COLUMNS)
CAPTIONS = tuple(product(*(range(len(part)) for part in PARTS)))
"""Every caption, by the number of its word in each part."""
WORDS = (END_OF_TEXT, "a", *(word for part in PARTS for word in part))
TOKENS = len(PARTS) + 2
"""Tokens of a caption with the ``a`` before it and the end behind it."""
HELD_OUT = 10
"""One caption of so many is held out, with all pictures of it."""
SMALLEST = 24
"""Pixels of the side of a picture in which all shapes can be told apart."""


@register_option("data", "shapes")
@dataclass(frozen=True)
class SyntheticShapes(DataConfig):
    """Drawn images with captions such as ``a small red square top left``.

    Held-out captions are never trained on.
    """

    sequence: int = TOKENS
    """Caption length with its end token, in tokens."""
    image_size: int = 32
    """Image side, in pixels."""
    rows: int = 10_000
    """Number of images per epoch, in samples; 10 % more are held out."""

    @property
    def required_vocabulary(self) -> int:
        """Returns the words and the end."""
        return len(WORDS)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields captions or pictures that are too small."""
        yield from self.non_positive_issues("rows")
        for key, least in (("sequence", TOKENS), ("image_size", SMALLEST)):
            if (value := getattr(self, key)) < least:
                reason = f"is below {least}, what a caption or a picture needs"
                yield ConfigIssue(f"data.{key}", value, reason, f"set data.{key}={least}")

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Returns pictures that are a function of ``seed`` and their index."""
        import numpy as np

        from scalewise.data.build_cache import build_cached

        if vocabulary < len(WORDS):
            reason, fix = f"needs {len(WORDS)} token ids", "give a model of as many"
            raise DataError.for_key("model.vocabulary", vocabulary, reason, fix)
        captions_NP = np.array(CAPTIONS)[np.random.default_rng(seed).permutation(len(CAPTIONS))]
        held = len(CAPTIONS) // HELD_OUT
        kept = build_cached("shapes", {"words": WORDS}, _write_tokenizer) / "tokenizer.json"
        size = (self.sequence, self.image_size)
        return DataSplits(
            ShapeDataset(captions_NP[held:], seed, 0, self.rows, *size),
            ShapeDataset(captions_NP[:held], seed, self.rows, max(1, self.rows // 10), *size),
            kept,
        )


def _write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer of whole words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    known = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(known, END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass(frozen=True, eq=False)
class ShapeDataset:
    """``rows`` pictures, those from ``first`` of an endless table keyed by ``seed``.

    Each is of one of ``captions_NP``, the numbers of its words, drawn anew.
    """

    captions: NDArray[np.int64]
    seed: int
    first: int
    rows: int
    sequence: int
    image_size: int

    streamed = False
    masked = True
    packing = False

    @property
    def target_length(self) -> int:
        """Returns the tokens of a row: a decoder writes all of them."""
        return self.sequence

    def __len__(self) -> int:
        return self.rows

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BT``: captions, each ended, and filled up with what is no label."""
        import numpy as np

        tokens_BT = np.full((len(indices), self.sequence), ~0, dtype=np.int64)
        starts_P = 2 + np.cumsum([0, *map(len, PARTS[:-1])])
        for tokens_T, index in zip(tokens_BT, indices, strict=True):
            caption_P, _ = self._sample_caption(int(index))
            tokens_T[:TOKENS] = [1, *(starts_P + caption_P), 0]
        return tokens_BT

    def gather_pixels(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns ``pixels_BCHW``: a bright shape on dark grain, somewhere in its ninth."""
        import numpy as np

        return np.stack([self._draw_image(*self._sample_caption(int(index))) for index in indices])

    def _sample_caption(self, index: int) -> tuple[NDArray[np.int64], np.random.Generator]:
        """Returns the caption of a picture, and what draws the rest of it."""
        import numpy as np

        drawn = np.random.default_rng((self.seed, self.first + index))
        return self.captions[drawn.integers(len(self.captions))], drawn

    def _draw_image(
        self, caption_P: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.uint8]:
        import numpy as np

        size, colour, shape, *place = (int(number) for number in caption_P)
        side = self.image_size
        radius = side * (0.16 if size else 0.09)
        centre = (np.array(place) + 0.5) * side / 3 + generator.uniform(-0.02, 0.02, 2) * side
        y_HW, x_HW = np.abs(np.indices((side, side)) + 0.5 - centre[:, None, None])
        far_HW = np.maximum(y_HW, x_HW)
        inside_HW = far_HW <= radius
        if SHAPES[shape] == "cross":
            inside_HW &= np.minimum(y_HW, x_HW) <= radius / 3
        if SHAPES[shape] == "ring":
            inside_HW &= far_HW > radius / 2
        pixels_CHW = generator.integers(0, 60, (3, side, side))
        bright_C = np.array([*COLOURS.values()][colour], dtype=bool)
        pixels_CHW[bright_C[:, None, None] & inside_HW] = generator.integers(160, 256)
        return pixels_CHW.astype(np.uint8)
