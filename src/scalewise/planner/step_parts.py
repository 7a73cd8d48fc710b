"""Parts of a predicted step time, and their titles."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one optimizer step on the slowest rank, in seconds."""

    matmul: float
    """Matmuls."""
    attention: float
    """Attention."""
    pointwise: float
    """Pointwise operators and casts."""
    recompute: float
    """Recomputation of activation checkpointing."""
    optimizer: float
    """Optimizer step."""
    exposed_communication: dict[str, float]
    """Collectives that do not overlap with compute, by mesh axes."""
    overlapped_communication: float
    """Collectives that overlap with compute."""
    pipeline_bubble: float
    """Idle time of a pipeline rank at the start and at the end of a step."""
    data_loading: float = 0.0
    """Data loading before each micro-batch."""
    host_copies: float = 0.0
    """Copies between device and host that do not overlap with compute."""
    forward_only: float = 0.0
    """Forward passes without backward: of a reference model, or of generation."""
    overlap_slowdown: float = 0.0
    """Compute that takes longer because it overlaps with collectives."""

    @property
    def seconds(self) -> float:
        """Step time, in seconds; overlapped communication only slows compute down."""
        busy = self.matmul + self.attention + self.pointwise + self.recompute + self.forward_only
        busy += self.overlap_slowdown
        waits = (
            sum(self.exposed_communication.values())
            + self.pipeline_bubble
            + self.data_loading
            + self.host_copies
        )
        return busy + self.optimizer + waits

    def scale(self, factor: float) -> StepTime:
        """Return the step time with every part multiplied by ``factor``."""
        exposed = {axes: seconds * factor for axes, seconds in self.exposed_communication.items()}
        others = {
            entry.name: getattr(self, entry.name) * factor
            for entry in fields(self)
            if entry.name != "exposed_communication"
        }
        return StepTime(exposed_communication=exposed, **others)

    def without_overlap(self) -> StepTime:
        """Return the step time of a framework whose collectives never overlap with compute."""
        seconds = self.overlapped_communication
        exposed = {**self.exposed_communication, "no overlap": seconds}
        return replace(
            self, exposed_communication=exposed, overlapped_communication=0.0, overlap_slowdown=0.0
        )

    def parts(self) -> dict[str, float]:
        """Return the time by part, in seconds, largest first; names are keys of ``plan.json``."""
        named = {
            "products": self.matmul,
            "attention": self.attention,
            "pointwise": self.pointwise,
            "recompute": self.recompute,
            "reference": self.forward_only,
            "overlap slowdown": self.overlap_slowdown,
            "optimizer": self.optimizer,
            "bubble": self.pipeline_bubble,
            "loading rows": self.data_loading,
            "copies off the device and back": self.host_copies,
            **{
                f"messages along {axes}": seconds
                for axes, seconds in self.exposed_communication.items()
            },
        }
        return dict(sorted(named.items(), key=lambda item: -item[1]))


STEP_PART_TITLES = {
    "products": "matmuls",
    "reference": "forward-only passes",
    "overlap slowdown": "slower compute during collectives",
    "bubble": "pipeline bubble",
    "loading rows": "data loading",
    "copies off the device and back": "host copies",
}
"""Title of each part of a step whose key is no term of the field."""


def step_part_title(name: str) -> str:
    """Return the name of a part of a step for people, from its key in ``plan.json``."""
    return STEP_PART_TITLES.get(name, name.replace("messages along ", "communication over "))
