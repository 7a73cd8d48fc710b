"""The user's own preferences: pairs of answers, of which one is to become likelier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from scalewise.config.registry import option
from scalewise.data.chat import Chat
from scalewise.data.templates import Piece, Template


@option("data", "preference")
@dataclass(frozen=True)
class Preference(Chat):
    """Two answers to a question a row, chosen and rejected, as ``Chat`` writes conversations."""

    kind: ClassVar[str] = "preference"
    record: ClassVar[str] = "pair of answers"
    pairs = True

    def written(self, record: dict[str, Any], template: Template) -> tuple[list[Piece], ...]:
        """Returns the conversation with the chosen answer, and that with the rejected one."""
        from scalewise.data import pairs

        return pairs.written(record, template, self.keys(template))
