"""Which jobs tell many on/off choices apart: two-level fractional factorial designs. Stdlib only.

After G. E. P. Box, J. S. Hunter and W. G. Hunter, Statistics for Experimenters, 2nd edition,
2005, chapter 6. In a design of resolution R no effect of p factors is confused with one of less
than R - p others: at IV main effects stand clear of interactions of two, at V those of each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from scalewise.errors import ConfigIssue, format_value
from scalewise.hpo.space import too_many
from scalewise.typed_override import override, shell_word

MOST = 11
"""Factors of a screen: at resolution V these are 128 jobs."""

MAIN_EFFECTS, INTERACTIONS = 4, 5
"""Resolution that keeps main effects clear of interactions, and interactions of each other."""


@dataclass(frozen=True)
class ScreeningDesign:
    """Factors by key with their two levels, the first of them the one at rest."""

    factors: Mapping[str, Sequence[object]] = field(default_factory=dict)
    interactions: bool = False
    """Whether interactions of two are to be told from each other."""
    repeats: int = 2
    """Jobs of each combination, each with a seed of its own."""
    seed: int = 1
    """Seed of the order in which the jobs run."""

    def validate(self, fixed_keys: Sequence[str]) -> Iterator[ConfigIssue]:
        """Yields what cannot be screened; ``fixed_keys`` are keys that have one value."""
        key = "hydra.sweeper"
        if not isinstance(self.factors, Mapping) or not 2 <= len(self.factors) <= MOST:
            reason = f"a screen has 2 to {MOST} factors of two levels"
            example = {"precision": ["fp32", "bf16_mixed"], "memory": ["none", "checkpoint_full"]}
            fix = "set " + shell_word("+" + override(f"{key}.factors", example))
            yield ConfigIssue(f"{key}.factors", format_value(self.factors), reason, fix)
            return
        for name, levels in self.factors.items():
            two = isinstance(levels, Sequence) and not isinstance(levels, str)
            if not two or len(levels) != 2 or levels[0] == levels[1]:
                yield ConfigIssue(f"{key}.factors.{name}", levels, "is no list of two values")
            if name in fixed_keys:
                fix = f"leave it out, or +{key}.factors without it"
                yield ConfigIssue(name, "", "is a factor of the screen", fix)
        if self.repeats < 1:
            yield ConfigIssue(f"{key}.repeats", self.repeats, "must be 1 or more")
        resolution = INTERACTIONS if self.interactions else MAIN_EFFECTS
        jobs = self.repeats * len(fractional_design(len(self.factors), resolution))
        yield from too_many(f"{key}.repeats", self.repeats, jobs)
        if "seed" in fixed_keys and self.repeats > 1:
            fix = f"leave it out, or set {key}.repeats=1"
            yield ConfigIssue("seed", "", "each repeat has a seed of its own", fix)

    def build_overrides(self) -> list[list[str]]:
        """Returns the overrides of each job, the first with every factor at rest.

        The others come in random order, so that a machine that slows down favours no level.
        """
        resolution = INTERACTIONS if self.interactions else MAIN_EFFECTS
        jobs = [
            [
                *(
                    override(key, levels[level > 0])
                    for (key, levels), level in zip(self.factors.items(), row, strict=True)
                ),
                *([f"seed={repeat + 1}"] if self.repeats > 1 else []),
            ]
            for repeat in range(self.repeats)
            for row in fractional_design(len(self.factors), resolution)
        ]
        rest = jobs[1:]
        random.Random(self.seed).shuffle(rest)  # noqa: S311 (an order, not a secret)
        return [jobs[0], *rest]


def fractional_design(factors: int, resolution: int) -> list[tuple[int, ...]]:
    """Returns the smallest two-level design: a row a run, -1 or 1 a factor, the first all -1."""
    for base in range(1, factors + 1):
        products = _factor_products(base, resolution)
        added = _design_generators(base, factors - base, resolution, products)
        if added is not None:
            return [(*row, *(_factor_level(row, of) for of in added)) for row in _design_rows(base)]
    raise AssertionError("the whole factorial confuses nothing")


def _design_generators(
    num_base_factors: int,
    num_missing: int,
    resolution: int,
    candidates: Sequence[int],
    words: frozenset[int] = frozenset(),
    chosen: tuple[int, ...] = (),
) -> tuple[int, ...] | None:
    """Returns for each further factor the base factors whose product it is, as bits.

    ``words`` are the products that are constant in the design so far; the shortest one's length is
    the resolution.
    """
    if not num_missing:
        return chosen
    for place, of in enumerate(candidates):
        word = of | 1 << (num_base_factors + len(chosen))
        longer = words | {word} | {known ^ word for known in words}
        if all(one.bit_count() >= resolution for one in longer):
            rest = candidates[place + 1 :]  # in which order they are chosen is all the same
            found = _design_generators(
                num_base_factors, num_missing - 1, resolution, rest, longer, (*chosen, of)
            )
            if found is not None:
                return found
    return None


def _factor_products(num_base_factors: int, resolution: int) -> list[int]:
    """Returns the products of base factors that a further one may be, the longest first."""
    long = [bits for bits in range(1 << num_base_factors) if bits.bit_count() >= resolution - 1]
    return sorted(long, key=lambda bits: (-bits.bit_count(), bits))


def _design_rows(num_base_factors: int) -> Iterator[tuple[int, ...]]:
    for row in product((-1, 1), repeat=num_base_factors):
        yield row[::-1]  # the first factor changes fastest


def _factor_level(row: Sequence[int], generator: int) -> int:
    """Returns a further factor's level: -1 where every factor is, as the sign may be chosen."""
    signs = [level for place, level in enumerate(row) if generator >> place & 1]
    return -1 if sum(level < 0 for level in signs) % 2 == len(signs) % 2 else 1
