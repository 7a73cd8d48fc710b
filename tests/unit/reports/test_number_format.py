"""Numbers in reports."""

import pytest

from scalewise.reports.number_format import format_error, format_percent


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.0042, "+0.4%"),
        (-0.0042, "\u22120.4%"),
        (0.0003, "<0.1%"),
        (-0.0003, "<0.1%"),
        (0.0, "0"),
        (float("nan"), "not finite"),
        (12.5, "+1,250.0%"),
    ],
)
def test_format_error(fraction: float, text: str) -> None:
    assert format_error(fraction) == text


@pytest.mark.parametrize(("fraction", "text"), [(0.27, "27%"), (0.004, "<1%"), (1.0, "100%")])
def test_format_percent(fraction: float, text: str) -> None:
    assert format_percent(fraction) == text
