"""Activation checkpointing and compilation of blocks, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from scalewise.compat.torch import (
    ATTENTION_OPS,
    GROUPED_MATMUL_OP,
    VARLEN_ATTENTION_OP,
    raise_recompile_limit,
)
from scalewise.compat.torch_distributed import SAVED_COLLECTIVES
from scalewise.hardware import DeviceKind
from scalewise.memory_config import ActivationCheckpointing, AutoCheckpointing
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.grouped_mm import grouped_mm  # noqa: F401 (registers its operator)
from scalewise.models.op_graph import Recompute
from scalewise.models.varlen_cpu import varlen_attention_cpu  # noqa: F401 (registers its operator)
from scalewise.strategies.activation_offload import offload_blocks
from scalewise.torch_compile import Compile, CompileScope

MATMUL_OPS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
SEGMENT_OPS = (torch.ops.scalewise.varlen_attention_cpu,)
EXPERT_OPS = (torch.ops.scalewise.grouped_mm, GROUPED_MATMUL_OP)
SAVED_OPS = (
    frozenset(op.default for op in (*MATMUL_OPS, *ATTENTION_OPS, *SEGMENT_OPS, *EXPERT_OPS))
    | SAVED_COLLECTIVES
)
"""Operators whose results selective checkpointing stores: costly to repeat."""
RECOMPILE_LIMIT = 8
"""Default of torch's limit to the compilations of a function."""


def apply_checkpointing(
    config: ActivationCheckpointing, module: ModelModule, stage: StageSlice, device: DeviceKind
) -> None:
    """Apply activation checkpointing and offload to the blocks of ``stage``, in place.

    Names and parameters do not change. Raises ``RuntimeError`` for ``memory=auto``, which has to be
    resolved first.

    Args:
        config: Config of activation checkpointing.
        module: Module of the stage.
        stage: Layers of the stage.
        device: Kind of device that runs the module.
    """
    if isinstance(config, AutoCheckpointing):
        raise RuntimeError("memory=auto has to be resolved before a module is built")
    blocks, recompute_modes = module.layers(), config.recompute_per_layer((stage,))
    for recompute, block in zip(recompute_modes, blocks, strict=True):
        if recompute is not Recompute.nothing:
            checkpoint_block(block, save_matmuls=recompute is Recompute.selective)
    if config.offload:
        offload_blocks(blocks, recompute_modes, device)


def checkpoint_block(block: nn.Module, *, save_matmuls: bool) -> None:
    """Wrap the forward of a block in ``torch.utils.checkpoint``, in place.

    ``save_matmuls``: results of matmuls, attention and collectives are stored and not recomputed
    (selective checkpointing). Module hooks, such as FSDP's, lie outside of the wrapper and run
    once.
    """
    contexts: dict[str, Any] = {}
    if save_matmuls:
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _selective_policy)
    forward: Callable[..., Any] = block.forward
    block.forward = partial(checkpoint, forward, use_reentrant=False, **contexts)


def _selective_policy(
    context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> Any:
    saves = op in SAVED_OPS or op.name() == VARLEN_ATTENTION_OP
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def compile_module(config: Compile, module: ModelModule, num_lengths: int = 1) -> None:
    """Compile a module, or each of its blocks, in place; compilation is lazy.

    Only ``forward`` is compiled: ``Module.compile`` falls back to eager mode for blocks with
    activation checkpointing.

    Args:
        config: Compilation.
        module: Model or pipeline stage.
        num_lengths: Number of sequence lengths, each of which is compiled by itself.
    """
    modules: dict[CompileScope, Sequence[nn.Module]] = {
        CompileScope.none: [],
        CompileScope.block: module.layers(),
        CompileScope.whole: [module],
    }
    if modules[config.scope] and num_lengths > 1:
        # Beyond the limit, torch would run further lengths in eager mode.
        raise_recompile_limit(RECOMPILE_LIMIT * num_lengths)
    for target in modules[config.scope]:
        target.forward = torch.compile(
            target.forward, backend=config.backend.value, dynamic=config.dynamic
        )
