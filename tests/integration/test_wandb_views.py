"""Reports and dashboards: the W&B clients with a local server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb_workspaces.reports.v2 as wr
from fixtures.cli_runner import CliRunner
from fixtures.run_folders import STRATEGY_GRID, make_run, make_sweep, strategy_job
from fixtures.wandb_server import ENTITY, WandbServer
from fixtures.wandb_views import Views

from scalewise.errors import ConfigError, ScalewiseError
from scalewise.reports import wandb_report, workspace
from scalewise.tracking import connection

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def views() -> Views:
    return Views()


@pytest.fixture
def server(views: Views, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with WandbServer(handlers=views.handlers) as wandb_server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", wandb_server.url)
        yield wandb_server
        assert wandb_server.unexpected == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_sweep(tmp_path / "layouts_cpu", STRATEGY_GRID, strategy_job)


def publish(folder: Path, **publish_options: str | None) -> str:
    return wandb_report.publish_report(
        folder, **({"entity": None, "project": "trials"} | publish_options)
    )


class TestPublish:
    def test_report_of_a_sweep_lists_its_runs(
        self, server: WandbServer, views: Views, folder: Path
    ) -> None:
        url = publish(folder)
        (view,) = views.of_type("runs")
        assert view.variables["entityName"] == ENTITY
        assert view.variables["projectName"] == "trials"
        assert view.variables["displayName"].startswith("Which layout trains decoder_nano fastest")
        grids = [block for block in view.spec["blocks"] if block["type"] == "panel-grid"]
        assert grids
        for grid in grids:
            (runs,) = grid["metadata"]["runSets"]
            assert runs["project"]["id"] == "UHJvamVjdEludGVybmFsSWQ6MQ=="
            assert (runs["project"]["entityName"], runs["project"]["name"]) == (ENTITY, "trials")
        assert url.startswith(f"{server.url}/{ENTITY}/trials/reports/Which-layout-trains")

    def test_report_url_opens_the_report(
        self, server: WandbServer, views: Views, folder: Path
    ) -> None:
        report = wr.Report.from_url(publish(folder))
        assert report.title == next(iter(views.of_type("runs"))).variables["displayName"]
        assert next(b for b in report.blocks if isinstance(b, wr.PanelGrid)).runsets[0].filters

    def test_report_url_is_kept_in_the_folder(self, server: WandbServer, folder: Path) -> None:
        url = publish(folder)
        assert json.loads((folder / "sweep.json").read_text("utf-8"))["wandb"]["report"] == url
        job = folder / "0"
        job_result = publish(job)
        wandb_record = json.loads((job / "status.json").read_text("utf-8"))["wandb"]
        assert wandb_record["report"] == job_result != url
        assert wandb_record["id"] == "id0"

    def test_report_published_again_is_updated(
        self, server: WandbServer, views: Views, folder: Path
    ) -> None:
        first = publish(folder)
        spec = json.loads((folder / "sweep.json").read_text("utf-8"))
        (folder / "sweep.json").write_text(json.dumps(spec | {"question": "What now?"}), "utf-8")
        second_result = publish(folder)
        (view,) = views.of_type("runs")
        assert view.saves == 2
        assert view.variables["displayName"] == "What now?"
        assert first.rpartition("--")[2] == second_result.rpartition("--")[2]

    def test_report_is_found_without_the_recorded_url(
        self, server: WandbServer, views: Views, folder: Path
    ) -> None:
        before = (folder / "sweep.json").read_bytes()
        first = publish(folder)
        (folder / "sweep.json").write_bytes(before)
        assert publish(folder) == first
        assert len(views.of_type("runs")) == 1

    def test_deleted_report_is_created_again(
        self, server: WandbServer, views: Views, folder: Path
    ) -> None:
        publish(folder)
        views.views.clear()
        publish(folder)
        assert [view.saves for view in views.of_type("runs")] == [1]

    def test_report_in_another_project_is_separate(
        self, server: WandbServer, views: Views, folder: Path
    ) -> None:
        publish(folder)
        publish(folder, project="others")
        assert {view.project for view in views.of_type("runs")} == {"trials", "others"}
        assert views.projects == ["trials", "others"]

    def test_two_sweeps_have_two_reports(
        self, server: WandbServer, views: Views, tmp_path: Path
    ) -> None:
        for name in ("one", "two"):
            publish(make_run(tmp_path / name, steps=9))
        assert len(views.of_type("runs")) == 2


class TestDashboard:
    def test_dashboard_has_its_sections(self, server: WandbServer, views: Views) -> None:
        url = workspace.save_workspace("overview", entity=None, project="trials")
        (view,) = views.of_type("project-view")
        assert view.variables["displayName"] == "overview"
        sections = view.spec["section"]["panelBankConfig"]["sections"]
        assert [s["name"] for s in sections] == [name for name, _ in workspace.SECTIONS]
        assert [len(s["panels"]) for s in sections] == [len(d) for _, d in workspace.SECTIONS]
        (runs,) = view.spec["section"]["runSets"]
        assert runs["grouping"] == [{"section": "run", "name": "group"}]
        view_name = view.variables["name"].removeprefix("nw-").removesuffix("-v")
        assert url == f"{server.url}/{ENTITY}/trials?nw={view_name}"

    def test_dashboard_update_keeps_user_settings(self, server: WandbServer, views: Views) -> None:
        first = workspace.save_workspace("overview", entity=None, project="trials")
        (view,) = views.of_type("project-view")
        spec = view.spec
        spec["section"]["runSets"][0]["search"] = {"query": "mine"}
        spec["section"]["panelBankConfig"]["sections"] = []
        view.variables["spec"] = json.dumps(spec)
        assert workspace.save_workspace("overview", entity=None, project="trials") == first
        (view,) = views.of_type("project-view")
        assert view.saves == 2
        assert view.spec["section"]["runSets"][0]["search"]["query"] == "mine"
        assert view.spec["section"]["panelBankConfig"]["sections"]

    def test_dashboard_of_another_name_is_separate(self, server: WandbServer, views: Views) -> None:
        for name in ("overview", "mine"):
            workspace.save_workspace(name, entity=None, project="trials")
        assert len(views.of_type("project-view")) == 2

    def test_dashboard_command_creates_a_dashboard(
        self, server: WandbServer, views: Views, run_cli: CliRunner
    ) -> None:
        env = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        result = run_cli(
            "overview", "tracking.project=mine", command="dashboard", env=env
        ).assert_ok()
        assert result.out.startswith(f"{server.url}/{ENTITY}/mine?nw=")
        assert views.projects == ["mine"]
        assert KEY not in result.transcript

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ((), "scalewise dashboard NAME"),
            (("tracking.project=x",), "scalewise dashboard NAME"),
            (("a", "tracking.projet=x"), "tracking.project"),
            (("a",), "WANDB_API_KEY"),
        ],
    )
    def test_dashboard_rejects_invalid_arguments(
        self, overrides: tuple[str, ...], message: str, run_cli: CliRunner
    ) -> None:
        run_cli(*overrides, command="dashboard").assert_rejected(message)


class TestRejected:
    def test_views_without_a_key_are_rejected(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        monkeypatch.setenv("NETRC", str(folder / "none"))
        with pytest.raises(
            ConfigError, match=r"no API key is set; run `wandb login`, or set WANDB_API_KEY"
        ):
            publish(folder)

    def test_views_without_a_server_are_rejected(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as bound_socket:
            port = bound_socket.getsockname()[1]
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(ScalewiseError, match="does not respond"):
            publish(folder)

    @pytest.mark.parametrize("code", [401, 403, 404, 429, 500])
    def test_views_rejected_by_the_server_are_reported(
        self, server: WandbServer, folder: Path, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            connection, "REQUEST_TIMEOUT", 2
        )  # the client repeats after 429 and 500
        before = (folder / "sweep.json").read_bytes()
        server.faults["upsertView"] = code
        with pytest.raises(ScalewiseError, match="W&B request failed") as excinfo:
            publish(folder)
        assert KEY not in str(excinfo.value)
        assert "\n" not in str(excinfo.value)
        assert (folder / "sweep.json").read_bytes() == before
