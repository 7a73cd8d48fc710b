"""Two-level fractional factorial designs for factorial screening. Standard library only.

After G. E. P. Box, J. S. Hunter and W. G. Hunter, Statistics for Experimenters, 2nd edition,
2005, chapter 6. A design of resolution R does not confound effects of p factors with effects of
fewer than R - p factors: resolution IV separates main effects from two-factor interactions,
resolution V also separates two-factor interactions from each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from scalewise.errors import ConfigIssue, format_value
from scalewise.hpo.space import job_count_issues
from scalewise.typed_override import override, shell_word

MAX_FACTORS = 11
"""Maximum number of factors; a design of resolution V then has 128 jobs."""

MAIN_EFFECTS, INTERACTIONS = 4, 5
"""Resolutions: main effects clear of interactions; interactions clear of each other too."""


@dataclass(frozen=True)
class ScreeningDesign:
    """Options of a factorial screening."""

    factors: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Two levels of each factor by key, the default first."""
    interactions: bool = False
    """Whether two-factor interactions are separated from each other."""
    repeats: int = 2
    """Number of jobs of each combination, each with its own seed."""
    seed: int = 1
    """Seed of the job order."""

    def validate(self, fixed_keys: Sequence[str]) -> Iterator[ConfigIssue]:
        """Yield the issues of the options; ``fixed_keys`` are keys with one value for all jobs."""
        key = "hydra.sweeper"
        if not isinstance(self.factors, Mapping) or not 2 <= len(self.factors) <= MAX_FACTORS:
            reason = f"must have 2 to {MAX_FACTORS} factors with two levels each"
            example = {"precision": ["fp32", "bf16_mixed"], "memory": ["none", "checkpoint_full"]}
            fix = "set " + shell_word("+" + override(f"{key}.factors", example))
            yield ConfigIssue(f"{key}.factors", format_value(self.factors), reason, fix)
            return
        for name, levels in self.factors.items():
            is_list = isinstance(levels, Sequence) and not isinstance(levels, str)
            if not is_list or len(levels) != 2 or levels[0] == levels[1]:
                yield ConfigIssue(
                    f"{key}.factors.{name}", levels, "must be a list of two different values"
                )
            if name in fixed_keys:
                fix = f"remove it, or remove it from {key}.factors"
                yield ConfigIssue(
                    name, "", "is a factor of the screening and has a fixed value", fix
                )
        if self.repeats < 1:
            yield ConfigIssue(f"{key}.repeats", self.repeats, "must be 1 or more")
        resolution = INTERACTIONS if self.interactions else MAIN_EFFECTS
        jobs = self.repeats * len(fractional_design(len(self.factors), resolution))
        yield from job_count_issues(f"{key}.repeats", self.repeats, jobs)
        if "seed" in fixed_keys and self.repeats > 1:
            fix = f"remove it, or set {key}.repeats=1"
            yield ConfigIssue("seed", "", "each repeat has its own seed", fix)

    def build_overrides(self) -> list[list[str]]:
        """Overrides of each job; the first job has the default level of every factor.

        The other jobs are in random order, so that a drift in machine speed affects all levels.
        """
        resolution = INTERACTIONS if self.interactions else MAIN_EFFECTS
        jobs = [
            [
                *(
                    override(key, levels[level > 0])
                    for (key, levels), level in zip(self.factors.items(), signs, strict=True)
                ),
                *([f"seed={repeat + 1}"] if self.repeats > 1 else []),
            ]
            for repeat in range(self.repeats)
            for signs in fractional_design(len(self.factors), resolution)
        ]
        other_jobs = jobs[1:]
        random.Random(self.seed).shuffle(other_jobs)  # noqa: S311 (an order, not a secret)
        return [jobs[0], *other_jobs]


def fractional_design(factors: int, resolution: int) -> list[tuple[int, ...]]:
    """Smallest two-level design: factor levels (-1 or 1) by run; the first run is all -1."""
    for num_base in range(1, factors + 1):
        products = _factor_products(num_base, resolution)
        generators = _design_generators(num_base, factors - num_base, resolution, products)
        if generators is not None:
            return [
                (*signs, *(_factor_level(signs, generator) for generator in generators))
                for signs in _base_runs(num_base)
            ]
    raise AssertionError("the full factorial has every resolution")


def _design_generators(
    num_base_factors: int,
    num_missing: int,
    resolution: int,
    candidates: Sequence[int],
    words: frozenset[int] = frozenset(),
    chosen: tuple[int, ...] = (),
) -> tuple[int, ...] | None:
    """Generators for the remaining factors, as bit masks of base factors; None if impossible.

    ``words`` are the defining words of the design so far; the shortest sets the resolution.
    """
    if not num_missing:
        return chosen
    for index, generator in enumerate(candidates):
        word = generator | 1 << (num_base_factors + len(chosen))
        new_words = words | {word} | {old_word ^ word for old_word in words}
        if all(defining_word.bit_count() >= resolution for defining_word in new_words):
            # The order of the generators does not matter.
            later_candidates = candidates[index + 1 :]
            generators = _design_generators(
                num_base_factors,
                num_missing - 1,
                resolution,
                later_candidates,
                new_words,
                (*chosen, generator),
            )
            if generators is not None:
                return generators
    return None


def _factor_products(num_base_factors: int, resolution: int) -> list[int]:
    """Products of base factors that may generate a factor, as bit masks, longest first."""
    masks = [bits for bits in range(1 << num_base_factors) if bits.bit_count() >= resolution - 1]
    return sorted(masks, key=lambda bits: (-bits.bit_count(), bits))


def _base_runs(num_base_factors: int) -> Iterator[tuple[int, ...]]:
    for levels in product((-1, 1), repeat=num_base_factors):
        yield levels[::-1]  # the first factor changes fastest


def _factor_level(base_levels: Sequence[int], generator: int) -> int:
    """Level of a generated factor, with the sign that makes it -1 if all base factors are -1."""
    signs = [level for index, level in enumerate(base_levels) if generator >> index & 1]
    return -1 if sum(level < 0 for level in signs) % 2 == len(signs) % 2 else 1
