"""User-defined texts with class labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from scalewise.data.chat import ChatData
from scalewise.data.chat_templates import ConversationTemplate, TextSegment
from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


@register_option("data", "labelled")
@dataclass(frozen=True)
class LabeledText(ChatData):
    """Texts with a class label; longer texts are truncated at the end."""

    classes: tuple[str, ...] = ()
    """Class names as records spell them; a record may have the class index from 0 instead."""
    text: str = "text"
    """Key of the text in a record."""
    label: str = "label"
    """Key of the class in a record."""

    kind: ClassVar[str] = "labelled"
    record_description: ClassVar[str] = "text of a known class"
    record_fields: ClassVar[tuple[str, ...]] = ("classes", "text", "label")

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield invalid class names, and the issues of ``ChatData``."""
        yield from super().validate()
        if len({*self.classes}) < max(2, len(self.classes)):
            reason, fix = "must be at least two different names", "set 'data.classes=[no,yes]'"
            yield ConfigIssue("data.classes", list(self.classes), reason, fix)
        if self.packing:
            reason = "is not supported with classes: a sequence has one class"
            yield ConfigIssue("data.packing", True, reason, "set data.packing=false")

    def render_record(
        self, record: dict[str, Any], template: ConversationTemplate
    ) -> tuple[list[TextSegment], ...]:
        """Return the text and its class index; raises ``ValueError``."""
        for key in (self.text, self.label):
            if record.get(key) is None:
                raise ValueError(f"has no {key}; its keys: {', '.join(map(str, record)) or 'none'}")
        text, label = record[self.text], record[self.label]
        for key in record:
            if key not in (self.text, self.label):
                self.record_keys(template).count_ignored(key)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"has no text in {self.text}")
        return (parse_labeled(text, self._class_index(label)),)

    def _class_index(self, label: object) -> int:
        if str(label) in self.classes:
            return self.classes.index(str(label))
        if (
            isinstance(label, int)
            and not isinstance(label, bool)
            and 0 <= label < len(self.classes)
        ):
            return int(label)
        raise ValueError(
            f"has class {label!r}, which is not one of data.classes: {', '.join(self.classes)}"
        )


def parse_labeled(text: str, class_index: int) -> list[TextSegment]:
    """Return a text without labels, followed by its class index."""
    return [
        TextSegment(text, trained=False),
        TextSegment("", trained=True, label=class_index, separate=True),
    ]
