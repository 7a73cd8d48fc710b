"""Number formats of a report: one format per quantity, in tables, charts and sentences.

Each function takes the unrounded number and rounds once. A missing number is an en dash, a
non-finite one is ``not finite`` and an exact zero is ``0``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from scalewise.units import GIB, KIB, MIB

MISSING = "\u2013"
MINUS = "\u2212"
TIMES = "\u00d7"
NO_BREAK = "\u00a0"
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WORDS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


def format_fixed(number: float | None, digits: int) -> str:
    """Format with ``digits`` decimals; a number that would round to 0 becomes ``<0.01``."""
    if number is None:
        return MISSING
    if not math.isfinite(number):
        return "not finite"
    if number == 0:
        return "0"
    text = f"{number:,.{digits}f}"
    if float(text.replace(",", "")) == 0:
        return f"<{10**-digits:.{digits}f}" if number > 0 else f">{MINUS}{10**-digits:.{digits}f}"
    return text.replace("-", MINUS)


def format_whole(number: float | None) -> str:
    """Format a count or a rate: ``1,432``."""
    return format_fixed(number, 0)


def format_loss(number: float | None) -> str:
    """Format a loss in nats: ``6.1423``."""
    return format_fixed(number, 4)


def format_milliseconds(seconds: float | None) -> str:
    """Format ``seconds`` in ms, without the unit: ``1,430``, ``4.7``, ``0.52``."""
    if seconds is None or not math.isfinite(seconds) or seconds == 0:
        return format_fixed(seconds, 0)
    count = seconds * 1e3
    return format_whole(count) if abs(count) >= 9.95 else format_significant(count, 2)


def format_significant(number: float, digits: int) -> str:
    """Format with ``digits`` significant digits, without an exponent."""
    if number == 0 or not math.isfinite(number):
        return format_fixed(number, 0)
    exponent = int(f"{number:.{digits - 1}e}".split("e")[1])
    return f"{number:,.{max(digits - 1 - exponent, 0)}f}".replace("-", MINUS)


def format_ratio(number: float) -> str:
    """Format a ratio: two significant digits and a multiplication sign."""
    return f"{format_significant(number, 2)}{TIMES}"


def format_percent(fraction: float | None) -> str:
    """Format a fraction as a percentage: ``27%``, ``<1%``."""
    text = format_fixed(None if fraction is None else fraction * 100, 0)
    return text if text in (MISSING, "not finite") else f"{text}%"


def format_price(price: float | None) -> str:
    """Format a price in dollars, without the sign: ``0.42``, ``7,787``."""
    return format_fixed(price, 2 if price is not None and price < 100 else 0)


def format_utilization(fraction: float | None) -> str:
    """Format a fraction as a percentage with one decimal: ``41.2%``."""
    text = format_fixed(None if fraction is None else fraction * 100, 1)
    return text if text == MISSING else f"{text}%"


def format_error(fraction: float | None) -> str:
    """Format a fraction as a signed percentage: ``+0.4%``, or ``<0.1%`` for either sign."""
    text = format_fixed(None if fraction is None else fraction * 100, 1)
    if text == f">{MINUS}0.1":
        text = "<0.1"
    if text in (MISSING, "not finite", "0"):
        return text
    return f"{'' if text.startswith((MINUS, '<', '>')) else '+'}{text}%"


def format_power(number: float | None) -> str:
    """Format in scientific notation: ``3.1e-6``, with U+2212 as minus."""
    if number is None or not math.isfinite(number) or number == 0:
        return format_fixed(number, 0)
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}".replace("-", MINUS)


def format_range(low: str, high: str, unit: str = "") -> str:
    """Format a range of two texts, or one of them if they are equal."""
    if low == high:
        return f"{low}{unit}"
    if low.endswith("%") and high.endswith("%"):
        low = low[:-1]
    return f"{low}{MISSING}{high}{unit}"


@dataclass(frozen=True)
class MemoryUnit:
    """Unit of all byte counts of a report."""

    name: str
    """``GiB``, ``MiB`` or ``KiB``."""
    size: int
    """Bytes per unit."""

    def text(self, count: float | None) -> str:
        """Format ``count`` bytes without the unit: ``4.13``."""
        return format_fixed(None if count is None else count / self.size, 2)

    def full(self, count: float | None) -> str:
        """Format ``count`` bytes with the unit: ``4.13 GiB``."""
        return f"{self.text(count)}{NO_BREAK}{self.name}"


def memory_unit(byte_counts: Sequence[float]) -> MemoryUnit:
    """Largest unit in which the largest of ``byte_counts`` (bytes) is at least 1."""
    largest = max(byte_counts, default=0)
    for name, size in (("GiB", GIB), ("MiB", MIB)):
        if largest >= size:
            return MemoryUnit(name, size)
    return MemoryUnit("KiB", KIB)


def format_instant(moment: datetime | None) -> str:
    """Format a time in UTC: ``14 Mar 2026, 09:26 UTC``."""
    if moment is None:
        return MISSING
    utc = moment.astimezone(UTC) if moment.tzinfo else moment
    zone = " UTC" if moment.tzinfo else ""
    return f"{utc.day} {MONTHS[utc.month - 1]} {utc.year}, {utc:%H:%M}{zone}"


def number_word(count: int) -> str:
    """Spell out a count up to twelve: ``three``, ``13``."""
    return WORDS[count] if count < len(WORDS) else f"{count:,}"


def pluralize(count: int, noun: str) -> str:
    """Count and noun: ``one job``, ``three strategies``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number_word(count)} {noun if count == 1 else plural}"


def capitalize_first(text: str) -> str:
    """Capitalize the first letter of ``text``."""
    return text[:1].upper() + text[1:]


def format_value(item: object) -> str:
    """Format a config value as on the command line."""
    if item is None:
        return "null"
    if isinstance(item, bool):
        return str(item).lower()
    if isinstance(item, list | tuple):
        return f"[{','.join(format_value(part) for part in item)}]"
    return str(item)
