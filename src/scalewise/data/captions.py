"""User-defined images with captions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from scalewise.data.base import DataSplits
from scalewise.data.chat import ChatData
from scalewise.data.chat_templates import ConversationTemplate, TextSegment
from scalewise.data.file_patterns import match_paths
from scalewise.errors import ConfigIssue, DataError
from scalewise.registry import register_option


@register_option("data", "captions")
@dataclass(frozen=True)
class CaptionData(ChatData):
    """Images with captions; a record names an image file next to it (.png, .jpg or .npy)."""

    sequence: int = 32
    """Caption length with its end token, in tokens; longer captions are truncated."""
    image_size: int = 224
    """Image side after resizing, in pixels; must be the model's."""
    picture: str = "image"
    """Key of the image file name in a record."""
    caption: str = "caption"
    """Key of the caption in a record."""

    kind: ClassVar[str] = "captions"
    record_description: ClassVar[str] = "image with a caption"
    record_fields: ClassVar[tuple[str, ...]] = ("image_size", "picture", "caption")

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an invalid image size, and the issues of ``ChatData``."""
        yield from super().validate()
        yield from self.non_positive_issues("image_size")
        if self.packing:
            reason = "is not supported with images: each caption has its own image"
            yield ConfigIssue("data.packing", True, reason, "set data.packing=false")

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Read images and captions into the cache, and return evenly spread splits."""
        from scalewise.data import caption_cache, content
        from scalewise.data.build_cache import build_cached

        if issues := list(self.validate()):
            raise DataError(issues)
        self.tokenizer_source.check_vocabulary(vocabulary)
        files = content.digests_by_content(match_paths(self.paths))
        identity = caption_cache.cache_identity(self, files)
        folder = build_cached(
            self.kind, identity, partial(caption_cache.write_records, self, list(files))
        )
        return caption_cache.load_splits(folder, self)

    def render_record(
        self, record: dict[str, Any], template: ConversationTemplate
    ) -> tuple[list[TextSegment], ...]:
        """Return the caption, of which all tokens are trained on; raises ``ValueError``."""
        caption = self.read_text(record, self.caption)
        for key in record:
            if key not in (self.picture, self.caption):
                self.record_keys(template).count_ignored(key)
        if any("\ud800" <= character <= "\udfff" for character in caption):
            raise ValueError("has a lone surrogate (half a character)")
        return ([TextSegment(caption + self.end_of_text, trained=True)],)

    def image_path(self, folder: Path, record: dict[str, Any]) -> Path:
        """Return the path of a record's image; raises ``ValueError``."""
        return folder / Path(self.read_text(record, self.picture)).expanduser()

    def read_text(self, record: dict[str, Any], key: str) -> str:
        """Return the text under a key of a record; raises ``ValueError`` if there is none."""
        value = record.get(key)
        if not isinstance(value, str) or not value.strip():
            keys = ", ".join(map(str, record)) or "none"
            raise ValueError(f"has no text in {key!r}; its keys: {keys}")
        return value
