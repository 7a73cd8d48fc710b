"""Parser of sweep overrides into the axes of a search space."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from scalewise.config import sweep_grid
from scalewise.hpo.space import Axis, ChoiceAxis, IntervalAxis


def read_axes(overrides: Sequence[str], loader: ConfigLoader) -> tuple[list[Axis], list[str]]:
    """Split overrides into axes and fixed overrides; the last override of a key wins."""
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    last = {override.get_key_element(): override for override in parsed}
    space = [_axis(key, o) for key, o in last.items() if o.is_sweep_override()]
    fixed = [
        f"{key}={o.get_value_element_as_str()}" if not o.is_delete() else str(o.input_line)
        for key, o in last.items()
        if not o.is_sweep_override()
    ]
    return space, fixed


def _axis(key: str, override: Override) -> Axis:
    value = override.value()
    if isinstance(value, IntervalSweep):
        low, high = cast(float, value.start), cast(float, value.end)
        return IntervalAxis(key, low, high, log="log" in value.tags)
    number = sweep_grid.count(override)
    if isinstance(value, RangeSweep) and not value.shuffle and number > 1:
        first, step = cast(float, value.start), value.step
        last = type(first + step)(Decimal(first) + (number - 1) * Decimal(step))
        return IntervalAxis(key, min(first, last), max(first, last), step=abs(step))
    sweep_grid.bounded_count(override)
    return ChoiceAxis(key, tuple(override.sweep_string_iterator()))
