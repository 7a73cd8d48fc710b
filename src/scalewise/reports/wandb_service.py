"""The W&B service, for reports and dashboards: asked only where there is a key and an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scalewise.errors import ScalewiseError
from scalewise.reports import redact
from scalewise.tracking.connection import wandb_client


class WandbReportService:
    """A connection; its queries are those that the client's own reports make."""

    def __init__(self) -> None:
        """Raises as :func:`connected` does."""
        self._api = wandb_client()

    def execute(self, query: str, variables: Mapping[str, object]) -> dict[str, Any]:
        """Returns the data that answers a GraphQL query."""
        from wandb_workspaces._graphql import execute_graphql

        with wandb_errors():
            found: dict[str, Any] = execute_graphql(self._api, query, variables)
            return found

    @property
    def entity(self) -> str:
        """Returns the account's own entity."""
        with wandb_errors():
            return str(self._api.default_entity)

    @property
    def address(self) -> str:
        """Returns where people look at it, without a last slash."""
        from wandb_workspaces._graphql import get_app_url

        return str(get_app_url(self._api)).rstrip("/")

    def project(self, entity: str, name: str) -> str:
        """Returns the inner id of a project, which is made where there is none."""
        from wandb_workspaces.reports.v2 import gql

        asked = {"entityName": entity, "projectName": name}
        for attempt in range(2):
            found = self.execute(gql.projectInternalId, asked).get("project")
            if found:
                return str(found["internalId"])
            if attempt == 0:
                with wandb_errors():
                    self._api.create_project(name, entity)
        raise ScalewiseError(f"W&B has no project {entity}/{name}, and made none")

    def report(self, entity: str, project: str, name: str) -> str | None:
        """Returns the id of a report by its name in a project; None where there is none."""
        with wandb_errors():
            found = [
                view for view in self._api.reports(f"{entity}/{project}", name=name)
                if view.name == name
            ]  # fmt: skip
        return str(found[0].id) if found else None


@contextmanager
def wandb_errors() -> Iterator[None]:
    """Turns whatever the client raises into one line, without a key in it."""
    try:
        yield
    except ScalewiseError:
        raise
    except Exception as error:  # the client's errors are of many kinds
        text = redact.redact_text(" ".join(str(error).split()))[:300] or type(error).__name__
        raise ScalewiseError(f"W&B refused: {text}") from error
