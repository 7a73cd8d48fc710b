"""Computed contents of report pages: names, best values, distances and numbers."""

# ruff: noqa: RUF001 - the page writes true minus signs, dashes and times signs

import math
import random
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from scalewise.reports import compare, number_format, report_redaction, sections, summary_sentences
from scalewise.reports.chart_layout import round_ticks, spread_labels
from scalewise.reports.compare import LOSS, PEAK, SPEED, STEP
from scalewise.reports.records import MetricSeries, RunRecord, RunSummary, SweepRecord

GIB = 1024**3


def run(
    number: int, varied: dict[str, Any], losses: list[float] | None = None, **metrics: float
) -> RunRecord:
    metric_keys = {"tokens": SPEED, "step": STEP, "peak": PEAK, "loss": LOSS}
    summary = RunSummary(
        steps=3, metrics={metric_keys.get(key, key): v for key, v in metrics.items()}
    )
    curve = MetricSeries((1, 2, 3), tuple(losses)) if losses else MetricSeries()
    return RunRecord(
        folder=str(number), number=number, status="ok", varied_settings=varied, summary=summary,
        series={LOSS: curve},
    )  # fmt: skip


def sweep(
    axes: dict[str, tuple[Any, ...]], jobs: list[RunRecord], reference: int | None = None
) -> compare.ReportComparison:
    return compare.compare_sweep(
        SweepRecord("s", "s", "", "", "train", None, None, axes, reference, tuple(jobs))
    )


def sweep_of_four() -> compare.ReportComparison:
    axes = {"precision": ("fp32", "bf16_mixed"), "parallelism": ("single", "ddp")}
    job_values = [
        ("fp32", "single", 509.4, 4.02, 3.81, [9.0, 7.0, 6.0]),
        ("fp32", "ddp", 930.0, 2.20, 4.29, [9.0, 7.0, 6.0 + 2e-6]),
        ("bf16_mixed", "single", 784.6, 2.61, 3.65, [9.0, 7.002, 6.004]),
        ("bf16_mixed", "ddp", 1432.2, 1.43, 4.13, [9.0, 7.001, 6.003]),
    ]
    jobs = []
    for number, (precision, strategy, tokens, step, peak, curve) in enumerate(job_values):
        varied = {"precision": precision, "parallelism": strategy}
        metrics = {"tokens": tokens, "step": step, "peak": peak * GIB, "loss": curve[-1]}
        jobs.append(run(number, varied, curve, **metrics))
    return sweep(axes, jobs)


class TestNames:
    def test_job_name_orders_strategy_before_precision(self) -> None:
        assert [j.name for j in sweep_of_four().jobs] == [
            "single · fp32",
            "ddp · fp32",
            "single · bf16",
            "ddp · bf16",
        ]

    def test_job_name_keeps_mixed_if_ambiguous(self) -> None:
        values = ("bf16_mixed", "bf16_true")
        comparison = sweep(
            {"precision": values}, [run(n, {"precision": v}) for n, v in enumerate(values)]
        )
        assert [job.name for job in comparison.jobs] == list(values)

    def test_job_name_numbers_have_their_key(self) -> None:
        comparison = sweep({"optimizer.lr": (1e-3, 0.1)}, [run(0, {"optimizer.lr": 1e-3})])
        assert comparison.jobs[0].name == "lr 0.001"

    def test_equal_job_names_are_numbered(self) -> None:
        comparison = sweep(
            {"precision": ("fp32",)}, [run(n, {"precision": "fp32"}) for n in (0, 1)]
        )
        assert [job.name for job in comparison.jobs] == ["fp32 #0", "fp32 #1"]

    def test_ablation_job_name_is_the_added_setting(self) -> None:
        job_values = [
            ("none", 0, False),
            ("none", 256, False),
            ("full", 256, False),
            ("full", 256, "True"),
        ]
        keys = ("memory", "objective.loss_chunk", "optimizer.in_backward")
        axes = {key: tuple(dict.fromkeys(column)) for key, *column in zip(keys, *job_values)}  # noqa: B905
        jobs = [
            run(n, dict(zip(keys, job_settings, strict=True)))
            for n, job_settings in enumerate(job_values)
        ]
        names = ["baseline", "+ loss_chunk 256", "+ full", "+ in_backward"]
        assert [job.name for job in sweep(axes, jobs).jobs] == names
        parsed_run = run(4, dict(zip(keys, job_values[2], strict=True)))
        assert (
            sweep(axes, [*jobs, parsed_run]).jobs[0].name
            == "none · loss_chunk 0 · in_backward false"
        )

    def test_reference_is_the_first_or_given_job(self) -> None:
        jobs = [run(n, {"precision": p}) for n, p in enumerate(("fp32", "bf16_mixed"))]
        axes = {"precision": ("fp32", "bf16_mixed")}
        assert sweep(axes, jobs).reference.name == "fp32"
        assert sweep(axes, jobs, 1).reference.name == "bf16"


