"""Effects of changes in sweeps: ablation steps, paired effects and importance."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.run_folders import ABLATION, GRID, ablation_job, grid_job, make_sweep

from scalewise.reports import (
    ablation_effects,
    compare,
    importance,
    number_format,
    parallel_coordinates,
    records,
    report_model,
    sections,
)
from scalewise.reports.compare import LOSS, PEAK, STEP, ReportComparison
from scalewise.reports.records import RunRecord, RunSummary, SettingChange, SweepRecord
from scalewise.reports.sections import ReportSection

GIB = 1024**3
UNIT = number_format.memory_unit([GIB])


def run(number: int, varied: dict[str, Any], **metrics: float) -> RunRecord:
    metric_keys = {"step": STEP, "peak": PEAK, "loss": LOSS}
    summary = RunSummary(metrics={metric_keys[key]: value for key, value in metrics.items()})
    return RunRecord(str(number), number, "ok", varied_settings=varied, summary=summary)


def sweep(axes: dict[str, tuple[Any, ...]], jobs: list[RunRecord]) -> ReportComparison:
    return compare.compare_sweep(
        SweepRecord("s", "s", "", "", "train", None, None, axes, None, tuple(jobs))
    )


def ablation_steps(*settings: dict[str, Any]) -> ReportComparison:
    jobs = [
        RunRecord(
            str(n), n, "ok", varied_settings={"experiment": f"e{n}"},
            changed_settings=tuple(SettingChange(k, None, v) for k, v in changes.items()),
            summary=RunSummary(metrics={STEP: 1.0 + n}),
        )
        for n, changes in enumerate(settings)
    ]  # fmt: skip
    return sweep({"experiment": tuple(f"e{n}" for n in range(len(jobs)))}, jobs)


def test_times_of_concurrent_jobs_are_not_compared(tmp_path: Path) -> None:
    at = {"started": "2026-03-14T09:26:53+00:00", "ended": "2026-03-14T09:32:04+00:00"}
    make_sweep(tmp_path, GRID, lambda number, varied: grid_job(number, varied) | at)
    record = records.read_record(tmp_path)
    assert isinstance(record, SweepRecord)
    section = ablation_effects.changes_section(compare.compare_sweep(record), UNIT)
    assert section is not None
    assert ablation_effects.OVERSUBSCRIBED_NOTE in section.notes
    text = " ".join([str(section.finding), *map(str, section.bullets)])
    assert "memory" in text
    assert "time" not in text
    assert "step" not in text


class TestEffect:
    @pytest.mark.parametrize(
        ("time", "memory", "expected"),
        [
            (1.07, 0.56, "reduced peak memory by 44% and increased step time by 7%"),
            (0.8, 1.03, "reduced step time by 20% and increased peak memory by 3%"),
            (0.8, 0.9, "reduced peak memory by 10% and step time by 20%"),
            (1.07, 1.2, "increased peak memory by 20% and step time by 7%"),
            (1.0, 0.5, "reduced peak memory by 50% and did not change step time"),
            (1.0, 1.5, "increased peak memory by 50% and did not change step time"),
            (2.8, 0.5, "reduced peak memory by 50% and increased step time to 2.8×"),  # noqa: RUF001
            (1.001, 0.999, "did not change peak memory or step time"),
            (0.8, None, "reduced step time by 20%"),
            (1.0, None, "did not change step time"),
            (None, None, ""),
        ],
    )
    def test_effect_is_formatted(
        self, time: float | None, memory: float | None, expected: str
    ) -> None:
        assert ablation_effects.effect_text(time, memory) == expected


class TestAblation:
    def test_ablation_steps_are_cumulative(self) -> None:
        ablation = ablation_effects.as_ablation(
            ablation_steps({"seed": 1}, {"seed": 1, "a": 2}, {"seed": 1, "a": 2, "b": 3})
        )
        assert [ablation_step.added_overrides for ablation_step in ablation] == [
            (),
            ("a=2",),
            ("b=3",),
        ]

    def test_ablation_omits_fields_of_a_new_option(self) -> None:
        new = {"memory": "x", "memory.every": 2}
        ablation = ablation_effects.as_ablation(ablation_steps({}, new, new | {"b": 3}))
        assert ablation[1].added_overrides == ("memory=x",)

    def test_ablation_step_may_drop_an_unused_compiler(self) -> None:
        compiled = {"a": 1, "compile": "block"}
        ablation = ablation_effects.as_ablation(
            ablation_steps({}, {"a": 1}, compiled, {"a": 1, "b": 2})
        )
        assert ablation[-1].added_overrides == ("b=2", "without compile=block")

    def test_ablation_step_may_return_to_the_compilation_of_the_first_job(self) -> None:
        """``compile=none`` is listed as a changed setting, because the default is ``auto``."""
        eager, compiled = {"compile": "none"}, {"compile": "block"}
        ablation = ablation_effects.as_ablation(
            ablation_steps(eager, eager | {"a": 1}, compiled | {"a": 1}, eager | {"a": 1, "b": 2})
        )
        assert ablation[-1].added_overrides == ("b=2", "without compile=block")

    @pytest.mark.parametrize(
        "settings",
        [
            ({}, {"a": 1}),
            ({}, {"compile": "block"}, {"a": 1}),
            ({}, {"a": 1}, {"a": 1, "compile": "block"}, {"a": 1}),
            ({}, {"a": 1}, {"a": 2}),
            ({}, {"a": 1}, {"b": 1}),
            ({}, {"a": 1}, {"a": 1}),
            ({}, {"a": 1}, {"a": 1, "b": 1, "c": 1, "d": 1}),
        ],
        ids=[
            "two",
            "one at a time",
            "compile only",
            "one setting twice",
            "reverted",
            "no change",
            "several changes",
        ],
    )
    def test_ablation_is_not_detected_for_other_sweeps(
        self, settings: tuple[dict[str, Any], ...]
    ) -> None:
        assert ablation_effects.as_ablation(ablation_steps(*settings)) == ()

    def test_ablation_ignores_names_and_paths(self) -> None:
        ignored_settings = [
            {"question": n, "launch.timeout": n, "tracking.group": n} for n in range(3)
        ]
        assert ablation_effects.as_ablation(ablation_steps(*ignored_settings)) == ()

    def test_ablation_is_described_step_by_step(self, tmp_path: Path) -> None:
        section = part(make_sweep(tmp_path / "s", ABLATION, ablation_job), "changes")
        assert section.topic == "Ablation"
        assert section.finding == (
            "Four techniques together reduced peak memory by 78% and step time by 36%"
        )
        assert [sentence.striptags() for sentence in section.bullets] == [
            "bf16 (precision=bf16_mixed) reduced peak memory by 30% and step time by 38%.",
            "block (compile=block) reduced peak memory by 4% and step time by 19%.",
            "less (memory=checkpoint_full) reduced peak memory by 43% and increased step time "
            "by 22%.",
            "fsdp (parallelism=fsdp) reduced peak memory by 42% and increased step time by 5%.",
        ]
        last = dict(section.numbers.rows)["fsdp"]
        assert last[:4] == ("parallelism=fsdp", "640", "621", "+4.9%")
        assert last[4:8] == ("−36.0%", "1.80", "1.85", "−41.9%")  # noqa: RUF001
        assert last[9] == "192"


class TestPairedEffects:
    def test_effect_pairs_differ_in_one_setting(self, tmp_path: Path) -> None:
        swaps = {
            (swap.key, swap.value): swap
            for swap in ablation_effects.value_swaps(
                comparison(make_sweep(tmp_path / "s", GRID, grid_job))
            )
        }
        assert swaps["precision", "bf16_mixed"].pairs == 8
        assert swaps["precision", "bf16_mixed"].time_ratio == pytest.approx(0.7)
        assert swaps["precision", "bf16_mixed"].memory_ratio == pytest.approx(0.75)
        assert swaps["parallelism", "ddp"].pairs == 5
        assert swaps["parallelism", "ddp"].time_ratio == pytest.approx(0.6)
        assert ("parallelism", "single") not in swaps

    def test_effects_are_sorted_and_zero_effects_grouped(self, tmp_path: Path) -> None:
        section = part(make_sweep(tmp_path / "s", GRID, grid_job), "changes")
        assert section.finding == (
            "ddp instead of single reduced step time by 40% and increased peak memory by 5%, "
            "over five pairs of jobs"
        )
        sentences = [sentence.striptags() for sentence in section.bullets]
        assert sentences[0].startswith(
            "fsdp instead of single reduced peak memory by 40% and step time by 35%"
        )
        assert len(sentences) == 3
        assert sentences[-1] == "optimizer.lr changed step time and peak memory by less than 2%."

    def test_effect_of_one_setting_is_relative_to_the_reference(self) -> None:
        jobs = [run(n, {"parallelism": p}, step=1.0 - 0.1 * n, peak=GIB * (2 + n))
                for n, p in enumerate(("single", "ddp", "fsdp"))]  # fmt: skip
        section = ablation_effects.changes_section(
            sweep({"parallelism": ("single", "ddp", "fsdp")}, jobs), UNIT
        )
        assert section is not None
        assert section.finding == (
            "fsdp reduced step time by 20% and increased peak memory to 2.0×"  # noqa: RUF001
        )
        assert section.notes[0].startswith("Compared with single:")

    def test_effects_of_two_jobs_have_no_empty_figure(self) -> None:
        jobs = [run(n, {"parallelism": p}, step=1.0 - 0.1 * n, peak=GIB)
                for n, p in enumerate(("single", "ddp"))]  # fmt: skip
        section = ablation_effects.changes_section(
            sweep({"parallelism": ("single", "ddp")}, jobs), UNIT
        )
        assert section is not None
        assert section.notes == ()
        assert section.bullets[0].startswith("Compared with single:")

    def test_effects_average_over_seeds(self) -> None:
        settings = [(p, seed) for p in ("single", "ddp") for seed in (1, 2)]
        jobs = [run(n, {"parallelism": p, "seed": seed}, step=(2.0, 2.2, 1.0, 1.1)[n], peak=GIB)
                for n, (p, seed) in enumerate(settings)]  # fmt: skip
        (only_swap,) = ablation_effects.value_swaps(
            sweep({"parallelism": ("single", "ddp"), "seed": (1, 2)}, jobs)
        )
        assert (only_swap.value, only_swap.pairs) == ("ddp", 2)
        assert only_swap.time_ratio == pytest.approx(0.5)
        assert ablation_effects.changes_section(sweep({"seed": (1, 2)}, jobs[:2]), UNIT) is None

    def test_effects_require_a_measured_pair(self) -> None:
        jobs = [RunRecord(str(n), n, "failed", varied_settings={"seed": n}) for n in range(3)]
        assert ablation_effects.changes_section(sweep({"seed": (0, 1, 2)}, jobs), UNIT) is None


def comparison(folder: Path) -> ReportComparison:
    return report_model.build_report(records.read_record(folder)).comparison


def part(folder: Path, anchor: str) -> Any:
    (report_part,) = [
        p
        for p in report_model.build_report(records.read_record(folder)).parts
        if p.anchor == anchor
    ]
    assert isinstance(report_part, ReportSection)
    return report_part


class TestImportance:
    def test_importance_of_a_full_grid_sums_to_one(self, tmp_path: Path) -> None:
        """The shares of additive effects on the logarithm are shares of its variance."""
        shares_by_axis = importance.variance_shares(
            comparison(make_sweep(tmp_path / "s", GRID, grid_job)), STEP, np.log
        )
        assert sum(shares_by_axis.values()) == pytest.approx(1, abs=0.1)
        assert max(shares_by_axis, key=lambda key: shares_by_axis[key]) == "parallelism"
        assert shares_by_axis["optimizer.lr"] == 0

    def test_importance_equals_a_published_anova(self) -> None:
        """Dried plant weights (A. J. Dobson, 1983; R's PlantGrowth): F is 4.8461 on 2 and 27.

        Epsilon squared is (F - 1) 2 / (2 F + 27).
        """
        weights = {
            "control": (4.17, 5.58, 5.18, 6.11, 4.50, 4.61, 5.17, 4.53, 5.33, 5.14),
            "one": (4.81, 4.17, 4.41, 3.59, 5.87, 3.83, 6.03, 4.89, 4.32, 4.69),
            "other": (6.31, 5.12, 5.54, 5.50, 5.37, 5.29, 4.92, 6.15, 5.80, 5.26),
        }
        axis_weights = [
            (name, weight) for name, shares_by_axis in weights.items() for weight in shares_by_axis
        ]
        jobs = [
            run(n, {"data": name}, loss=weight) for n, (name, weight) in enumerate(axis_weights)
        ]
        shares_by_axis = importance.variance_shares(sweep({"data": tuple(weights)}, jobs), LOSS)
        assert shares_by_axis["data"] == pytest.approx(
            (4.8461 - 1) * 2 / (2 * 4.8461 + 27), abs=1e-4
        )

    def test_importance_ranks_unique_numbers(self) -> None:
        rates = [10.0**-n for n in range(8)]
        jobs = [run(n, {"optimizer.lr": r, "seed": n % 2}, loss=float(n) ** 3 + 1)
                for n, r in enumerate(rates)]  # fmt: skip
        shares_by_axis = importance.variance_shares(
            sweep({"optimizer.lr": tuple(rates), "seed": (0, 1)}, jobs), LOSS
        )
        assert shares_by_axis["optimizer.lr"] == pytest.approx(1)

    def test_importance_omits_unique_words(self) -> None:
        jobs = [run(n, {"data": f"d{n}", "seed": n % 2}, loss=1.0 + n) for n in range(6)]
        axes = {"data": tuple(f"d{n}" for n in range(6)), "seed": (0, 1)}
        assert set(importance.variance_shares(sweep(axes, jobs), LOSS)) == {"seed"}

    @pytest.mark.parametrize("count", [1, 3])
    def test_importance_requires_enough_jobs(self, count: int) -> None:
        jobs = [run(n, {"a": n % 2, "b": n // 2}, loss=1.0 + n) for n in range(count)]
        assert importance.importance_section(sweep({"a": (0, 1), "b": (0, 1)}, jobs)) is None

    def test_importance_of_a_constant_metric_is_omitted(self) -> None:
        jobs = [run(n, {"a": n % 2, "b": n // 2}, loss=3.0 + 1e-5 * n) for n in range(4)]
        assert importance.variance_shares(sweep({"a": (0, 1), "b": (0, 1)}, jobs), LOSS) == {}

    def test_importance_is_corrected_for_chance(self) -> None:
        """Without the correction, a setting with many values would explain pure noise."""
        noise, share_samples = np.random.default_rng(3), []
        for _ in range(100):
            jobs = [run(n, {"a": n % 8, "b": n % 2}, loss=float(math.exp(noise.normal())))
                    for n in range(16)]  # fmt: skip
            share_samples.append(
                importance.variance_shares(sweep({"a": tuple(range(8)), "b": (0, 1)}, jobs), LOSS)[
                    "a"
                ]
            )
        assert np.mean(share_samples) < 0.25


class TestCoordinates:
    def test_coordinates_have_an_axis_per_setting_and_result(self, tmp_path: Path) -> None:
        section = part(make_sweep(tmp_path / "s", GRID, grid_job), "coordinates")
        (panel,) = section.wandb_panels
        assert [label for _, label in panel.panel.axes] == [
            "parallelism", "precision", "optimizer.lr", "step, ms", "peak, GiB", "train loss",
        ]  # fmt: skip
        assert section.finding == "The four fastest jobs have precision=bf16_mixed in common"

    def test_coordinates_use_logged_setting_keys(self, tmp_path: Path) -> None:
        section = part(make_sweep(tmp_path / "s", GRID, grid_job), "coordinates")
        names = [axis.name for axis, _ in section.wandb_panels[0].panel.axes]
        assert names[:3] == ["choices.parallelism", "choices.precision", "optimizer.lr"]
        assert names[3:] == [f"final/{key}" for key in (STEP, PEAK, LOSS)]

    def test_coordinates_require_more_than_two_jobs(self) -> None:
        jobs = [run(n, {"seed": n}, step=1.0 + n, peak=GIB) for n in range(2)]
        assert parallel_coordinates.coordinates_section(sweep({"seed": (0, 1)}, jobs), UNIT) is None


def test_job_that_never_started_did_not_run() -> None:
    start_time = datetime(2026, 3, 14, tzinfo=UTC)
    jobs = [
        RunRecord("0", 0, "ok", varied_settings={"seed": 1}, started=start_time),
        RunRecord("1", 1, "interrupted", varied_settings={"seed": 2}),
    ]
    text = sections.matrix_heading(sweep({"seed": (1, 2)}, jobs))
    assert text.endswith("one of two jobs ran")


def test_matrix_heading_counts_settings_if_many_vary() -> None:
    axes = dict.fromkeys(("seed", "model.layers", "model.width", "trainer.max_steps"), (1, 2))
    jobs = [RunRecord(str(n), n, "ok", varied_settings=dict.fromkeys(axes, n)) for n in (1, 2)]
    heading = sections.matrix_heading(sweep(axes, jobs))
    assert heading.startswith("Four varied settings, ")
