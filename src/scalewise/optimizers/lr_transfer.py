"""Transfer of a learning rate from a narrow model to a wide one: factors by parameter."""

from __future__ import annotations

from enum import StrEnum

from scalewise.models.base import Weight

HIDDEN_ROLES = ("attention", "feedforward")
"""Roles of matrices whose two dimensions grow with the width of the model."""


class LRTransfer(StrEnum):
    """Rule by which learning rates, initial weights and logits depend on the width."""

    none = "none"
    """One learning rate for all parameters, whatever the width."""
    mup = "mup"
    """Maximal update parametrization, muP (Yang et al., 2022)."""


class UpdateScale(StrEnum):
    """Dependence of an optimizer's updates on the scale of the gradients."""

    normalized = "normalized"
    """Updates do not depend on it: Adam and its variants, and the sign of a momentum."""
    proportional = "proportional"
    """Updates are proportional to the gradients: SGD."""


def is_hidden_matrix(weight: Weight) -> bool:
    """Whether a weight is a matrix of a block, without experts."""
    return weight.role in HIDDEN_ROLES and len(weight.shape) == 2


def mup_lr_factor(weight: Weight, scale: UpdateScale) -> float:
    """Factor of the learning rate of a weight in muP.

    m is ``weight.width_ratio``. Adam: 1/m for hidden matrices, else 1. SGD: 1 for hidden matrices,
    else m, which is 1 for the bias of the head: its size does not grow.

    Source: Yang et al., 2022, Tensor Programs V, arXiv 2203.03466, table 8.
    """
    if scale is UpdateScale.normalized:
        return 1 / weight.width_ratio if is_hidden_matrix(weight) else 1.0
    return 1.0 if is_hidden_matrix(weight) else weight.width_ratio
