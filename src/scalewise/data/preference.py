"""User-defined preference pairs: a chosen and a rejected answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from scalewise.data.chat import ChatData
from scalewise.data.chat_templates import ConversationTemplate, TextSegment
from scalewise.registry import register_option


@register_option("data", "preference")
@dataclass(frozen=True)
class PreferenceData(ChatData):
    """Pairs of answers to one question, chosen and rejected, rendered as in ``data=chat``."""

    kind: ClassVar[str] = "preference"
    record_description: ClassVar[str] = "pair of answers"
    pairs = True

    def render_record(
        self, record: dict[str, Any], template: ConversationTemplate
    ) -> tuple[list[TextSegment], ...]:
        """Return the conversations with the chosen and with the rejected answer."""
        from scalewise.data import preference_formats

        return preference_formats.parse_pair(record, template, self.record_keys(template))
