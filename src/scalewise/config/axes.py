"""The axes of a sweep: from lines with several values each to the lines of every job."""

import itertools
from collections.abc import Mapping, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from scalewise.errors import Complaint, ConfigError


def lines(params: Mapping[str, object], paired: Mapping[str, object]) -> list[str]:
    """Returns the axes of a sweep's file as they would be typed.

    ``params`` are crossed, ``paired`` go together. Raises ``ConfigError`` for a key in both, and
    for values that are no text or number.
    """
    complaints = [
        Complaint(f"zip.{key}", paired[key], "is in params too", "leave one of the two out")
        for key in paired
        if key in params
    ]
    for key, values in (*params.items(), *paired.items()):
        if not isinstance(values, str | int | float):
            cure = "write its values as one text: 'a,b,c'"
            complaints.append(Complaint(key, values, "is no text of values", cure))
    if complaints:
        raise ConfigError(complaints)
    return [f"{key}={values}" for key, values in (*params.items(), *paired.items())]


def jobs(
    filed: Sequence[str], typed: Sequence[str], paired: Sequence[str], loader: ConfigLoader
) -> list[list[str]]:
    """Returns the overrides of every job, in order: the last axis varies fastest.

    ``filed`` are the lines of the sweep's file, ``typed`` those of the command line, which take
    the place of a filed line of the same key. Of the filed, the keys in ``paired`` vary together,
    value by value. Raises ``ConfigError`` for an axis without values, or pairs that do not match.
    """
    parser = OverridesParser.create(config_loader=loader)
    own = {override.get_key_element(): override for override in parser.parse_overrides([*filed])}
    given = {override.get_key_element(): override for override in parser.parse_overrides([*typed])}
    together = [key for key in own if key in paired and key not in given]
    complaints: list[Complaint] = []
    values = {key: _values(override, complaints) for key, override in {**own, **given}.items()}
    if not complaints and together:
        complaints += _unequal({key: values[key] for key in together})
    if complaints:
        raise ConfigError(complaints)
    axes = [[[line] for line in found] for key, found in values.items() if key not in together]
    if together:
        rows = zip(*(values[key] for key in together), strict=True)
        axes.append([list(row) for row in rows])
    return [list(itertools.chain(*parts)) for parts in itertools.product(*axes)]


def _values(override: Override, complaints: list[Complaint]) -> list[str]:
    """Returns an override with each of its values, as lines."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key, shown = override.get_key_element(), override.get_value_string()
    if not override.is_discrete_sweep():
        reason, cure = "is no list of values", "write a,b,c or range(first,end,step)"
        complaints.append(Complaint(key, shown, reason, cure))
        return []
    found = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not found:
        complaints.append(Complaint(key, shown, "names no value", "write a,b,c"))
    return found


def _unequal(values: Mapping[str, Sequence[str]]) -> list[Complaint]:
    """Returns a complaint where the keys of a zip have unlike numbers of values."""
    counts = {key: len(found) for key, found in values.items()}
    if len(set(counts.values())) == 1:
        return []
    told = ", ".join(f"{key} {count}" for key, count in counts.items())
    reason = f"paired values need equal numbers: {told}"
    return [Complaint("hydra.sweeper.zip", list(counts), reason, "give each key as many")]
