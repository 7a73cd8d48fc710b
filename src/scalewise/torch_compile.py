"""Config of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


class CompileScope(StrEnum):
    """Unit that is compiled."""

    auto = "auto"
    """``block`` on CUDA where the other options of the run support it, else ``none``."""
    none = "none"
    """No compilation: eager mode."""
    block = "block"
    """Each transformer block by itself: one compilation serves all blocks (regional
    compilation)."""
    whole = "whole"
    """The whole model as one graph, from tokens to logits."""


class CompileBackend(StrEnum):
    """Backend of ``torch.compile``."""

    inductor = "inductor"
    """Generates fused kernels (TorchInductor)."""
    aot_eager = "aot_eager"
    """Traces forward and backward and runs them in eager mode; for debugging."""


@register_option("compile", "compile")
@dataclass(frozen=True)
class Compile:
    """Compilation by ``torch.compile``."""

    scope: CompileScope = CompileScope.none
    """What is compiled; on CUDA, the loss is compiled too, unless ``none``."""
    backend: CompileBackend = CompileBackend.inductor
    """Backend of ``torch.compile``."""
    dynamic: bool = False
    """Whether shapes may change without a recompilation."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield nothing: all combinations are supported."""
        yield from ()
