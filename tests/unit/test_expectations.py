"""Expectations of sweep cases: their parsing, and their comparison with outcomes."""

from __future__ import annotations

import pytest

from scalewise.errors import ConfigError
from scalewise.expectations import (
    CaseOutcome,
    Expectation,
    parse_cases,
    parse_expectation,
    unmet_expectations,
)
from scalewise.units import GIB

OUTCOMES = {
    "base": CaseOutcome("ok", 2.0 * GIB, 1.0, 4.0),
    "small": CaseOutcome("ok", 1.0 * GIB, 0.5, 4.02),
    "large": CaseOutcome("out_of_memory"),
}


@pytest.mark.parametrize(
    ("name", "expectation", "reasons"),
    [
        ("small", Expectation(), []),
        ("large", Expectation("out_of_memory"), []),
        ("large", Expectation(), ["out_of_memory, expected ok"]),
        ("base", Expectation("out_of_memory"), ["ok, expected out_of_memory"]),
        ("absent", Expectation(), ["not run"]),
        ("small", Expectation(peak_memory_gib=(0.9, 1.1)), []),
        (
            "small",
            Expectation(peak_memory_gib=(1.1, 1.2)),
            ["peak memory 1.00 GiB is not in [1.1, 1.2] GiB"],
        ),
        ("small", Expectation(less_memory_than="base", faster_than="base"), []),
        (
            "base",
            Expectation(less_memory_than="small", faster_than="small"),
            [
                "peak memory 2.00 GiB is not below 1.00 GiB of small",
                "step time 1.0 s is not below 500 ms of small",
            ],
        ),
        ("small", Expectation(loss_within={"base": 0.01}), []),
        (
            "small",
            Expectation(loss_within={"base": 0.001}),
            ["loss 4.0200 is not within 0.1% of 4.0000 of base"],
        ),
        (
            "small",
            Expectation(faster_than="large"),
            ["step time 500 ms is not below unknown of large"],
        ),
        ("small", Expectation(faster_than="absent"), []),
        ("base", Expectation(lower_loss_than="small"), []),
        (
            "small",
            Expectation(lower_loss_than="base"),
            ["loss 4.0200 is not below 4.0000 of base"],
        ),
        (
            "small",
            Expectation(memory_ratio={"base": (0.5, 0.5)}, time_ratio={"base": (0.4, 0.6)}),
            [],
        ),
        (
            "small",
            Expectation(memory_ratio={"base": (0.6, 0.7)}, time_ratio={"base": (0.1, 0.2)}),
            [
                "peak memory 1.00 GiB is not 0.6 to 0.7 x 2.00 GiB of base",
                "step time 500 ms is not 0.1 to 0.2 x 1.0 s of base",
            ],
        ),
        (
            "small",
            Expectation(memory_ratio={"large": (0, 1)}),
            ["peak memory 1.00 GiB is not 0 to 1 x unknown of large"],
        ),
    ],
)
def test_unmet_expectations_give_each_reason(
    name: str, expectation: Expectation, reasons: list[str]
) -> None:
    assert unmet_expectations(name, expectation, OUTCOMES, planned=False) == reasons


@pytest.mark.parametrize(
    ("expectation", "status", "met"),
    [
        (Expectation(), "fits", True),
        (Expectation(), "out_of_memory", False),
        (Expectation("out_of_memory"), "out_of_memory", True),
        (Expectation(predicted="host_out_of_memory"), "host_out_of_memory", True),
        (Expectation(predicted="host_out_of_memory"), "fits", False),
        (Expectation(loss_within={"base": 0.01}), "fits", True),
    ],
)
def test_plans_are_compared_by_fit_status(expectation: Expectation, status: str, met: bool) -> None:
    outcomes = {"case": CaseOutcome(status, GIB, 1.0), "base": CaseOutcome("fits", GIB, 1.0)}
    assert (not unmet_expectations("case", expectation, outcomes, planned=True)) == met


def test_plans_without_a_step_time_are_not_compared_in_it() -> None:
    outcomes = {"case": CaseOutcome("fits", GIB), "base": CaseOutcome("fits", 2 * GIB)}
    expectation = Expectation(less_memory_than="base", faster_than="base")
    assert unmet_expectations("case", expectation, outcomes, planned=True) == []
    assert unmet_expectations("case", expectation, outcomes, planned=False)


def test_cases_are_parsed_from_command_lines() -> None:
    cases, issues = parse_cases(
        {
            "one": {"overrides": "model=llama_160m 'data.paths=[a b]'"},
            "two": {"expect": {"peak_memory_gib": [1, 2.5], "faster_than": "one"}},
        }
    )
    assert issues == []
    assert [case.name for case in cases] == ["one", "two"]
    assert cases[0].overrides == ("model=llama_160m", "data.paths=[a b]")
    assert cases[1].expect == Expectation(peak_memory_gib=(1, 2.5), faster_than="one")
    recorded = cases[1].expect.as_dict()
    assert parse_expectation("", recorded, []) == cases[1].expect
    assert [case.name for case in parse_cases({"a": {}, "b": {}}, ["b"])[0]] == ["b"]


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        (None, "hydra.sweeper.cases=null: must be a mapping of names to cases"),
        ({"a": 3}, "hydra.sweeper.cases.a=3: must be a mapping"),
        ({"a": {"override": "x"}}, "hydra.sweeper.cases.a.override=x: no such key"),
        ({"a": {"overrides": ["x=1"]}}, "cases.a.overrides=[x=1]: is not a line of overrides"),
        ({"a": {"overrides": "'x=1"}}, "is not a line of overrides"),
        ({"a": {"expect": "ok"}}, "cases.a.expect=ok: must be a mapping with status"),
        ({"a": {"expect": {"state": "ok"}}}, "did you mean status?"),
        ({"a": {"expect": {"status": "fine"}}}, "expect.status=fine: must be one of ok"),
        ({"a": {"expect": {"predicted": "ok"}}}, "expect.predicted=ok: must be one of fits"),
        ({"a": {"expect": {"peak_memory_gib": [2, 1]}}}, "must be [LOWEST, HIGHEST]"),
        ({"a": {"expect": {"peak_memory_gib": 2}}}, "must be [LOWEST, HIGHEST]"),
        ({"a": {"expect": {"faster_than": "b"}}}, "expect.faster_than=b: is not another case"),
        ({"a": {"expect": {"faster_than": "a"}}}, "expect.faster_than=a: is not another case"),
        ({"a": {"expect": {"loss_within": 0.1}}}, "must map cases to relative differences"),
        ({"a": {"expect": {"loss_within": {"b": 0.1}}}}, "is not another case"),
    ],
)
def test_invalid_cases_name_their_key(cases: object, message: str) -> None:
    assert message in str(ConfigError(parse_cases(cases)[1]))


def test_selected_cases_must_exist() -> None:
    _, issues = parse_cases({"baseline": {}}, ["base"])
    assert [str(issue) for issue in issues] == [
        "hydra.sweeper.only=base: is not a case; did you mean baseline?"
    ]