class TestBest:
    def test_marks_the_best(self) -> None:
        assert compare.best_index([1.0, 3.0, None, 2.0], True, number_format.format_whole) == 1
        assert compare.best_index([1.0, 3.0, None, 2.0], False, number_format.format_whole) == 0

    def test_no_mark_if_the_best_print_equally(self) -> None:
        assert compare.best_index([6.14231, 6.14232, 6.2], False, number_format.format_loss) is None

    def test_no_mark_for_a_single_job(self) -> None:
        assert compare.best_index([1.0, None], True, number_format.format_whole) is None
        assert compare.best_index([], True, number_format.format_whole) is None

    def test_pareto_front_has_undominated_jobs(self) -> None:
        assert [job.name for job in sweep_of_four().pareto_front] == ["ddp · bf16", "single · bf16"]

    def test_not_finite_is_never_best(self) -> None:
        jobs = [run(0, {"seed": 0}, tokens=math.nan), run(1, {"seed": 1}, tokens=3.0)]
        assert [j.run.number for j in sweep({"seed": (0, 1)}, jobs).rank_jobs(SPEED, True)] == [1]


class TestDistance:
    def test_distance_uses_common_steps(self) -> None:
        comparison = sweep_of_four()
        assert compare.largest_distance(comparison.jobs[1], comparison.jobs[0]) == pytest.approx(
            2e-6
        )
        assert compare.loss_distance(comparison.jobs[0], comparison.jobs[0]) is None

    def test_distance_skips_nan_steps(self) -> None:
        jobs = [run(0, {"seed": 0}, [3.0, 2.0, 1.0]), run(1, {"seed": 1}, [3.5, math.nan, 1.25])]
        comparison = sweep({"seed": (0, 1)}, jobs)
        assert compare.loss_distance(comparison.jobs[1], comparison.jobs[0]) == MetricSeries(
            (1, 3), (0.5, 0.25)
        )


class TestBreakdown:
    def test_breakdown_other_is_the_remainder(self) -> None:
        job = compare.compare_run(
            run(0, {}, peak=10, **{"memory/parameters_bytes": 4, "memory/activations_bytes": 3})
        ).jobs[0]
        parts = compare.breakdown(job, compare.MEMORY, PEAK, compare.MEMORY_REST)
        assert {name.label: size for name, size in parts.items()} == {
            "parameters": 4,
            "activations": 3,
            "other": 3,
        }

    def test_breakdown_has_no_negative_other(self) -> None:
        job = compare.compare_run(run(0, {}, peak=10, **{"memory/parameters_bytes": 14})).jobs[0]
        assert compare.MEMORY_REST not in compare.breakdown(
            job, compare.MEMORY, PEAK, compare.MEMORY_REST
        )


