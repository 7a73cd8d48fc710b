"""Units and human-readable formats. Bytes are ``int``; seconds and FLOPs are ``float``."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3
MICRO = 1e-6
MEGA = 1e6
GIGA = 1e9
TERA = 1e12
MAX_NUMBER = 2**63 - 1
"""Largest integer that torch and the files of a run can store (int64)."""


def format_bytes(count: float) -> str:
    """Format a size in binary units: ``4.13 GiB``, ``512 KiB``."""
    return _scale(count, ("B", "KiB", "MiB", "GiB", "TiB"), KIB)


def format_seconds(seconds: float) -> str:
    """Format a duration: ``85 us``, ``640 ms``, ``12.4 s``, ``3 min 05 s``, ``1 h 04 min``."""
    if 0 < round(seconds / MICRO) < 1000:
        return f"{seconds / MICRO:.0f} us"
    if round(seconds * 1e3) < 1000:
        return f"{seconds * 1e3:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_count(count: float) -> str:
    """Format a count with a decimal suffix: ``950``, ``1.24 M``, ``8.03 B``."""
    return _scale(count, ("", "k", "M", "B", "T"), 1000).rstrip()


def format_dollars(dollars: float) -> str:
    """Format a price: ``$0.42``, ``$7,787``."""
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:,.2f}"


def format_mfu(mfu: float, palm: float) -> str:
    """Format a model FLOPs utilization by both conventions: ``MFU 41.0% (PaLM 45.6%)``."""
    return f"MFU {mfu:.1%} (PaLM {palm:.1%})"


def _scale(count: float, units: tuple[str, ...], base: int) -> str:
    """Format a count in the smallest unit in which the rounded value is below ``base``."""
    value, digits, index = float(count), 0, 0
    while abs(round(value, digits)) >= base and index < len(units) - 1:
        value, digits, index = value / base, 2, index + 1
    return f"{value:.{digits}f} {units[index]}"
