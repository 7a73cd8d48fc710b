"""What somebody probably meant, for the cure of a complaint."""

import difflib
from collections.abc import Iterable

LISTED = 12
"""So many names are listed where none is close; of more, only the first."""


def meant(text: str, options: Iterable[str], prefix: str = "") -> str:
    """Returns ``did you mean PREFIXoption?``, or which options there are where none is close."""
    names = sorted(options)
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    listed = ", ".join(f"{prefix}{name}" for name in names[:LISTED])
    rest = len(names) - LISTED
    return f"there is {listed}" + (f" and {rest} more" if rest > 0 else "") if names else ""
