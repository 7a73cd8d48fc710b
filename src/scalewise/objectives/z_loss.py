"""z-loss of logits: a penalty for a softmax normalizer that moves away from 1.

Shape suffixes: N tokens of all sequences; V vocabulary.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from scalewise.objectives.config import IGNORED, CausalLM


def sum_with_z_loss(config: CausalLM, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Sum of the cross-entropy and of ``z_loss * log(Z)^2``, with ``Z = sum(exp(logits))``.

    ``log(Z)`` is the logit of any token minus its log-probability. With the token of the label, it
    needs no second pass over the logits, nor a copy of them for the backward pass. A compiler fuses
    such a pass, but not the gradient of one logit.
    """
    if torch.compiler.is_compiling():
        log_z_N = torch.logsumexp(logits_NV.float(), -1)
        loss_N = F.cross_entropy(
            logits_NV.float(),
            labels_N,
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=config.label_smoothing,
        )
        loss_N = loss_N + config.z_loss * log_z_N.square()
        return torch.where(labels_N != IGNORED, loss_N, 0.0).sum()
    # Read first, so that backward allocates its gradient last, when less memory is in use.
    label_logit_N = _read_label_logits(logits_NV, labels_N)
    logp_NV = F.log_softmax(logits_NV.float(), -1)
    nll_N = F.nll_loss(logp_NV, labels_N, ignore_index=IGNORED, reduction="none")
    if isinstance(nll_N, DTensor):
        nll_N = nll_N.to_local()
    loss_N = nll_N
    if config.label_smoothing:
        loss_N = torch.lerp(nll_N, -logp_NV.mean(-1), config.label_smoothing)
    loss_N = loss_N + config.z_loss * (label_logit_N + nll_N).square()
    return torch.where(labels_N != IGNORED, loss_N, 0.0).sum()


def _read_label_logits(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Logit of each label, in fp32; any number at ignored positions."""
    position_N = torch.arange(len(labels_N), device=labels_N.device)
    if not isinstance(logits_NV, DTensor):  # indexed, since gather saves the logits for backward
        return logits_NV[position_N, labels_N.clamp(min=0)].float()
    mesh, shard_NV = logits_NV.device_mesh, logits_NV.to_local()
    shard_size = ceil(logits_NV.shape[1] / mesh.size())
    index_N = labels_N - mesh.get_local_rank() * shard_size
    is_local_N = (index_N >= 0) & (index_N < shard_NV.shape[1])
    logit_N = shard_NV[position_N, index_N.clamp(0, shard_NV.shape[1] - 1)].float()
    sharded_N = DTensor.from_local(
        torch.where(is_local_N, logit_N, 0.0), mesh, [Partial()], run_check=False
    )
    total_N: Tensor = sharded_N.redistribute(placements=[Replicate()]).to_local()
    return total_N
