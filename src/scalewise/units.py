"""Quantities as people read them. Bytes are ``int``, seconds ``float``, flops ``float``."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TERA = 1e12


def bytes_text(count: float) -> str:
    """Returns ``count`` bytes in binary units: ``4.13 GiB``, ``512 KiB``."""
    for unit, size in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Returns a duration: ``640 ms``, ``12.4 s``, ``3 min 05 s``, ``1 h 04 min``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def count_text(count: float) -> str:
    """Returns a count with a decimal suffix: ``950``, ``1.24 M``, ``8.03 B``."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {suffix}"
    return f"{count:.0f}"
