"""Where measurements are sent besides the run's own folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue


class WandbMode(StrEnum):
    """How Weights & Biases is used. ``auto``: online with a key and a server, else offline."""

    auto = "auto"
    """Online with an API key and a server, else offline."""
    online = "online"
    """Send metrics while training."""
    offline = "offline"
    """Write to disk; send later with ``scalewise publish``."""
    disabled = "disabled"
    """No tracking."""


class ArtifactsKind(StrEnum):
    """Files that a published run uploads."""

    none = "none"
    """No files."""
    files = "files"
    """Small files, and artifacts that reference the checkpoints."""
    checkpoints = "checkpoints"
    """The same and the checkpoints themselves."""


VARIABLE = {
    "online": WandbMode.online,
    "offline": WandbMode.offline,
    "disabled": WandbMode.disabled,
    "run": WandbMode.online,
    "dryrun": WandbMode.offline,
}
"""What ``WANDB_MODE`` may say."""


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
    """Team or user; null: the account's default."""
    group: str | None = None
    """Group of the run; null: the name of the sweep, if there is one."""
    tags: tuple[str, ...] = ()
    """Tags in addition to the chosen options."""
    notes: str = ""
    """Free description."""
    log_artifacts: ArtifactsKind = ArtifactsKind.files
    """Files that are uploaded in addition to metrics and tables when the run is published."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields a project that W&B would not take."""
        if not self.project or any(c in self.project for c in "/\\#?%:"):
            yield ConfigIssue(
                "tracking.project", self.project, "must be a name without / \\ # ? % :"
            )

    @property
    def requested_mode(self) -> WandbMode:
        """Returns the mode that ``WANDB_MODE`` asks for, else this spec's; none stays none."""
        if self.mode is WandbMode.disabled:
            return self.mode
        return VARIABLE.get(os.environ.get("WANDB_MODE", "").strip().lower(), self.mode)

    @property
    def is_enabled(self) -> bool:
        """Returns whether there is a tracker at all."""
        return self.requested_mode is not WandbMode.disabled

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yields variables of the environment on which W&B would stumble."""
        if not self.is_enabled:
            return
        mode, server = (os.environ.get(f"WANDB_{name}", "") for name in ("MODE", "BASE_URL"))
        if mode.strip() and mode.strip().lower() not in VARIABLE:
            fix = "set WANDB_MODE=offline, or unset it"
            yield ConfigIssue("WANDB_MODE", mode, f"is none of {', '.join(VARIABLE)}", fix)
        if server and not is_server_url(server):
            fix = "write it with its scheme, as http://localhost:8080, or unset it"
            yield ConfigIssue("WANDB_BASE_URL", server, "is no address of a server", fix)


def is_server_url(address: str) -> bool:
    """Returns whether an address has what a client needs: a scheme, a host, a port that is one."""
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
