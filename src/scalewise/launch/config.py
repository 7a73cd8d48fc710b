"""In what processes a job runs, and what ends it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue


class Isolation(StrEnum):
    """``auto``: a process of its own for sweeps, several ranks, limits and restarts."""

    auto = "auto"
    process = "process"
    none = "none"


@register_option("launch", "local")
@dataclass(frozen=True)
class Launch:
    """One machine; the ranks are processes under torch elastic."""

    timeout: float | None = None
    """Seconds after which a job is ended with all its processes; None: never."""
    max_restarts: int = 0
    """How often a failed job starts again, from its last checkpoint."""
    isolation: Isolation = Isolation.auto
    """Whether a job of one rank leaves the calling process."""
    memory_limit_gib: float | None = None
    """Memory that training may take of a rank's device, GiB, or on the CPU of it; None: any."""
    grace: float = 30.0
    """Seconds a rank has to write a checkpoint after SIGTERM before it is killed."""
    refuse_unfit: bool = False
    """Whether a job that the plan is sure is out of memory is refused, and not tried."""

    @property
    def needs_process(self) -> bool:
        """Returns whether some limit asks for a process of its own."""
        limited = self.timeout is not None or self.memory_limit_gib is not None
        return limited or self.max_restarts > 0

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields limits that cannot hold."""
        for key in ("timeout", "memory_limit_gib"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                yield ConfigIssue(f"launch.{key}", value, "must be positive, or null")
        if self.max_restarts < 0:
            yield ConfigIssue("launch.max_restarts", self.max_restarts, "must be 0 or more")
        if not self.grace > 0:
            yield ConfigIssue("launch.grace", self.grace, "must be positive")
        if self.isolation is Isolation.none and self.needs_process:
            yield ConfigIssue(
                "launch.isolation",
                "none",
                "timeout, memory limit and restarts need a process of their own",
                "set launch.isolation=auto",
            )
