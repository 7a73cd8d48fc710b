"""Suggestions of similar names, for the fixes of config issues."""

import difflib
from collections.abc import Iterable

EXPECTED_OPTIONS = {
    ("objective", "sft"): "objective=causal_lm data=chat",
    ("objective", "ppo"): "objective=grpo",
    ("optimizer", "deepspeed_cpu"): "parallelism=deepspeed_zero2_offload",
    ("optimizer", "paged"): "optimizer=adamw_paged",
    ("hydra/launcher", "joblib"): "hydra/launcher=packed",
}
"""Override to suggest for an option name of other libraries, by group and option."""
MAX_LISTED = 12
"""Maximum number of names to list if none is similar."""


def suggested_option(group: str, option: str, options: Iterable[str], prefix: str = "") -> str:
    """Suggest a replacement of an unknown option of a group."""
    expected = EXPECTED_OPTIONS.get((group, option))
    return f"set {expected} instead" if expected else did_you_mean(option, options, prefix)


def did_you_mean(text: str, options: Iterable[str], prefix: str = "") -> str:
    """Return ``did you mean PREFIXoption?``, or a list of the options if none is similar."""
    names = sorted(options)
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    listed = ", ".join(f"{prefix}{name}" for name in names[:MAX_LISTED])
    remaining = len(names) - MAX_LISTED
    more = f" and {remaining} more" if remaining > 0 else ""
    return f"available: {listed}{more}" if names else ""
