"""Model card of an exported model: config, metrics and the command that reproduces it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalewise.metric_names import METRICS

METRIC_KEYS = (
    "val/loss",
    "val/reward_accuracy",
    "val/reward",
    "val/accuracy",
    "train/loss",
    "train/tokens",
)
"""Metrics of the last step that the card shows."""


def model_card(
    status: Mapping[str, Any],
    summary: Mapping[str, Any],
    step: int,
    library: str,
    weights: Sequence[str] = (),
) -> str:
    """Markdown of a ``README.md`` with the metadata header of Hugging Face.

    Args:
        status: Content of the run's ``status.json``.
        summary: Content of the run's ``summary.json``; empty for a run that was killed.
        step: Optimizer step of the exported checkpoint.
        library: Library that loads the folder.
        weights: Notes on the weights.
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
        "## Configuration",
        "",
        "| group | option |",
        "|---|---|",
        *(f"| {group} | {choice} |" for group, choice in choices.items()),
        "",
        "## Metrics",
        "",
        "| | at the end of the run |",
        "|---|---|",
        *(
            f"| {METRICS[key].meaning} (`{key}`) | {metrics[key]:,.6g} |"
            for key in METRIC_KEYS
            if metrics.get(key) is not None
        ),
        "",
        *(("## Weights", "", *(f"- {line}" for line in weights), "") if weights else ()),
        "## Reproduce",
        "",
        "```sh",
        str(status.get("command")),
        "```",
        "",
        f"Commit {status.get('git_commit') or 'unknown'}"
        f"{', with changes' * bool(status.get('git_dirty'))}; "
        + ", ".join(f"{name} {version}" for name, version in status.get("versions", {}).items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def _size_text(summary: Mapping[str, Any], step: int) -> str:
    """Model size and training length; a run that was killed has no summary."""
    if summary.get("parameters") is None:
        return f"After {step} steps of a run that did not finish."
    return (
        f"{summary['parameters']:,} parameters after {step} of {summary.get('steps')} steps of "
        f"{summary.get('global_batch')} x {summary.get('sequence')} tokens."
    )
