"""The user's own texts, each of a class: a model learns to tell which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from scalewise.config.registry import register_option
from scalewise.data.chat import ChatData
from scalewise.data.chat_templates import ConversationTemplate, TemplatePiece
from scalewise.errors import ConfigIssue


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
        """Yields classes that cannot be told apart, and what ``Chat`` does."""
        yield from super().validate()
        if len({*self.classes}) < max(2, len(self.classes)):
            reason, fix = "are not two or more, all different", "give 'data.classes=[no,yes]'"
            yield ConfigIssue("data.classes", list(self.classes), reason, fix)
        if self.packing:
            reason = "would put texts beside each other, and a row is of one class"
            yield ConfigIssue("data.packing", True, reason, "set data.packing=false")

    def render_record(
        self, record: dict[str, Any], template: ConversationTemplate
    ) -> tuple[list[TemplatePiece], ...]:
        """Returns the text with the number of its class; raises ``ValueError``."""
        for key in (self.text, self.label):
            if record.get(key) is None:
                raise ValueError(f"has no {key}; it has {', '.join(map(str, record)) or 'nothing'}")
        text, label = record[self.text], record[self.label]
        for key in record:
            if key not in (self.text, self.label):
                self.record_keys(template).count_ignored(key)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"has no words in {self.text}")
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
        raise ValueError(f"is of class {label!r}; data.classes are {', '.join(self.classes)}")


def parse_labeled(text: str, class_index: int) -> list[TemplatePiece]:
    """Returns a text, no token of which is learnt, and the number of its class."""
    return [
        TemplatePiece(text, trained=False),
        TemplatePiece("", trained=True, label=class_index, separate=True),
    ]
