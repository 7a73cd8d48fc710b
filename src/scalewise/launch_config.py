"""Launch options: process isolation, limits and restarts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


class Isolation(StrEnum):
    """Process of a job with one rank."""

    auto = "auto"
    """A separate process for sweeps, several ranks, time or memory limits and restarts; else this
    process."""
    process = "process"
    """Always a separate process."""
    none = "none"
    """Always this process."""


@register_option("launch", "local")
@dataclass(frozen=True)
class Launch:
    """Launch settings for one machine; ranks are processes under torch elastic."""

    timeout: float | None = None
    """Time after which a job and all its processes are killed, in seconds; null: no limit."""
    max_restarts: int = 0
    """Number of times that a job that failed or timed out restarts from its last checkpoint."""
    isolation: Isolation = Isolation.auto
    """Whether a job with one rank runs in a process of its own."""
    memory_limit_gib: float | None = None
    """Memory that training may allocate on a rank's device, or in its process on the CPU, in GiB;
    null: no limit."""
    grace: float = 30.0
    """Time that a rank has to write a checkpoint after SIGTERM before it is killed, in seconds."""
    collective_timeout: float = 1800.0
    """Time after which a collective operation fails that not all ranks have joined, in seconds."""
    gc_every: int | None = 50
    """Interval between garbage collections in a rank, in optimizer steps, instead of Python's
    automatic ones, which delay all ranks at different steps; null: automatic ones."""
    refuse_unfit: bool = False
    """Whether a job is rejected, and not tried, if the plan is certain that it runs
    out of memory."""

    @property
    def needs_own_process(self) -> bool:
        """Whether a limit or restart requires a separate process."""
        has_limit = self.timeout is not None or self.memory_limit_gib is not None
        return has_limit or self.max_restarts > 0

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield the issues of the limits."""
        for key in ("timeout", "memory_limit_gib"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                yield ConfigIssue(f"launch.{key}", value, "must be positive, or null")
        if self.max_restarts < 0:
            yield ConfigIssue("launch.max_restarts", self.max_restarts, "must be 0 or more")
        for key in ("grace", "collective_timeout"):
            if not getattr(self, key) > 0:
                yield ConfigIssue(f"launch.{key}", getattr(self, key), "must be positive")
        if self.gc_every is not None and self.gc_every < 1:
            yield ConfigIssue("launch.gc_every", self.gc_every, "must be 1 or more, or null")
        if self.isolation is Isolation.none and self.needs_own_process:
            yield ConfigIssue(
                "launch.isolation",
                "none",
                "timeout, memory limit and restarts require a separate process",
                "set launch.isolation=auto",
            )