class TestLttb:
    def test_lttb_keeps_ends_count_and_peak(self) -> None:
        noise = random.Random(1)
        values = [noise.random() for _ in range(1000)]
        values[437] = 50.0
        points = compare.lttb(MetricSeries(tuple(range(1000)), tuple(values)), 60)
        assert len(points.steps) == 60
        assert (points.steps[0], points.steps[-1]) == (0, 999)
        assert 437 in points.steps
        assert list(points.steps) == sorted(set(points.steps))

    @pytest.mark.parametrize("size", [0, 1, 2, 5, 60])
    def test_lttb_keeps_short_series(self, size: int) -> None:
        series = MetricSeries(tuple(range(size)), tuple(float(n) for n in range(size)))
        assert compare.lttb(series, 60) is series

    @pytest.mark.parametrize("size", [61, 62, 119, 120, 121, 179])
    def test_lttb_returns_the_requested_count(self, size: int) -> None:
        points = compare.lttb(MetricSeries(tuple(range(size)), (0.0,) * size), 60)
        assert len(set(points.steps)) == 60


class TestShown:
    def test_large_sweep_shows_reference_front_and_best(self) -> None:
        jobs = [
            run(n, {"seed": n}, tokens=1000.0 - n, step=1 + n, peak=200.0 - n) for n in range(80)
        ]
        comparison = sweep({"seed": tuple(range(80))}, jobs, 70)
        assert len(comparison.charted_jobs) == compare.MAX_CHARTED_JOBS
        assert comparison.reference in comparison.charted_jobs
        assert comparison.pareto_front[0] in comparison.charted_jobs


class TestNumbers:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (number_format.format_fixed(None, 2), "–"),
            (number_format.format_fixed(0.0, 2), "0"),
            (number_format.format_fixed(0.004, 2), "<0.01"),
            (number_format.format_fixed(-2.5, 1), "−2.5"),
            (number_format.format_fixed(math.nan, 2), "not finite"),
            (number_format.format_whole(1432.17), "1,432"),
            (number_format.format_milliseconds(1.43), "1,430"),
            (number_format.format_milliseconds(0.01), "10"),
            (number_format.format_milliseconds(0.00996), "10"),
            (number_format.format_milliseconds(0.0047), "4.7"),
            (number_format.format_milliseconds(0.00052), "0.52"),
            (number_format.format_milliseconds(0.0), "0"),
            (number_format.format_loss(6.14231), "6.1423"),
            (number_format.format_power(3.14e-6), "3.1e−6"),
            (number_format.format_power(0), "0"),
            (number_format.format_ratio(2.81), "2.8×"),
            (number_format.format_ratio(14.4), "14×"),
            (number_format.format_percent(0.266), "27%"),
            (number_format.format_percent(0.001), "<1%"),
            (number_format.memory_unit([4.13 * GIB]).full(4.13 * GIB), "4.13\u00a0GiB"),
            (number_format.memory_unit([5 * 1024**2]).full(5.5 * 1024**2), "5.50\u00a0MiB"),
            (
                number_format.format_instant(datetime(2026, 3, 14, 9, 26, tzinfo=UTC)),
                "14 Mar 2026, 09:26 UTC",
            ),
            (number_format.format_value([True, None, 1e-3]), "[true,null,0.001]"),
            (number_format.format_range("2", "2", "%"), "2%"),
        ],
    )  # fmt: skip
    def test_numbers_are_formatted(self, text: str, expected: str) -> None:
        assert text == expected


