"""Tensor parallelism with DTensor styles, chosen by ``ModelConfig.tensor_parallel_styles``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from scalewise.adapters.prompt_config import PREFIX_NAMES
from scalewise.models.base import TPStyle
from scalewise.models.base_module import ModelModule
from scalewise.models.decoder.moe import MixtureOfExperts
from scalewise.parallelism.mesh import MeshConfig
from scalewise.strategies.tensor_parallel_experts import (
    GatheredExperts,
    PartialSumLinear,
    ReplicatedRouter,
    ShardedExperts,
)

TOKEN_SHARD = Shard(1)
"""Placement of ``x_BTW`` under sequence parallelism."""
HEAD_DIM = 2
"""Dimension of the heads in ``query_BTHD``."""


def apply_tensor_parallel(
    module: ModelModule,
    tp_styles: Mapping[str, TPStyle],
    mesh: DeviceMesh,
    spec: MeshConfig,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard the parameters of a model or stage, in place; they become DTensors.

    Args:
        module: Model or pipeline stage.
        tp_styles: Style by module name, with ``*`` in place of layer indices.
        mesh: Mesh of the tensor-parallel ranks.
        spec: Config of the strategy.
        expert_mesh: Mesh with the axes ``expert`` and ``tensor``, which share the matrices of
            routed experts; None: no expert parallelism.
    """
    residual_placement: Placement = TOKEN_SHARD if spec.sequence_parallel else Replicate()
    embeds_all_tokens = module.embeds_all_tokens or TPStyle.prompt in tp_styles.values()
    embedding_placement = Replicate() if embeds_all_tokens else residual_placement
    # -2: position embeddings may have no batch dimension.
    position_placement: Placement = Replicate()
    if spec.sequence_parallel and not module.embeds_all_tokens:
        position_placement = Shard(-2)
    parallel_styles: dict[TPStyle, ParallelStyle] = {
        TPStyle.column: ColwiseParallel(),
        TPStyle.row: RowwiseParallel(output_layouts=residual_placement),
        TPStyle.partial_row: RowwiseParallel(output_layouts=Partial(), use_local_output=False),
        TPStyle.partial_replicated: PartialSumLinear(),
        **{it: ShardedExperts(it, expert_mesh) for it in ShardedExperts.styles},
        TPStyle.router: ReplicatedRouter(),
        TPStyle.vocabulary: RowwiseParallel(
            input_layouts=Replicate(), output_layouts=embedding_placement
        ),
        TPStyle.head: ShardedHead(residual_placement, loss_parallel=spec.loss_parallel),
        TPStyle.tokens: SequenceParallel(use_local_output=True)
        if spec.sequence_parallel
        else ReplicatedModule(Replicate()),
        TPStyle.heads: SequenceParallel(sequence_dim=HEAD_DIM, use_local_output=True),
        TPStyle.positions: ReplicatedModule(position_placement),
        TPStyle.prompt: ReplicatedModule(residual_placement),
        TPStyle.replicated: ReplicatedModule(Replicate()),
    }
    requires_grad = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    # Shared experts get the tokens that their mixture has gathered.
    column_parents = _parents(tp_styles, TPStyle.column) - _parents(tp_styles, TPStyle.partial_row)
    for name, part in list(module.named_modules()):
        if hasattr(part, "base_layer"):
            continue  # an adapter layer: its children are sharded
        pattern = re.sub(r"\b\d+\b", "*", name).removesuffix(".base_layer")
        if pattern in tp_styles:
            style = parallel_styles[tp_styles[pattern]]
            if (
                ".lora_B" in name
                and tp_styles[pattern] is TPStyle.tokens
                and spec.sequence_parallel
            ):
                style = SequenceParallel(use_local_output=True)
            elif ".lora_magnitude" in name or name.endswith((".ia3_l", *PREFIX_NAMES)):
                style = ShardedScale(tp_styles[pattern], residual_placement)
            parallelize_module(part, mesh, style)
        elif isinstance(part, MixtureOfExperts):
            parallelize_module(part, mesh, GatheredExperts(residual_placement))
        elif pattern in column_parents:
            parallelize_module(part, mesh, GatheredInput(residual_placement))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(requires_grad[name])  # some of torch's styles reset it
    if module.embeds_all_tokens and not spec.sequence_parallel:
        return
    if module.embeds_all_tokens:
        first_block = module.layers()[0]
        first_block.register_forward_pre_hook(partial(_shard_tokens, mesh), with_kwargs=True)
    module.gather_tokens = lambda x_BTW: _gather_first_input(residual_placement, (x_BTW,), mesh)[0]


def _parents(tp_styles: Mapping[str, TPStyle], tp_style: TPStyle) -> set[str]:
    """Names of the modules that have a child of a style."""
    return {name.rpartition(".")[0] for name, style in tp_styles.items() if style is tp_style}


