"""Report pages of runs and sweeps: complete, failed and with hostile strings."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fixtures.report_pages import part, text_of, words
from fixtures.run_folders import (
    LARGE_GRID,
    STRATEGY_GRID,
    large_job,
    make_run,
    make_sweep,
    out_of_memory,
    plan_record,
    strategy_job,
)

from scalewise.reports import records
from scalewise.reports.html_report import write_page
from scalewise.run_files import RecordError


class TestRun:
    def test_run_page_has_its_sections(self, run_folder: Path) -> None:
        source = text_of(write_page(run_folder))
        assert re.findall(r'<section id="(\w+)">', source) == [
            "memory",
            "time",
            "loss",
            "throughput",
            "reproduce",
        ]
        assert "Train loss fell from" in words(source)

    def test_page_is_written_without_a_temporary_file(self, run_folder: Path) -> None:
        before = set(run_folder.iterdir())
        assert write_page(run_folder) == run_folder / "report.html"
        assert set(run_folder.iterdir()) - before == {run_folder / "report.html"}

    def test_page_is_deterministic(self, run_folder: Path) -> None:
        first = write_page(run_folder).read_bytes()
        assert write_page(run_folder).read_bytes() == first

    def test_page_loads_no_remote_resource(self, run_folder: Path) -> None:
        source = text_of(write_page(run_folder))
        assert not re.findall(r"(?:src|href)=[\"'](?!#|data:)[^\"']*", source)
        assert not re.findall(r"@import|url\((?!#)", source)

    def test_picture_ids_are_unique(self, run_folder: Path) -> None:
        match = re.findall(r'\bid="([^"]+)"', text_of(write_page(run_folder)))
        assert len(match) == len(set(match))

    def test_page_pictures_use_the_page_colors(self, run_folder: Path) -> None:
        svgs = re.findall(r'(?s)<svg style="max-width.*?</svg>', text_of(write_page(run_folder)))
        colours = {c for svg in svgs for c in re.findall(r'(?:fill|stroke)="([^"]+)"', svg)}
        assert svgs
        assert all(c in ("none", "transparent") or c.startswith("var(--") for c in colours), colours
        assert not any("font-family" in svg or "aria-roledescription" in svg for svg in svgs)

    def test_page_hides_home_and_secrets(self, run_folder: Path) -> None:
        source = text_of(write_page(run_folder))
        assert "/home/" not in source
        assert "hf_abcdef" not in source
        assert "[hidden]" in source


PIPELINE: dict[str, float | None] = {
    "time/step_s": 1.0,
    "time/data_s": 0.01,
    "time/forward_s": None,
    "time/backward_s": None,
    "time/forward_backward_s": 0.9,
    "time/optimizer_s": 0.09,
}


class TestPipeline:
    def test_pipeline_passes_are_one_part(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "r", step_s=1.0, metrics=PIPELINE, world_size=2)
        source = text_of(write_page(folder))
        text = words(part(source, "time"))
        assert "Forward + backward takes 90% of the step" in text
        assert "forward + backward 900" in text
        assert "var(--t-both)" in part(source, "time")
        assert "Peak memory of the worst rank" in words(part(source, "memory"))

    def test_pipeline_passes_are_compared_with_the_sum(self, tmp_path: Path) -> None:
        def job(number: int, varied: dict[str, Any]) -> dict[str, Any]:
            fast = {"time/data_s": 0.01, "time/forward_s": 0.1, "time/backward_s": 0.2}
            time_metrics = {"time/step_s": 0.4, "time/optimizer_s": 0.09}
            return {"metrics": PIPELINE if number else fast | time_metrics}

        folder = make_sweep(tmp_path / "s", {"parallelism": ["single", "pipeline"]}, job)
        text = words(part(text_of(write_page(folder)), "time"))
        assert "forward + backward time differs most: 300 ms vs. 900 ms" in text


class TestFailedRun:
    def test_failed_page_shows_reason_and_fixes(self, tmp_path: Path) -> None:
        source = text_of(write_page(make_run(tmp_path / "r", **out_of_memory())))
        text = words(part(source, "failed"))
        assert "The run ran out of memory" in text
        assert "first backward" in text
        assert "memory=checkpoint_full" in text
        assert "torch.OutOfMemoryError" in text
        assert 'id="memory"' not in source

    @pytest.mark.parametrize(
        "status", ["failed", "timeout", "interrupted", "refused", "running", "odd_one"]
    )
    def test_every_status_has_a_page(self, tmp_path: Path, status: str) -> None:
        assert write_page(
            make_run(tmp_path / "r", steps=12, status=status, reason="because")
        ).exists()

    def test_failed_page_draws_partial_curves(self, tmp_path: Path) -> None:
        source = text_of(write_page(make_run(tmp_path / "r", steps=30, status="interrupted")))
        assert {"failed", "loss", "time"} <= set(re.findall(r'<section id="(\w+)">', source))


def test_page_compares_out_of_memory_with_the_plan(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", **out_of_memory(plan=plan_record(4.6, 1.4, 4.25)))
    text = words(part(text_of(write_page(folder)), "failed")).replace("\u00a0", " ")
    assert "The predicted peak was 4.60 GiB; the limit is 4.25 GiB." in text


def test_page_shows_data_notes(run_folder: Path) -> None:
    add_notes(run_folder, "each step: 10 samples <padded> to 12")
    assert "Each step: 10 samples &lt;padded&gt; to 12." in write_page(run_folder).read_text()


class TestSweep:
    def test_sweep_page_names_the_jobs_of_a_data_note(self, tmp_path: Path) -> None:
        sweep = make_sweep(tmp_path / "s", {"seed": [1, 2]}, lambda number, varied: {})
        jobs = sorted(path.parent for path in sweep.glob("*/summary.json"))
        for job in jobs:
            add_notes(job, "all epochs: 3 repeated", *["each step: 2 empty"] * (job == jobs[0]))
        source = text_of(write_page(sweep))
        assert source.count("all epochs: 3 repeated") + source.count("All epochs: 3 repeated") == 1
        assert source.count(": each step: 2 empty.") == 1

    def test_sweep_page_has_its_sections(self, sweep_folder: Path) -> None:
        source = text_of(write_page(sweep_folder))
        assert re.findall(r'<section id="(\w+)">', source) == [
            "overview", "comparison", "changes", "memory", "time", "loss", "tradeoff",
            "coordinates", "failed", "reproduce",
        ]  # fmt: skip

    def test_page_is_deterministic(self, sweep_folder: Path) -> None:
        first = write_page(sweep_folder).read_bytes()
        assert write_page(sweep_folder).read_bytes() == first

    def test_sweep_page_sentences_equal_the_table(self, sweep_folder: Path) -> None:
        source = text_of(write_page(sweep_folder))
        fit_status = words(source[source.index('class="summary">') + 16 :].split("</p>")[0])
        table = part(source, "comparison")
        fastest_match = re.search(r"fastest at ([\d,]+) tok/s", fit_status)
        memory_match = re.search(r"least memory, ([\d.]+) GiB", fit_status.replace("\u00a0", " "))
        assert fastest_match is not None
        assert memory_match is not None
        best_values = re.findall(r'<span class="best">([\d.,%]+)<span', table)
        assert fastest_match[1] in best_values
        assert memory_match[1] in best_values
        assert f"{fastest_match[1]} tok/s" in words(part(source, "overview"))
        assert memory_match[1] in words(part(source, "memory"))

    def test_sweep_page_marks_the_best_in_text(self, sweep_folder: Path) -> None:
        source = part(text_of(write_page(sweep_folder)), "comparison")
        assert (
            source.count('class="best">') - 1 == source.count('<span class="vh"> best</span>') > 0
        )

    def test_sweep_page_sorts_missing_values_last(self, sweep_folder: Path) -> None:
        source = part(text_of(write_page(sweep_folder)), "comparison")
        values = re.findall(r'<td data-v="([^"]*)" data-l="tokens/s"', source)
        metric_values = [float(v) for v in values if v]
        assert metric_values == sorted(metric_values, reverse=True)
        assert values[-1] == ""

    def test_sweep_page_of_one_job(self, tmp_path: Path) -> None:
        source = text_of(
            write_page(make_sweep(tmp_path / "s", {"precision": ["fp32"]}, lambda n, v: {}))
        )
        assert "One precision, one job ran" in words(source)
        assert 'class="best">1' not in source

    def test_sweep_page_of_failed_jobs(self, tmp_path: Path) -> None:
        folder = make_sweep(
            tmp_path / "s",
            STRATEGY_GRID,
            lambda n, v: out_of_memory(reason=f"Job {n} was too large."),
        )
        source = text_of(write_page(folder))
        assert "No job finished: 4 out of memory." in words(source)
        assert re.findall(r'<section id="(\w+)">', source) == [
            "overview",
            "comparison",
            "failed",
            "reproduce",
        ]
        assert source.count('<article class="card">') == 4

    def test_sweep_page_groups_equal_failures(self, tmp_path: Path) -> None:
        source = text_of(
            write_page(make_sweep(tmp_path / "s", STRATEGY_GRID, lambda n, v: out_of_memory()))
        )
        assert source.count('<article class="card">') == 1
        assert "3 more jobs with the same failure" in words(source)

    def test_sweep_page_of_unfinished_jobs(self, tmp_path: Path) -> None:
        folder = make_sweep(
            tmp_path / "s", STRATEGY_GRID, lambda n, v: strategy_job(n, v) if n == 0 else None
        )
        assert "one of four jobs ran" in words(text_of(write_page(folder)))

    def test_sweep_page_without_jobs(self, tmp_path: Path) -> None:
        assert write_page(make_sweep(tmp_path / "s", {}, lambda n, v: {}, jobs=[])).exists()

    def test_sweep_page_of_a_job_without_status(self, sweep_folder: Path) -> None:
        (sweep_folder / "1" / "status.json").unlink()
        assert "no readable status.json" in words(text_of(write_page(sweep_folder)))

    def test_job_folder_outside_of_the_sweep_is_rejected(self, tmp_path: Path) -> None:
        make_run(tmp_path / "other", reason="must not be read")
        folder = make_sweep(tmp_path / "s", {"precision": ["fp32"]}, lambda n, v: {})
        record = json.loads((folder / "sweep.json").read_text("utf-8"))
        record["jobs"][0]["folder"] = "../other"
        (folder / "sweep.json").write_text(json.dumps(record), "utf-8")
        with pytest.raises(RecordError, match=r"jobs\[0\]\.folder is \.\./other"):
            records.read_record(folder)

    def test_sweep_page_splits_three_keys_into_matrices(self, tmp_path: Path) -> None:
        axes: dict[str, list[Any]] = {
            "parallelism": ["single", "ddp", "fsdp"],
            "precision": ["fp32", "bf16_mixed"],
            "optimizer.lr": [1, 2, 3],
        }
        source = text_of(write_page(make_sweep(tmp_path / "s", axes, lambda n, v: {"steps": 5})))
        assert part(source, "overview").count('<table class="matrix">') == 2


HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<b>"


def test_page_escapes_hostile_strings(tmp_path: Path) -> None:
    def job(number: int, varied: dict[str, Any]) -> dict[str, Any]:
        failed_job = out_of_memory(
            reason=HOSTILE,
            log_tail=[HOSTILE, "\ud800"],
            cures=[{"override": HOSTILE, "why": HOSTILE}],
        )
        link = {"mode": "online", "url": "javascript:alert(1)", "folder": None}
        finished_job = {
            "steps": 9,
            "machine": {"device": HOSTILE},
            "versions": {HOSTILE: HOSTILE},
            "wandb": link,
        }
        return failed_job if number == 1 else finished_job

    axes = {"data": [HOSTILE, "b", "c"], HOSTILE: ["x", HOSTILE]}
    folder = make_sweep(tmp_path / "s", axes, job, question=HOSTILE, name=HOSTILE, command=HOSTILE)
    source = text_of(write_page(folder))
    assert "<img" not in source
    assert source.count("<script>") == source.count("</script>") == 1
    assert "javascript:" not in source
    assert len(re.findall(r"\sonerror=", re.sub(r"&lt;img src=x onerror=", "", source))) == 0


def test_page_of_two_hundred_jobs(tmp_path: Path) -> None:
    path = write_page(make_sweep(tmp_path / "s", LARGE_GRID, large_job))
    source = text_of(path)
    assert path.stat().st_size < 1_500_000
    assert part(source, "comparison").count("<tr") == 201
    assert "24 of 200 jobs" in words(part(source, "memory"))


def test_page_shows_the_publish_command(tmp_path: Path) -> None:
    def job(number: int, varied: dict[str, Any]) -> dict[str, Any]:
        wandb_folder = f"runs/mine/my sweep/{number}/wandb/offline-run-1-id{number}"
        return {
            "steps": 5,
            "wandb": {"mode": "offline", "id": f"id{number}", "folder": wandb_folder},
        }

    folder = make_sweep(tmp_path / "my sweep", {"seed": [1, 2]}, job)
    assert "scalewise publish 'runs/mine/my sweep'" in words(text_of(write_page(folder)))
    moved_sweep = make_sweep(tmp_path / "moved", {"seed": [1, 2]}, job)
    assert "scalewise publish" not in words(text_of(write_page(moved_sweep)))


@pytest.mark.parametrize(
    ("status", "overrides", "retry_command"),
    [
        ("failed", "-m seed=1,2", "'resume_sweep=runs/layouts_cpu/my sweep' retry=failed"),
        ("failed", "-m seed=1,2 hydra.sweep.dir=mine", "resume_sweep=DIR retry=failed"),
        ("out_of_memory", "-m seed=1,2", ""),
        ("ok", "-m seed=1,2", ""),
    ],
)
def test_page_shows_the_retry_command(
    status: str, overrides: str, retry_command: str, tmp_path: Path
) -> None:
    def job(number: int, varied: dict[str, Any]) -> dict[str, Any]:
        return {"steps": 5, "status": status if number else "ok"}

    command = f"scalewise train {overrides}"
    folder = make_sweep(tmp_path / "my sweep", {"seed": [1, 2]}, job, command=command)
    section_words = words(part(text_of(write_page(folder)), "reproduce"))
    assert ("Retry failed jobs" in section_words) == bool(retry_command)
    assert f"{command} {retry_command}" in section_words or not retry_command


def test_page_links_wandb_runs(tmp_path: Path) -> None:
    def job(number: int, varied: dict[str, Any]) -> dict[str, Any]:
        return {"steps": 5, "wandb": {"mode": "online", "id": "i", "url": f"https://w/run{number}"}}

    report_links = {"report": "https://w/reports/x--1"}
    folder = make_sweep(tmp_path / "s", {"seed": [1, 2]}, job, wandb=report_links)
    source = part(text_of(write_page(folder)), "reproduce")
    assert re.findall(r'<a href="([^"]+)"', source) == [
        "https://w/reports/x--1", "https://w/run0", "https://w/run1",
    ]  # fmt: skip


def test_page_compares_memory_with_the_plan(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    peak = summary["metrics"]["memory/peak_bytes"]
    summary["metrics"]["plan/peak_bytes"] = 1.04 * peak
    (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
    source = text_of(write_page(folder))
    assert "Predicted peak memory: " in source
    assert "error 4%" in source


def add_notes(folder: Path, *notes: str) -> None:
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    (folder / "summary.json").write_text(json.dumps({**summary, "notes": notes}), "utf-8")
