"""The W&B report of a folder: built offline, deterministic, with the text of the page."""

import html
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import wandb_workspaces.reports.v2 as wr
from fixtures.run_folders import (
    ABLATION,
    GRID,
    STRATEGY_GRID,
    ablation_job,
    grid_job,
    make_run,
    make_sweep,
    out_of_memory,
    strategy_job,
)

from scalewise.errors import ScalewiseError
from scalewise.reports import html_report, records, report_model, wandb_blocks, wandb_report


@pytest.fixture(autouse=True)
def no_wandb_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment without an API key and network."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a report was to be made without a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def content(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(wandb_report.build_wandb_report(folder).read_text("utf-8"))
    return record


def blocks(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [block for block in content(folder)["spec"]["blocks"] if block["type"] == kind]


def headings(folder: Path) -> list[str]:
    return [block["children"][0]["text"] for block in blocks(folder, "heading")]


def text(folder: Path) -> str:
    return "\n\n".join(block["content"] for block in blocks(folder, "markdown-block"))


def panels(folder: Path) -> list[dict[str, Any]]:
    grids = blocks(folder, "panel-grid")
    return [p for g in grids for p in g["metadata"]["panelBankSectionConfig"]["panels"]]


def views(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [panel["config"] for panel in panels(folder) if panel["viewType"] == kind]


class TestBuild:
    def test_wandb_report_is_deterministic(self, sweep_folder: Path) -> None:
        first = wandb_report.build_wandb_report(sweep_folder).read_bytes()
        assert wandb_report.build_wandb_report(sweep_folder).read_bytes() == first

    def test_wandb_report_loads_in_the_library(self, sweep_folder: Path) -> None:
        actual_content = content(sweep_folder)
        model = wr.internal.ReportViewspec(
            display_name=actual_content["title"],
            project=wr.internal.Project(name="any"),
            spec=wr.internal.Spec.model_validate(actual_content["spec"]),
        )
        report = wr.Report._from_model(model)
        grids = [block for block in report.blocks if isinstance(block, wr.PanelGrid)]
        panels_and_blocks = [*report.blocks, *(panel for grid in grids for panel in grid.panels)]
        assert len(panels_and_blocks) > 20
        assert not [item for item in panels_and_blocks if type(item).__name__.startswith("Unknown")]

    def test_wandb_report_panels_do_not_overlap(self, sweep_folder: Path) -> None:
        for grid in blocks(sweep_folder, "panel-grid"):
            actual_content = [
                p["layout"] for p in grid["metadata"]["panelBankSectionConfig"]["panels"]
            ]
            positions = [(p["x"], p["y"]) for p in actual_content]
            assert len(set(positions)) == len(positions)
            assert all(p["x"] + p["w"] <= 24 for p in actual_content)

    def test_wandb_report_rejects_other_folders(self, tmp_path: Path) -> None:
        with pytest.raises(ScalewiseError, match="neither a run"):
            wandb_report.build_wandb_report(tmp_path)

    def test_wandb_report_truncates_a_long_question(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "r", steps=9, question="why " * 100)
        assert len(content(folder)["title"]) == wandb_report.MAX_TITLE_LENGTH


class TestReportModel:
    @pytest.mark.parametrize("record_kind", ["run", "failed", "sweep"])
    def test_page_and_wandb_report_have_the_same_text(
        self, tmp_path: Path, record_kind: str
    ) -> None:
        folder = {
            "run": lambda: make_run(tmp_path / "r", steps=40),
            "failed": lambda: make_run(tmp_path / "r", **out_of_memory()),
            "sweep": lambda: make_sweep(tmp_path / "s", STRATEGY_GRID, strategy_job),
        }[record_kind]()
        report = report_model.build_report(records.read_record(folder))
        source = html_report.write_page(folder).read_text("utf-8")
        page_words = " ".join(html.unescape(re.sub(r"<[^>]+>", "", source)).split())
        parts = [
            f"{part.topic}. {wandb_blocks.to_plain_text(part.finding)}" for part in report.parts
        ]
        assert headings(folder) == parts
        for sentence in [*parts, wandb_blocks.to_plain_text(report.summary)]:
            assert " ".join(sentence.split()) in page_words, sentence
        assert wandb_blocks.to_markdown(report.summary) in text(folder)


class TestRun:
    def test_run_report_draws_its_run(self, run_folder: Path) -> None:
        assert content(run_folder)["run_ids"] == ["k3v9x2aa"]
        assert content(run_folder)["group"] == ""
        (filters,) = {
            json.dumps(grid["metadata"]["runSets"][0]["filters"])
            for grid in blocks(run_folder, "panel-grid")
        }
        assert '"name": "name"' in filters
        assert "k3v9x2aa" in filters

    def test_run_report_has_its_panels(self, run_folder: Path) -> None:
        lines = views(run_folder, "Run History Line Plot")
        assert {line["xAxis"] for line in lines} == {"step"}
        metrics = [tuple(line["metrics"]) for line in lines]
        assert ("train/loss", "val/loss") in metrics
        assert ("throughput/tokens_per_s",) in metrics
        stacked = [line["metrics"] for line in lines if line["plotType"] == "stacked-area"]
        assert "memory/activations_bytes" in stacked[0]
        assert "time/backward_s" in stacked[1]

    def test_run_report_shows_the_failure(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "r", **out_of_memory())
        assert "ran out of memory in the first backward" in text(folder)
        assert "memory=checkpoint\\_full" not in text(folder)
        assert "```\nmemory=checkpoint_full\n```" in text(folder)

    def test_run_report_without_wandb_runs_has_no_panels(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "r", steps=20, wandb={"mode": "disabled"})
        assert panels(folder) == []
        assert headings(folder)


class TestSweep:
    def test_sweep_report_selects_its_group(self, sweep_folder: Path) -> None:
        group = f"{sweep_folder.parent.name}/{sweep_folder.name}"
        assert content(sweep_folder)["group"] == group
        grids = blocks(sweep_folder, "panel-grid")
        assert grids
        for grid in grids:
            (runs,) = grid["metadata"]["runSets"]
            (run_filter,) = runs["filters"]["filters"]
            assert run_filter["key"] == {"section": "run", "name": "group"}
            assert run_filter["value"] == group
            assert "project" not in runs

    def test_sweep_report_uses_a_user_group(self, tmp_path: Path) -> None:
        def job(number: int, varied: dict[str, Any]) -> dict[str, Any]:
            return {"steps": 9, "wandb": {"mode": "online", "id": f"i{number}", "group": "m'\"n"}}

        folder = make_sweep(tmp_path / "s", {"seed": [1, 2, 3]}, job)
        assert content(folder)["group"] == "m'\"n"
        (runs,) = blocks(folder, "panel-grid")[0]["metadata"]["runSets"]
        assert runs["filters"]["filters"][0]["value"] == "m'\"n"

    def test_sweep_report_lists_runs_of_several_groups(self, tmp_path: Path) -> None:
        def job(number: int, varied: dict[str, Any]) -> dict[str, Any]:
            wandb_run = {"mode": "online", "id": f"i{number}", "group": f"g{number}"}
            return {"steps": 9, "wandb": wandb_run}

        folder = make_sweep(tmp_path / "s", {"seed": [1, 2]}, job)
        (runs,) = blocks(folder, "panel-grid")[0]["metadata"]["runSets"]
        assert runs["filters"]["filters"][0]["value"] == ["i0", "i1"]

    def test_sweep_report_has_a_comparison_table(self, sweep_folder: Path) -> None:
        texts = [block["content"] for block in blocks(sweep_folder, "markdown-block")]
        table = next(content for content in texts if "tokens/s" in content)
        lines = table.splitlines()
        assert len(lines) == 2 + 4
        assert len({line.count(" | ") for line in lines}) == 1
        assert "| ddp · bf16 | ok | **1,436** |" in table

    def test_sweep_report_uses_logged_setting_keys(self, sweep_folder: Path) -> None:
        (scatter,) = views(sweep_folder, "Scatter Plot")
        assert scatter["xAxis"] == "summary:final/time/step_s"
        assert scatter["yAxis"] == "summary:final/memory/peak_bytes"
        assert scatter["zAxis"] == "summary:final/train/loss"

    def test_sweep_report_describes_settings(self, tmp_path: Path) -> None:
        folder = make_sweep(tmp_path / "s", GRID, grid_job)
        (lines,) = views(folder, "Parallel Coordinates Plot")
        assert [column["accessor"] for column in lines["columns"]] == [
            "config:choices.value.parallelism",
            "config:choices.value.precision",
            "config:optimizer.value.lr",
            "summary:final/time/step_s",
            "summary:final/memory/peak_bytes",
            "summary:final/train/loss",
        ]
        targets = [view["targetKey"] for view in views(folder, "Parameter Importance")]
        assert targets == ["final/time/step_s", "final/memory/peak_bytes", "final/train/loss"]
        assert views(folder, "Run Comparer") == [{"diffOnly": True}]

    def test_sweep_report_shows_ablation_and_price(self, tmp_path: Path) -> None:
        folder = make_sweep(tmp_path / "s", ABLATION, ablation_job)
        assert "- **less** \\(memory=checkpoint\\_full\\) reduced peak memory by 43%" in text(
            folder
        )
        _, cost_view = views(folder, "Scatter Plot")
        assert cost_view["xAxis"] == "summary:final/price/dollars_per_billion_tokens"
        assert cost_view["yAxis"] == "summary:final/train/loss"

    def test_sweep_report_compares_with_the_plan(self, tmp_path: Path) -> None:
        folder = make_sweep(tmp_path / "s", ABLATION, ablation_job)
        assert "step error | peak, GiB | peak error" in text(folder)
        assert "Predicted vs. measured peak memory: the largest error is 3%." in text(folder)

    def test_sweep_job_has_its_own_report(self, sweep_folder: Path) -> None:
        names = {content(folder)["name"] for folder in (sweep_folder, *sweep_folder.glob("[0-9]"))}
        assert len(names) == 5


HOSTILE = "</script>| a [x](javascript:alert(1)) `b` ![i](http://e) <img src=x> $m$ **"


def test_wandb_report_escapes_hostile_strings(tmp_path: Path) -> None:
    def job(number: int, varied: dict[str, Any]) -> dict[str, Any]:
        failed_job = out_of_memory(reason=HOSTILE, log_tail=["```", HOSTILE], command=HOSTILE)
        return failed_job if number else {"steps": 9, "machine": {"device": HOSTILE}}

    folder = make_sweep(tmp_path / "s", {"data": [HOSTILE, "b"]}, job, question=HOSTILE)
    text_without_code = re.sub(r"(?ms)^(`{3,})\n.*?^\1$", "", text(folder))
    assert "\\[x\\]\\(javascript" in text_without_code
    for markup in ("](", "<img", "![i]", "</script>"):
        assert markup not in re.sub(r"\\.", "", text_without_code), markup
    rows = [line for line in text_without_code.splitlines() if line.startswith("| ")]
    assert rows


def test_wandb_report_hides_home_and_secrets(run_folder: Path) -> None:
    source = wandb_report.build_wandb_report(run_folder).read_text("utf-8")
    assert "/home/" not in source
    assert "hf_abcdef" not in source
