"""Complaints and quantities as people read them."""

import pytest

from scalewise.errors import Complaint, ConfigError, DataError, as_typed
from scalewise.units import GIB, KIB, bytes_text, count_text, dollars_text, seconds_text


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
def test_values_are_spelled_as_they_are_typed(value: object, text: str) -> None:
    assert as_typed(value) == text


def test_complaints_are_counted() -> None:
    one = Complaint("a.b", None, "is wrong", "mend it")
    assert str(ConfigError([one])) == "refused, 1 problem:\n  - a.b=null: is wrong; mend it"
    assert str(ConfigError([one, Complaint("", "", "odd")])).endswith("\n  - odd")
    assert isinstance(DataError.one("k", 1, "r"), DataError)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1.5 * KIB), "1.50 KiB"),
        (bytes_text(4.13 * GIB), "4.13 GiB"),
        (bytes_text(-2 * GIB), "-2.00 GiB"),
        (bytes_text(3 * 1024**4), "3.00 TiB"),
        (seconds_text(0.0), "0 ms"),
        (seconds_text(8.5e-5), "85 us"),
        (seconds_text(0.9996e-3), "1 ms"),
        (seconds_text(0.64), "640 ms"),
        (seconds_text(12.44), "12.4 s"),
        (seconds_text(59.96), "1 min 00 s"),
        (seconds_text(185), "3 min 05 s"),
        (seconds_text(3599.7), "1 h 00 min"),
        (seconds_text(3840), "1 h 04 min"),
        (seconds_text(0.9996), "1.0 s"),
        (dollars_text(0.424), "$0.42"),
        (dollars_text(7787.4), "$7,787"),
        (count_text(950), "950"),
        (count_text(999.6), "1.00 k"),
        (count_text(1_240_000), "1.24 M"),
        (count_text(999_996), "1.00 M"),
        (count_text(8.03e9), "8.03 B"),
        (bytes_text(1023.9), "1.00 KiB"),
    ],
)
def test_quantities(text: str, expected: str) -> None:
    assert text == expected
