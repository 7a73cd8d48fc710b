"""Builders of torch optimizers from optimizer configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.models.base import Weight
from scalewise.optimizers.base import OptimizerConfig
from scalewise.torch_compile import Compile

if TYPE_CHECKING:
    from torch import Tensor, nn, optim
    from torch.distributed import ProcessGroup


def build_optimizer(
    config: OptimizerConfig, named_weights: Iterable[tuple[Weight, nn.Parameter]]
) -> optim.Optimizer:
    """Build the torch optimizer over the parameters that require a gradient."""
    return build_from_groups(config, build_parameter_groups(config, named_weights))


@lazy_dispatch
def build_from_groups(config: OptimizerConfig, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
    """Build the torch optimizer over parameter groups."""
    raise not_registered(build_from_groups, config)


def build_parameter_groups(
    config: OptimizerConfig, named_weights: Iterable[tuple[Weight, nn.Parameter]]
) -> list[dict[str, Any]]:
    """Parameter groups, one for all parameters with the same settings.

    With ``in_backward``, one per parameter. Parameters on another device mesh, such as experts,
    have their own: batched updates take tensors of one mesh.
    """
    parameters: dict[tuple[object, ...], list[nn.Parameter]] = {}
    settings_by_key: dict[tuple[object, ...], dict[str, object]] = {}
    for weight, parameter in named_weights:
        if parameter.requires_grad:
            settings = config.group_settings(weight)
            mesh = getattr(parameter, "device_mesh", None)
            key = (*settings.items(), weight.name * config.in_backward, mesh)
            parameters.setdefault(key, []).append(parameter)
            settings_by_key[key] = settings
    return [{"params": parameters[key], **settings_by_key[key]} for key in parameters]


@lazy_dispatch
def set_replicas(
    config: OptimizerConfig, optimizer: optim.Optimizer, replicas: ProcessGroup
) -> None:
    """Let ranks with equal gradients of unsharded parameters divide the work of a step.

    Most optimizers have no work that is worth dividing: nothing changes.
    """


@lazy_dispatch
def compile_updates(
    config: OptimizerConfig, optimizer: optim.Optimizer, compile_config: Compile
) -> None:
    """Compile the update rule, if it has parts that no kernel fuses: none."""


@lazy_dispatch
def average_weights(
    config: OptimizerConfig, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights for evaluation, from the trained weights and the state, all by name."""
    return dict(weights)
