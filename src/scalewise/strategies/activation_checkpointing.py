"""Activation checkpointing: activations of a block are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
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

from scalewise.activation_checkpointing import ActivationCheckpointing, AutoCheckpointing
from scalewise.compat.torch import ATTENTION_OPS
from scalewise.compat.torch_distributed import SAVED_COLLECTIVES
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.op_graph import Recompute
from scalewise.strategies.activation_offload import offload_block

MATMUL_OPS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
SAVED_OPS = frozenset(op.default for op in (*MATMUL_OPS, *ATTENTION_OPS)) | SAVED_COLLECTIVES
"""Operators whose results selective checkpointing stores: costly to repeat."""


def apply_checkpointing(
    config: ActivationCheckpointing, module: ModelModule, stage: StageSlice
) -> None:
    """Apply activation checkpointing and offload to the blocks of ``stage``, in place.

    Names and parameters do not change. Raises ``RuntimeError`` for ``memory=auto``, which has to be
    resolved first.
    """
    if isinstance(config, AutoCheckpointing):
        raise RuntimeError("memory=auto has to be resolved before a module is built")
    for recompute, block in zip(config.recompute_per_layer((stage,)), module.layers(), strict=True):
        if recompute is not Recompute.nothing:
            checkpoint_block(block, save_matmuls=recompute is Recompute.selective)
        if config.offload:
            offload_block(block)


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
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE
