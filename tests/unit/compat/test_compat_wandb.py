"""Private names of wandb-workspaces: presence and relied-on behaviour."""

from inspect import signature

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces.workspaces import internal

from scalewise.compat import wandb as compat_wandb


def test_queries_have_the_expected_parameters() -> None:
    assert [*signature(compat_wandb.execute_graphql).parameters][:3] == [
        "api",
        "query",
        "variables",
    ]
    assert [*signature(compat_wandb.get_app_url).parameters] == ["api"]


def test_report_model_has_the_ids_that_were_set() -> None:
    runset, panel = wr.Runset(name="Runs"), wr.LinePlot(title="loss", x="step", y=["loss"])
    compat_wandb.set_block_id(runset, "runs1")
    compat_wandb.set_block_id(panel, "panel1")
    grid = wr.PanelGrid(runsets=[runset], panels=[panel])
    report = wr.Report(project="project", entity="entity", title="title", blocks=[grid])
    spec = compat_wandb.report_model(report).model_dump_json()
    assert '"runs1"' in spec
    assert '"panel1"' in spec


def test_workspace_is_stored_under_the_name_that_was_set() -> None:
    workspace = ws.Workspace(entity="entity", project="project", sections=[])
    compat_wandb.set_view_name(workspace, "nw-abc-v")
    view = compat_wandb.view_model(workspace)
    assert isinstance(view, internal.View)
    assert view.name == "nw-abc-v"
    loaded_workspace = compat_wandb.workspace_of_view(view)
    assert (loaded_workspace.entity, loaded_workspace.project) == ("entity", "project")
    assert compat_wandb.view_model(loaded_workspace).name == "nw-abc-v"
