"""The card of an exported model: what it is, how it was trained, how well, and how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalewise.tracking.metric_names import METRICS

MEASURES = (
    "val/loss",
    "val/reward_accuracy",
    "val/reward",
    "val/accuracy",
    "train/loss",
    "train/tokens",
)
"""Figures of the last step that a reader of the card asks for."""


def model_card(
    status: Mapping[str, Any],
    summary: Mapping[str, Any],
    step: int,
    library: str,
    weights: Sequence[str] = (),
) -> str:
    """Returns the Markdown of a ``README.md`` with the head that Hugging Face reads.

    ``status`` and ``summary`` are the run's; ``library`` is what loads the folder; ``weights``
    says what is special about these.
    """
    choices, metrics = status.get("choices", {}), summary.get("metrics", {})
    lines = [
        "---",
        f"library_name: {library}",
        "tags: [scalewise]",
        "---",
        "",
        f"# {status.get('name')}",
        "",
        _size_text(summary, step),
        "",
        "## Made of",
        "",
        "| group | option |",
        "|---|---|",
        *(f"| {group} | {choice} |" for group, choice in choices.items()),
        "",
        "## Measured",
        "",
        "| | at the run's end |",
        "|---|---|",
        *(
            f"| {METRICS[key].meaning} (`{key}`) | {metrics[key]:,.6g} |"
            for key in MEASURES
            if metrics.get(key) is not None
        ),
        "",
        *(("## Weights", "", *(f"- {line}" for line in weights), "") if weights else ()),
        "## Repeat it",
        "",
        "```sh",
        str(status.get("command")),
        "```",
        "",
        f"Commit {status.get('git_commit') or 'unknown'}"
        f"{', with changes' * bool(status.get('git_dirty'))}; "
        + ", ".join(f"{name} {what}" for name, what in status.get("versions", {}).items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def _size_text(summary: Mapping[str, Any], step: int) -> str:
    """Returns how large and how trained it is; a run that was killed has left no summary."""
    if summary.get("parameters") is None:
        return f"After {step} steps of a run that did not end."
    return (
        f"{summary['parameters']:,} parameters after {step} of {summary.get('steps')} steps of "
        f"{summary.get('global_batch')} x {summary.get('sequence')} tokens."
    )