class TestSentences:
    def test_summary_sentence_states_the_result(self) -> None:
        summary = (
            summary_sentences.summary_text(sweep_of_four(), number_format.memory_unit([4 * GIB]))
            .striptags()
            .replace("\u00a0", " ")
        )
        assert summary == (
            "ddp · bf16 is fastest at 1,432 tok/s, 2.8× as fast as single · fp32. "
            "single · bf16 uses the least memory, 3.65 GiB, 12% less than ddp · bf16 at 55% of its "
            "throughput. Final losses differ by at most 4.0e−3."
        )

    def test_summary_sentence_without_metrics_claims_nothing(self) -> None:
        jobs = [
            RunRecord("0", 0, "failed", varied_settings={"seed": 0}),
            RunRecord("1", 1, "timeout", varied_settings={"seed": 1}),
        ]
        comparison = sweep({"seed": (0, 1)}, jobs)
        assert (
            summary_sentences.summary_text(comparison, number_format.memory_unit([]))
            == "No job finished: 1 failed, 1 timed out."
        )

    def test_loss_heading_separates_equal_from_lossy_settings(self) -> None:
        assert sections.loss_heading(sweep_of_four()) == (
            "One job matches single · fp32 within 2.0e−6; two jobs differ by 3.0e−3 to 4.0e−3"
        )

    def test_time_heading_reports_a_data_stall(self) -> None:
        job = run(0, {}, step=1.0, **{"time/data_s": 0.4, "time/backward_s": 0.5})
        comparison = sections.part_shares(
            compare.compare_run(job).jobs, compare.TIME, STEP, compare.TIME_REST
        )
        assert sections.time_heading(comparison) == "Waiting for data takes 40% of the step"

    def test_names_are_escaped(self) -> None:
        jobs = [run(n, {"data": v}, tokens=5.0 - n) for n, v in enumerate(("<b>&", "plain"))]
        summary = summary_sentences.summary_text(
            sweep({"data": ("<b>&", "plain")}, jobs), number_format.memory_unit([])
        )
        assert "&lt;b&gt;&amp;" in summary
        assert "<b><b>" not in summary

    @pytest.mark.parametrize(
        "status", ["failed", "out_of_memory", "timeout", "interrupted", "refused"]
    )
    def test_failures_are_counted(self, status: str) -> None:
        comparison = sweep({"seed": (0,)}, [RunRecord("0", 0, status, varied_settings={"seed": 0})])
        assert sections.failed_heading(comparison).startswith("One job ")


class TestLayout:
    @pytest.mark.parametrize(
        ("low", "high"), [(0, 4.13), (5.98, 10.4), (0, 1e-3), (1, 200), (0, 4020)]
    )
    def test_ticks_are_few_and_inside(self, low: float, high: float) -> None:
        ticks = round_ticks(low, high, 4)
        assert 2 <= len(ticks) <= 6
        assert low <= ticks[0] <= ticks[-1] <= high

    def test_labels_stand_apart(self) -> None:
        positions = spread_labels([100.0, 101.0, 102.0, 10.0], 15, 0, 110)
        ordered = sorted(positions)
        assert all(b - a >= 15 - 1e-9 for a, b in pairwise(ordered))
        assert max(positions) <= 110


class TestRedact:
    @pytest.mark.parametrize(
        ("raw", "expected"),
        [
            ("/home/jane/x/train.py", "~/x/train.py"),
            ("/Users/jane: no", "~: no"),
            ("/root/run", "~/run"),
            ("WANDB_API_KEY=abc123 next", "WANDB_API_KEY=[hidden] next"),
            ("hub_token: 'abcdef'", "hub_token: '[hidden]'"),
            ("hf_abcdefghijklmnopqrst", "[hidden]"),
            ("https://jane:pw@host/x", "https://[hidden]@host/x"),
            ("Authorization: Bearer abcdefghijk", "Authorization: Bearer [hidden]"),
            ("data.tokens=512 eos_token=2", "data.tokens=512 eos_token=2"),
            ("\x1b[31mred\x1b[0m\x00", "\\x1b[31mred\\x1b[0m\\x00"),
        ],
    )
    def test_redact_text(self, raw: str, expected: str) -> None:
        assert report_redaction.redact_text(raw) == expected

    def test_redact_removes_terminal_colors(self) -> None:
        escape_sequence = "\x1b[31mred\x1b[0m"
        redacted = report_redaction.redact_values(
            {"log_tail": [escape_sequence], "reason": escape_sequence, "name": escape_sequence}
        )
        escaped_text = "\\x1b[31mred\\x1b[0m"
        assert redacted == {"log_tail": ["red"], "reason": "red", "name": escaped_text}

    def test_redact_tree_hides_secret_keys(self) -> None:
        redacted = report_redaction.redact_values(
            {"changed": [{"key": "hub.api_key", "default": None, "value": 7}], "password": "x"}
        )
        assert redacted == {
            "changed": [{"key": "hub.api_key", "default": None, "value": "[hidden]"}],
            "password": "[hidden]",
        }
