"""Client of the W&B service for reports and dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scalewise.errors import ScalewiseError
from scalewise.reports import redact
from scalewise.tracking.connection import wandb_client


class WandbReportService:
    """Authenticated client that sends the same GraphQL queries as W&B's report library.

    Raises the errors of :func:`scalewise.tracking.connection.wandb_client` on creation.
    """

    def __init__(self) -> None:
        self._api = wandb_client()

    def execute(self, query: str, variables: Mapping[str, object]) -> dict[str, Any]:
        """Execute a GraphQL query and return its data."""
        from wandb_workspaces._graphql import execute_graphql

        with wandb_errors():
            data: dict[str, Any] = execute_graphql(self._api, query, variables)
            return data

    @property
    def entity(self) -> str:
        """Default entity of the account."""
        with wandb_errors():
            return str(self._api.default_entity)

    @property
    def address(self) -> str:
        """URL of the web app, without a trailing slash."""
        from wandb_workspaces._graphql import get_app_url

        return str(get_app_url(self._api)).rstrip("/")

    def project(self, entity: str, name: str) -> str:
        """Internal id of a project, which is created if it does not exist."""
        from wandb_workspaces.reports.v2 import gql

        variables = {"entityName": entity, "projectName": name}
        for attempt in range(2):
            project = self.execute(gql.projectInternalId, variables).get("project")
            if project:
                return str(project["internalId"])
            if attempt == 0:
                with wandb_errors():
                    self._api.create_project(name, entity)
        raise ScalewiseError(f"W&B project {entity}/{name} does not exist and cannot be created")

    def report(self, entity: str, project: str, name: str) -> str | None:
        """Id of the report ``name`` of a project; ``None`` if it does not exist."""
        with wandb_errors():
            views = [
                view for view in self._api.reports(f"{entity}/{project}", name=name)
                if view.name == name
            ]  # fmt: skip
        return str(views[0].id) if views else None


@contextmanager
def wandb_errors() -> Iterator[None]:
    """Convert errors of the client to ``ScalewiseError`` with one redacted line."""
    try:
        yield
    except ScalewiseError:
        raise
    except Exception as error:  # the client raises many types
        text = redact.redact_text(" ".join(str(error).split()))[:300] or type(error).__name__
        raise ScalewiseError(f"W&B request failed: {text}") from error
