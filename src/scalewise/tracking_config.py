"""Config group ``tracking``: the Weights & Biases run of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


class WandbMode(StrEnum):
    """W&B mode of a run."""

    auto = "auto"
    """Online with an API key and a server, else offline."""
    online = "online"
    """Upload metrics while training."""
    offline = "offline"
    """Write to disk; upload later with ``scalewise publish``."""
    disabled = "disabled"
    """No tracking."""


class ArtifactsKind(StrEnum):
    """Files that a published run uploads."""

    none = "none"
    """No files."""
    files = "files"
    """Small files, and artifacts that reference the checkpoints."""
    checkpoints = "checkpoints"
    """Small files and the checkpoints themselves."""


WANDB_MODES = {
    "online": WandbMode.online,
    "offline": WandbMode.offline,
    "disabled": WandbMode.disabled,
    "run": WandbMode.online,
    "dryrun": WandbMode.offline,
}
"""Values of ``WANDB_MODE``."""


@register_option("tracking", "wandb")
@dataclass(frozen=True)
class WandbConfig:
    """One Weights & Biases run per job.

    ``WANDB_*`` variables take precedence, except over ``mode=disabled``.
    """

    mode: WandbMode = WandbMode.auto
    """Online, offline or disabled."""
    project: str = "scalewise"
    """Project of the run."""
    entity: str | None = None
    """Team or user; null: the account's default entity."""
    group: str | None = None
    """Group of the run; null: the name of the sweep, if any."""
    tags: tuple[str, ...] = ()
    """Tags, in addition to the chosen options."""
    notes: str = ""
    """Notes of the run."""
    log_artifacts: ArtifactsKind = ArtifactsKind.files
    """Files that are uploaded in addition to metrics and tables when the run is published."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for an invalid project name."""
        if not self.project or any(c in self.project for c in "/\\#?%:"):
            yield ConfigIssue(
                "tracking.project", self.project, "must not be empty or contain / \\ # ? % :"
            )

    @property
    def requested_mode(self) -> WandbMode:
        """Mode set by ``WANDB_MODE``, else ``mode``; ``mode=disabled`` takes precedence."""
        if self.mode is WandbMode.disabled:
            return self.mode
        return WANDB_MODES.get(os.environ.get("WANDB_MODE", "").strip().lower(), self.mode)

    @property
    def is_enabled(self) -> bool:
        """Whether the run is tracked."""
        return self.requested_mode is not WandbMode.disabled

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yield issues for invalid ``WANDB_*`` environment variables."""
        if not self.is_enabled:
            return
        mode, server = (os.environ.get(f"WANDB_{name}", "") for name in ("MODE", "BASE_URL"))
        if mode.strip() and mode.strip().lower() not in WANDB_MODES:
            fix = "set WANDB_MODE=offline, or unset it"
            yield ConfigIssue("WANDB_MODE", mode, f"must be one of {', '.join(WANDB_MODES)}", fix)
        if server and not is_server_url(server):
            fix = "set an http(s) URL such as http://localhost:8080, or unset it"
            yield ConfigIssue("WANDB_BASE_URL", server, "is not a server URL", fix)


def is_server_url(address: str) -> bool:
    """Whether ``address`` is an http(s) URL with a host and a valid port."""
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
