"""Formatting of config issues and quantities."""

import pytest

from scalewise.errors import ConfigError, ConfigIssue, DataError, format_value
from scalewise.units import GIB, KIB, format_bytes, format_count, format_dollars, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (3e-4, "0.0003"),
        (["a", None], "[a,null]"),
        ({"a": [True]}, "{a:[true]}"),
        ("a\n\x1b", "a\\n\\x1b"),
        ("漢", "漢"),
        ("x" * 500, "x" * 120 + "..."),
    ],
)
def test_issue_values_are_printed_as_typed(value: object, text: str) -> None:
    assert format_value(value) == text


def test_config_error_counts_its_issues() -> None:
    issue = ConfigIssue("a.b", None, "is wrong", "fix it")
    assert str(ConfigError([issue])) == "config rejected, 1 issue:\n  - a.b=null: is wrong; fix it"
    assert str(ConfigError([issue, ConfigIssue("", "", "odd")])).endswith("\n  - odd")
    assert isinstance(DataError.for_key("k", 1, "r"), DataError)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1.5 * KIB), "1.50 KiB"),
        (format_bytes(4.13 * GIB), "4.13 GiB"),
        (format_bytes(-2 * GIB), "-2.00 GiB"),
        (format_bytes(3 * 1024**4), "3.00 TiB"),
        (format_seconds(0.0), "0 ms"),
        (format_seconds(8.5e-5), "85 us"),
        (format_seconds(0.9996e-3), "1 ms"),
        (format_seconds(0.64), "640 ms"),
        (format_seconds(12.44), "12.4 s"),
        (format_seconds(59.96), "1 min 00 s"),
        (format_seconds(185), "3 min 05 s"),
        (format_seconds(3599.7), "1 h 00 min"),
        (format_seconds(3840), "1 h 04 min"),
        (format_seconds(0.9996), "1.0 s"),
        (format_dollars(0.424), "$0.42"),
        (format_dollars(7787.4), "$7,787"),
        (format_count(950), "950"),
        (format_count(999.6), "1.00 k"),
        (format_count(1_240_000), "1.24 M"),
        (format_count(999_996), "1.00 M"),
        (format_count(8.03e9), "8.03 B"),
        (format_bytes(1023.9), "1.00 KiB"),
    ],
)
def test_quantities_are_formatted_with_units(text: str, expected: str) -> None:
    assert text == expected
