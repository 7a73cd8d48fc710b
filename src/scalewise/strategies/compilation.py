"""Compilation of a module by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from scalewise.models.base_module import ModelModule
from scalewise.torch_compile import Compile, CompileScope


def compile_module(config: Compile, module: ModelModule) -> None:
    """Compile a module, or each of its blocks, in place; compilation is lazy.

    Only ``forward`` is compiled: ``Module.compile`` falls back to eager mode for blocks with
    activation checkpointing.
    """
    modules: dict[CompileScope, Sequence[nn.Module]] = {
        CompileScope.none: [],
        CompileScope.block: module.layers(),
        CompileScope.whole: [module],
    }
    for target in modules[config.scope]:
        target.forward = torch.compile(
            target.forward, backend=config.backend.value, dynamic=config.dynamic
        )
