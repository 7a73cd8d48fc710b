"""Training of a user-defined LightningModule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.objectives.base import ObjectiveConfig
from scalewise.registry import register_option


@register_option("objective", "module")
@dataclass(frozen=True)
class UserModule(ObjectiveConfig):
    """A user-defined LightningModule with its own steps, loss, optimizer and schedule."""

    target: str = ""
    """Import path of the class, ``package.module.Class``; its package must be in
    ``trusted_packages``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    held_out: str = "val_loss"
    """Name under which the module logs its validation loss."""

    is_user_defined = True
    trace_only = True

    def validate(self) -> Iterator[ConfigIssue]:
        """Issue of a chunked loss: the module computes the loss itself."""
        if self.loss_chunk is not None:
            reason = "is not supported: a user-defined module computes its own loss"
            fix = "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, fix)


@register_option("model", "module")
@register_option("optimizer", "module")
@register_option("schedule", "module")
@dataclass(frozen=True)
class ModuleDecides:
    """Placeholder for a group that a user-defined LightningModule decides itself.

    The analytic planner rejects it with a ``ConfigError``; use plan.method=trace.
    """

    imports: ClassVar[tuple[str, ...]] = ()
    """Packages that the option imports; those of the module are imported in its ranks."""

    def validate(self) -> Iterator[ConfigIssue]:
        """No issues: the option has no fields."""
        yield from ()

    validate_machine = validate

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # pickle and copy look up optional methods
            raise AttributeError(name)
        reason = "does not cover user-defined modules"
        raise ConfigError.for_key("plan.method", "ledger", reason, "set plan.method=trace")
