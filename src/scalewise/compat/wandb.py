"""Private names of wandb-workspaces, W&B's library of reports and dashboards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wandb_workspaces.workspaces as ws

from scalewise.compat import PrivateNames

__all__ = [
    "execute_graphql",
    "get_app_url",
    "report_model",
    "set_block_id",
    "set_view_name",
    "view_model",
    "workspace_of_view",
]

private = PrivateNames("wandb-workspaces")

with private:
    from wandb_workspaces._graphql import execute_graphql, get_app_url

    """Query and web address of W&B; its public methods save whole reports only."""

if not TYPE_CHECKING:
    __getattr__ = private.missing_name


@private.reads("_to_model")
def report_model(report: Any) -> Any:
    """Data that W&B stores for a report; the public method sends them."""
    return report._to_model()


def set_block_id(block: Any, identifier: str) -> None:
    """Set the id of a panel or run set, which is random; no argument sets it."""
    private.replace_attribute(block, "_id", identifier)


@private.reads("_from_model")
def workspace_of_view(view: Any) -> ws.Workspace:
    """Workspace of a stored view; the public method reads it by URL."""
    return ws.Workspace._from_model(view)


def set_view_name(workspace: ws.Workspace, name: str) -> None:
    """Set the name of a view in its URL, which is random; no argument sets it."""
    private.replace_attribute(workspace, "_internal_name", name)


@private.reads("_to_model")
def view_model(workspace: ws.Workspace) -> Any:
    """Data that W&B stores for a workspace; the public method sends them."""
    return workspace._to_model()
