"""Whether torch compiles the model, and in what pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue

if TYPE_CHECKING:
    from scalewise.models.base_module import ModelModule


class CompileScope(StrEnum):
    """What is compiled as one."""

    none = "none"
    block = "block"
    """Each block, which are alike: one compilation serves all (regional compilation)."""
    whole = "whole"
    """The model, from tokens to logits."""


class CompileBackend(StrEnum):
    """What makes code of the graph."""

    inductor = "inductor"
    aot_eager = "aot_eager"
    """Traces and differentiates, and generates nothing: to see what compiling itself changes."""


@register_option("compile", "compile")
@dataclass(frozen=True)
class Compile:
    """``torch.compile`` of the model, in place."""

    scope: CompileScope = CompileScope.none
    """What is compiled as one."""
    backend: CompileBackend = CompileBackend.inductor
    """What makes code of the graph."""
    dynamic: bool = False
    """Whether shapes may change without compiling again."""

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields nothing: every pair can be had."""
        yield from ()

    def apply(self, module: ModelModule) -> None:
        """Compiles a module in place; it happens when the module first runs.

        Their ``forward`` and no more: ``Module.compile`` gives blocks up that recompute.
        """
        import torch

        parts = {
            CompileScope.none: [],
            CompileScope.block: module.layers(),
            CompileScope.whole: [module],
        }[self.scope]
        for part in parts:
            part.forward = torch.compile(
                part.forward, backend=self.backend.value, dynamic=self.dynamic
            )