def keep_gradients_sharded(module: nn.Module) -> None:
    """Shard every gradient as its parameter; DTensor replicates the gradient of an embedding.

    FSDP replaces parameters at the first forward pass, so that hooks are registered again there.
    """
    hooked: list[nn.Parameter] = []

    def register_hook(parameter: nn.Parameter) -> None:
        if not isinstance(parameter, DTensor) or not parameter.requires_grad:
            return
        if not any(parameter is other for other in hooked):
            hooked.append(parameter)
            hook = partial(_redistribute, parameter.placements)
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]  # torch lacks it

    for parameter in module.parameters():
        register_hook(parameter)
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_pre_hook(lambda part, _: register_hook(part.weight))


class GatheredInput(ParallelStyle):
    """Style of a sublayer that reads all tokens: one all-gather serves all its column layers."""

    def __init__(self, input_placement: Placement) -> None:
        super().__init__()
        self._input_placement = input_placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Not distribute_module: it would replicate the parameters of the column layers.
        hook = partial(self._gather_input, device_mesh)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def _gather_input(
        self, mesh: DeviceMesh, module: nn.Module, inputs: Any, kwargs: dict[str, Any]
    ) -> Any:
        if inputs:
            return _gather_first_input(self._input_placement, inputs, mesh), kwargs
        first, *_ = kwargs  # transformers passes inputs of sublayers by keyword
        return inputs, kwargs | {
            first: _gather_first_input(self._input_placement, (kwargs[first],), mesh)[0]
        }


class ReplicatedModule(ParallelStyle):
    """Style of replicated parameters and computation; redistributes to ``output``."""

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self._output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks: Any = (self._gather_input, partial(_to_local, self._output))
        return distribute_module(module, device_mesh, None, *hooks)

    @staticmethod
    def _gather_input(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return _gather_first_input(Replicate(), inputs, mesh)


class ShardedScale(ParallelStyle):
    """Style of per-feature scales and prefixes, sharded as the features they apply to."""

    def __init__(self, style: TPStyle, residual_placement: Placement) -> None:
        super().__init__()
        weight_placements = {
            TPStyle.column: Shard(0),
            TPStyle.row: Shard(1),
            TPStyle.tokens: Replicate(),
        }
        self._weight_placement = weight_placements[style]
        self._feature_placement = residual_placement if style is TPStyle.tokens else Shard(2)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks: Any = (self._to_dtensor, partial(_to_local, self._feature_placement))
        return distribute_module(
            module, device_mesh, partial(_shard_parameter, self._weight_placement), *hooks
        )

    def _to_dtensor(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [self._feature_placement], run_check=False)


class ShardedHead(ParallelStyle):
    """Style of the output head, sharded along the vocabulary; tied or untied."""

    def __init__(self, residual_placement: Placement, *, loss_parallel: bool) -> None:
        super().__init__()
        self._residual_placement, self._loss_parallel = residual_placement, loss_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, partial(_shard_parameter, Shard(0)))
        forward: Callable[..., Any] = module.forward

        def sharded_forward(*inputs: Tensor) -> Tensor:
            gathered = _gather_first_input(self._residual_placement, inputs, device_mesh)
            return self._gather_logits(forward(*gathered))

        module.forward = sharded_forward  # no hooks: a chunked loss calls it by itself
        return module

    def _gather_logits(self, logits_BTV: Any) -> Tensor:
        if self._loss_parallel:
            sharded_BTV: Tensor = logits_BTV
            return sharded_BTV
        gathered_BTV: Tensor = logits_BTV.redistribute(placements=[Replicate()]).to_local()
        return gathered_BTV


def _shard_parameter(placement: Placement, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        shards = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(shards))


def _gather_first_input(placement: Placement, inputs: Any, mesh: DeviceMesh) -> Any:
    """Inputs with the first, sharded by ``placement``, gathered on every rank."""
    x, *others = inputs
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [placement], run_check=False)
    return (x.redistribute(placements=[Replicate()]), *others)


def _shard_tokens(
    mesh: DeviceMesh, block: nn.Module, inputs: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Inputs of a block with this rank's tokens of the first one, of which all ranks have all."""
    x_BTW, *others = inputs
    replicated = DTensor.from_local(x_BTW, mesh, [Replicate()], run_check=False)
    return (replicated.redistribute(placements=[TOKEN_SHARD]).to_local(), *others), kwargs


def _redistribute(placements: Sequence[Placement], gradient: DTensor) -> DTensor:
    return gradient.redistribute(placements=placements)


def _to_local(output: Placement, module: nn.Module, result: Any, mesh: DeviceMesh) -> Tensor:
    local: Tensor = result.redistribute(placements=[output]).to_local()
    return local
