"""Config of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option

if TYPE_CHECKING:
    from scalewise.models.base_module import ModelModule


class CompileScope(StrEnum):
    """Unit that is compiled."""

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
    """What is compiled."""
    backend: CompileBackend = CompileBackend.inductor
    """Backend of ``torch.compile``."""
    dynamic: bool = False
    """Whether shapes may change without a recompilation."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield nothing: all combinations are supported."""
        yield from ()

    def apply(self, module: ModelModule) -> None:
        """Compile a module, or each of its blocks, in place; compilation is lazy.

        Only ``forward`` is compiled: ``Module.compile`` falls back to eager mode for blocks with
        activation checkpointing.
        """
        import torch

        modules = {
            CompileScope.none: [],
            CompileScope.block: module.layers(),
            CompileScope.whole: [module],
        }[self.scope]
        for target in modules:
            target.forward = torch.compile(
                target.forward, backend=self.backend.value, dynamic=self.dynamic
            )
