"""Fractional factorial designs, their effects and report pages."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from fixtures.run_folders import make_sweep

from scalewise.hpo.screen import ScreeningDesign, fractional_design
from scalewise.reports import compare, factorial_report, html_report, records, report_model
from scalewise.reports.factorial_report import FactorEffects, factor_effects, student_t_95
from scalewise.reports.records import SweepRecord

FACTORS = {
    "precision": ["fp32", "bf16_mixed"],
    "memory": ["none", "checkpoint_full"],
    "compile": ["none", "block"],
    "objective.loss_chunk": [None, 64],
}


def resolution(rows: Sequence[Sequence[int]]) -> float:
    """Smallest number of columns whose product is constant, by exhaustive search."""
    columns = range(len(rows[0]))
    for size in range(1, len(rows[0]) + 1):
        for subset in combinations(columns, size):
            if abs(sum(math.prod(row[column] for column in subset) for row in rows)) == len(rows):
                return size
    return math.inf


class TestDesigns:
    @pytest.mark.parametrize(
        ("factors", "expected", "runs"),
        # Box, Hunter and Hunter, 2nd edition, table 6.22; NIST/SEMATECH e-Handbook, 5.3.3.4.7
        [
            (3, 4, 8), (4, 4, 8), (5, 4, 16), (6, 4, 16), (7, 4, 16), (8, 4, 16), (9, 4, 32),
            (11, 4, 32), (3, 5, 8), (4, 5, 16), (5, 5, 16), (6, 5, 32), (7, 5, 64), (8, 5, 64),
            (9, 5, 128), (10, 5, 128), (11, 5, 128),
        ],
    )  # fmt: skip
    def test_designs_have_published_sizes(self, factors: int, expected: int, runs: int) -> None:
        rows = fractional_design(factors, expected)
        assert len(rows) == len(set(rows)) == runs
        assert resolution(rows) >= expected
        assert all(sum(column) == 0 for column in zip(*rows, strict=True))
        assert set(rows[0]) == {-1}

    def test_designs_start_with_defaults_and_seed_each_repeat(self) -> None:
        jobs = ScreeningDesign(FACTORS, repeats=3).build_overrides()
        assert len(jobs) == 24
        assert jobs[0] == [
            "precision=fp32", "memory=none", "compile=none", "objective.loss_chunk=null", "seed=1",
        ]  # fmt: skip
        assert len({tuple(job) for job in jobs}) == 24
        assert [job[-1] for job in jobs].count("seed=3") == 8
        assert jobs == ScreeningDesign(FACTORS, repeats=3).build_overrides()
        assert jobs != ScreeningDesign(FACTORS, repeats=3, seed=2).build_overrides()

    def test_designs_of_one_repeat_set_no_seed(self) -> None:
        jobs = ScreeningDesign(FACTORS, interactions=True, repeats=1).build_overrides()
        assert len(jobs) == 16
        assert not any(override.startswith("seed") for job in jobs for override in job)

    @pytest.mark.parametrize(
        ("screen", "fixed", "words"),
        [
            (ScreeningDesign({}), [], ["2 to 11 factors"]),
            (ScreeningDesign("precision"), [], ["2 to 11 factors"]),  # type: ignore[arg-type]  # as YAML may
            (
                ScreeningDesign({**FACTORS, "a": [1], "b": [1, 1], "c": "ab"}),
                [],
                ["a=", "b=", "c="],
            ),
            (ScreeningDesign(FACTORS, repeats=0), [], ["repeats"]),
            (ScreeningDesign(FACTORS), ["seed"], ["has its own seed"]),
            (ScreeningDesign(FACTORS), ["memory"], ["is a factor"]),
        ],
    )
    def test_invalid_designs_are_rejected(
        self, screen: ScreeningDesign, fixed: list[str], words: list[str]
    ) -> None:
        messages = "\n".join(str(issue) for issue in screen.validate(fixed))
        assert all(word in messages for word in words), messages

    def test_valid_designs_are_accepted(self) -> None:
        assert list(ScreeningDesign(FACTORS).validate(["model"])) == []


def change_by_name(effects: FactorEffects) -> dict[str, float]:
    return {" x ".join(effect.name): effect.change for effect in effects.effects}


class TestEffects:
    def test_effects_recover_known_factors(self) -> None:
        """Times with known factors: 0.5 for a, 1.3 for b and 0.9 for both."""
        rows = list(product((-1, 1), repeat=3))
        times = [
            8.0 * (0.5 if a > 0 else 1) * (1.3 if b > 0 else 1) * (0.9 if a > 0 < b else 1)
            for a, b, _ in rows
        ]
        levels = {name: [row[column] for row in rows] for column, name in enumerate("abc")}
        changes = change_by_name(factor_effects(levels, times))
        assert changes["a"] == pytest.approx(0.5 * math.sqrt(0.9) - 1)
        assert changes["b"] == pytest.approx(1.3 * math.sqrt(0.9) - 1)
        assert changes["a x b"] == pytest.approx(math.sqrt(0.9) - 1)
        assert changes["c"] == pytest.approx(0, abs=1e-12)
        assert next(iter(changes)) == "a"

    def test_effects_equal_a_published_example(self) -> None:
        """Pilot plant of Box, Hunter and Hunter, 2nd edition, tables 5.2 and 5.3.

        Two runs for each of eight settings of temperature, concentration and catalyst. The effects
        are 23, -5 and 1.5, and 10 for temperature with catalyst; the variance of a run is 8. The
        interaction of all three, 0.5, counts as noise here.
        """
        pairs = [(59, 61), (74, 70), (50, 58), (69, 67), (50, 54), (81, 85), (46, 44), (79, 81)]
        rows = [row[::-1] for row in product((-1, 1), repeat=3)]
        scale = 100  # yields as logarithms, small enough to be exponents
        levels = {
            name: [row[column] for row in rows for _ in range(2)]
            for column, name in enumerate("TCK")
        }
        effects = factor_effects(levels, [math.exp(y / scale) for pair in pairs for y in pair])
        changes = {
            name: scale * math.log1p(change) for name, change in change_by_name(effects).items()
        }
        assert changes == {
            "T": pytest.approx(23),
            "C": pytest.approx(-5),
            "K": pytest.approx(1.5),
            "T x C": pytest.approx(1.5),
            "T x K": pytest.approx(10),
            "C x K": pytest.approx(0, abs=1e-9),
        }
        assert effects.degrees_of_freedom == 9
        sum_of_squares = 8 * 8 + 16 * 0.25**2  # from the repeats and the omitted effect
        half_width = 2.262 * 2 * math.sqrt(sum_of_squares / 9 / 16)
        for effect in effects.effects:
            assert effect.low is not None
            low, change = scale * math.log1p(effect.low), scale * math.log1p(effect.change)
            assert change - low == pytest.approx(half_width, rel=1e-3), effect
        assert {effect.name for effect in effects.effects if effect.is_significant} == {
            ("T",), ("C",), ("T", "K"),
        }  # fmt: skip

    def test_effect_intervals_have_nominal_coverage(self) -> None:
        rng, num_covered = random.Random(3), 0
        rows = fractional_design(4, 4) * 2
        levels = {name: [row[column] for row in rows] for column, name in enumerate("abcd")}
        for _ in range(400):
            times = [math.exp(0.1 * row[0] + rng.gauss(0, 0.05)) for row in rows]
            (effect,) = [e for e in factor_effects(levels, times).effects if e.name == ("a",)]
            assert effect.low is not None
            assert effect.high is not None
            num_covered += effect.low <= math.expm1(0.2) <= effect.high
        assert 0.92 <= num_covered / 400 <= 0.98

    def test_aliased_interactions_are_named(self) -> None:
        rows = fractional_design(4, 4)
        levels = {name: [row[column] for row in rows] for column, name in enumerate("abcd")}
        effects = factor_effects(levels, [1.0 + 0.1 * (row[0] > 0) for row in rows])
        aliases = {effect.name: effect.aliases for effect in effects.effects if effect.aliases}
        assert aliases == {
            ("a", "b"): (("c", "d"),),
            ("a", "c"): (("b", "d"),),
            ("a", "d"): (("b", "c"),),
        }
        assert effects.degrees_of_freedom == 0
        assert all(effect.low is None and not effect.is_significant for effect in effects.effects)

    def test_effects_lose_failed_jobs(self) -> None:
        rows = fractional_design(3, 4)[:-2]
        levels = {name: [row[column] for row in rows] for column, name in enumerate("abc")}
        times = [math.exp(0.2 * row[0] - 0.1 * row[1]) for row in rows]
        effects = factor_effects(levels, times)
        assert len(effects.effects) + len(effects.inestimable) == 6
        assert effects.inestimable
        assert change_by_name(effects)["a"] == pytest.approx(math.expm1(0.4))
        assert change_by_name(effects)["b"] == pytest.approx(math.expm1(-0.2))

    @pytest.mark.parametrize(
        ("degrees_of_freedom", "t"),
        [(1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (1000, 1.962)],
    )
    def test_student_t_quantiles_equal_tables(self, degrees_of_freedom: int, t: float) -> None:
        assert student_t_95(degrees_of_freedom) == pytest.approx(t, abs=6e-4)


def screen_job(number: int, varied: dict[str, Any]) -> dict[str, Any]:
    noise = random.Random(number).gauss(0, 0.001)
    fast = 0.6 if varied["precision"] == "bf16_mixed" else 1.0
    slowdown, memory_ratio = (1.3, 0.5) if varied["memory"] == "checkpoint_full" else (1.0, 1.0)
    return {
        "step_s": 2 * fast * slowdown * math.exp(noise),
        "peak_gib": 4 * memory_ratio,
        "seed": number,
    }


class TestPage:
    def screened(self, folder: Path, job: Any = screen_job, **more: list[Any]) -> SweepRecord:
        values = ["none", "block"]
        axes = {**{k: v for k, v in FACTORS.items() if k != "compile"}, "compile": values, **more}
        record = records.read_record(make_sweep(folder, axes, job))
        assert isinstance(record, SweepRecord)
        return record

    def test_screening_page_lists_effects(self, tmp_path: Path) -> None:
        sweep = self.screened(tmp_path / "screen", seed=[1, 2])
        section = factorial_report.screening_section(compare.compare_sweep(sweep))
        assert section is not None
        assert section.finding == (
            "Precision bf16_mixed changes step time most (\u221240%) and "
            "memory checkpoint_full changes peak memory most (\u221250%)"
        )
        assert [panel.title for panel in section.panels] == ["Step time", "Peak memory"]
        assert section.numbers is not None
        assert len(section.numbers.rows) == 10
        rows = dict(section.numbers.rows)
        assert rows["memory checkpoint_full"][0] == "+30%"
        assert rows["memory checkpoint_full"][2] == "\u221250%"
        html = html_report.build_page(report_model.build_report(sweep))
        assert 'id="effects"' in html
        assert "precision \u00d7 memory" in html

    def test_screening_page_without_repeats_names_the_largest(self, tmp_path: Path) -> None:
        def job(number: int, varied: dict[str, Any]) -> dict[str, Any] | None:
            signs = [list(FACTORS[key]).index(value) for key, value in varied.items()]
            return None if sum(signs) % 2 else screen_job(number, varied)  # half a factorial

        section = factorial_report.screening_section(
            compare.compare_sweep(self.screened(tmp_path / "screen", job))
        )
        assert section is not None
        assert "changes step time most (\u221240%)" in section.finding
        notes = " ".join(str(note) for note in section.notes)
        assert "No intervals" in notes
        assert "precision \u00d7 memory = loss_chunk \u00d7 compile" in notes

    def test_other_sweeps_have_no_screening_page(self, sweep_folder: Path) -> None:
        record = records.read_record(sweep_folder)
        assert isinstance(record, SweepRecord)
        assert factorial_report.screening_section(compare.compare_sweep(record)) is None
        assert 'id="effects"' not in html_report.build_page(report_model.build_report(record))

    def test_three_values_are_not_a_screening(self, tmp_path: Path) -> None:
        sweep = self.screened(tmp_path / "screen", **{"optimizer.lr": [1, 2, 3]})
        assert factorial_report.screening_section(compare.compare_sweep(sweep)) is None

    def test_screening_page_names_failed_jobs(self, tmp_path: Path) -> None:
        def job(number: int, varied: dict[str, Any]) -> dict[str, Any] | None:
            return None if number > 9 else screen_job(number, varied)

        section = factorial_report.screening_section(
            compare.compare_sweep(self.screened(tmp_path / "screen", job))
        )
        assert section is not None
        assert any("Not estimable" in str(note) for note in section.notes)
