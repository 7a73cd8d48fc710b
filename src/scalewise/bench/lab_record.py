"""Records of labs, and the page of the documentation with their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from scalewise.reports import grading
from scalewise.reports.grading import GradedCase
from scalewise.run_files import read_json
from scalewise.sweep_question import UNKNOWN, SweepQuestion
from scalewise.units import GIB

NAME = "labs"
"""Name of the record of all labs, by device."""
WIDTH = 100


def lab_entry(
    question: SweepQuestion, cases: Sequence[GradedCase], *, planned: bool
) -> dict[str, object]:
    """Entry of a lab in the record.

    Args:
        question: Question, hypothesis and answer of the lab.
        cases: Its graded cases.
        planned: Whether the cases are only planned.
    """
    predicted = grading.answer_text(question.answer, cases, predicted=True)
    return {
        "question": question.question,
        "hypothesis": question.hypothesis,
        "predicted": "" if UNKNOWN in predicted else predicted,
        "measured": "" if planned else grading.answer_text(question.answer, cases),
        "result": grading.hypothesis_line(cases),
        "cases": {
            case.name: {
                "expected": case.expectation.text,
                "predicted": case.predicted_status,
                "happened": case.outcome.status if case.outcome else "not run",
                "peak_bytes": case.outcome.peak_bytes if case.outcome else None,
                "step_s": case.outcome.step_s if case.outcome else None,
                "loss": case.outcome.loss if case.outcome else None,
                "unmet": list(case.unmet),
            }
            for case in cases
        },
    }


def merge_entry(path: Path, name: str, entry: Mapping[str, object]) -> dict[str, Any]:
    """Content of the record at ``path`` with the entry of the lab ``name``."""
    labs: dict[str, Any] = read_json(path)
    labs[name] = dict(entry)
    return dict(sorted(labs.items()))


def answers_text(records: Path) -> str:
    """Question, hypothesis, prediction, measurement and result of each recorded lab."""
    entries = [
        (name, entry)
        for path in sorted(records.glob(f"*/{NAME}.json"))
        for name, entry in json.loads(path.read_text("utf-8")).items()
    ]
    return "\n\n".join(
        paragraph for name, entry in entries for paragraph in _paragraphs(name, entry)
    )


def _paragraphs(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    machine, date = entry["machine"], entry["date"][:10]
    yield f"## {entry['question']}"
    yield _filled("Hypothesis", entry["hypothesis"])
    if entry["predicted"]:
        yield _filled("Predicted", entry["predicted"])
    if entry["measured"]:
        memory = f"{machine['memory_bytes'] / GIB:.0f} GiB"
        device = f"{machine['processor']}, {machine['cores']} cores, {memory}"
        if machine["device"] != "cpu":
            device = f"{machine['devices']} x {machine['device']}"
        yield _filled(f"Measured on {device} ({date})", entry["measured"])
    else:
        yield _filled("Measured", f"not yet; planned for {entry['hardware']} ({date}).")
    yield fill(f"{entry['result']}.", WIDTH, break_long_words=False, break_on_hyphens=False)
    verb = "train" if entry["measured"] else "plan"
    yield f"```sh\nscalewise {verb} sweep={name}\n```"


def _filled(head: str, text: str) -> str:
    return fill(f"**{head}:** {text}", WIDTH, break_long_words=False, break_on_hyphens=False)
