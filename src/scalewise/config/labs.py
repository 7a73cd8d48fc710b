"""Labs: sweeps of cases with a question, a hypothesis and expectations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scalewise.bounded_yaml import load_yaml
from scalewise.config import paths
from scalewise.errors import ConfigError, did_you_mean
from scalewise.expectations import Expectation, SweepCase, parse_cases
from scalewise.sweep_question import answer_issues

CASES_SWEEPER = {"override /hydra/sweeper": "cases"}


@dataclass(frozen=True)
class Lab:
    """Sweep of cases in a file of ``sweeps/``."""

    name: str
    """Name of the sweep."""
    question: str
    """Question that the cases answer."""
    hypothesis: str
    """Expected answer."""
    answer: str
    """Template of the answer; empty: none."""
    cases: Sequence[SweepCase]
    """Cases, in the order in which they run."""

    @property
    def expectations(self) -> Mapping[str, Expectation]:
        """Expected outcome by case."""
        return {case.name: case.expect for case in self.cases}


def find_labs() -> dict[str, Lab]:
    """Labs by name, in alphabetical order."""
    labs = (_read_lab(name) for name in paths.option_names("sweep"))
    return {lab.name: lab for lab in labs if lab is not None}


def find_lab(name: str) -> Lab:
    """Lab of a name; raises ``ConfigError`` if there is none."""
    labs = find_labs()
    if name not in labs:
        raise ConfigError.for_key("lab", name, "is not a lab", did_you_mean(name, labs))
    return labs[name]


def _read_lab(name: str) -> Lab | None:
    """Lab in the file of a sweep; None if the sweep has no cases."""
    file = paths.option_folder("sweep") / f"{name}.yaml"
    content = load_yaml(file.read_text("utf-8"))
    if CASES_SWEEPER not in content.get("defaults", ()):
        return None
    sweeper = content["hydra"]["sweeper"]
    cases, issues = parse_cases(sweeper["cases"])
    answer = sweeper.get("answer", "").strip()
    issues += answer_issues(answer, sweeper["cases"])
    if issues:
        raise ConfigError(issues)
    return Lab(name, content["question"], sweeper["hypothesis"].strip(), answer, cases)
