"""Where measurements are sent besides the run's own folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from scalewise.config.registry import option
from scalewise.errors import Complaint


class Mode(StrEnum):
    """How Weights & Biases is used. ``auto``: online with a key and a server, else offline."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@option("tracking", "wandb")
@dataclass(frozen=True)
class Wandb:
    """One Weights & Biases run per job. ``WANDB_*`` variables of the environment win."""

    mode: Mode = Mode.auto
    """Online, offline or not at all."""
    project: str = "scalewise"
    """Project that receives the run."""
    entity: str | None = None
    """Team or user; None: the account's default."""
    group: str | None = None
    """Group; None: the sweep's name, if there is a sweep."""
    tags: tuple[str, ...] = ()
    """Tags beside those that the run's parts give."""
    notes: str = ""
    """A free description."""

    def complaints(self) -> Iterator[Complaint]:
        """Yields a project that W&B would not take."""
        if not self.project or any(c in self.project for c in "/\\#?%:"):
            yield Complaint("tracking.project", self.project, "must be a name without / \\ # ? % :")
