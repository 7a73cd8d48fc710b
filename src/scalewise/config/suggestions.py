"""What somebody probably meant, for the cure of a complaint."""

import difflib
from collections.abc import Iterable

EXPECTED_OPTIONS = {
    ("objective", "sft"): "objective=causal_lm data=chat",
    ("objective", "ppo"): "objective=grpo",
    ("optimizer", "deepspeed_cpu"): "parallelism=deepspeed_zero2_offload",
    ("optimizer", "paged"): "optimizer=adamw_paged",
}
"""What does here what goes by another name elsewhere: of a group and an option."""
MAX_LISTED = 12
"""So many names are listed where none is close; of more, only the first."""


def suggested_option(group: str, option: str, options: Iterable[str]) -> str:
    """Returns what to choose in place of an option that a group has not."""
    expected = EXPECTED_OPTIONS.get((group, option))
    return f"set {expected} instead" if expected else did_you_mean(option, options)


def did_you_mean(text: str, options: Iterable[str], prefix: str = "") -> str:
    """Returns ``did you mean PREFIXoption?``, or which options there are where none is close."""
    names = sorted(options)
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    listed = ", ".join(f"{prefix}{name}" for name in names[:MAX_LISTED])
    rest = len(names) - MAX_LISTED
    return f"there is {listed}" + (f" and {rest} more" if rest > 0 else "") if names else ""
