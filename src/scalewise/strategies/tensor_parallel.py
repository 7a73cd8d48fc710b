"""Tensor parallelism as DTensor styles, read off the model's ``tensor_split``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from scalewise.adapters.prompt_tuning import PREFIX
from scalewise.models.base import TPStyle
from scalewise.models.base_module import ModelModule
from scalewise.parallelism.mesh import MeshConfig

TOKENS = Shard(1)
"""Where sequence parallelism cuts ``x_BTW``."""


def apply_tensor_parallel(
    module: ModelModule, tp_styles: Mapping[str, TPStyle], mesh: DeviceMesh, spec: MeshConfig
) -> None:
    """Cuts a model, or the stage of one, by its table, in place; parameters become DTensors."""
    between: Placement = TOKENS if spec.sequence_parallel else Replicate()
    embedded = Replicate() if TPStyle.prompt in tp_styles.values() else between
    places: Placement = Shard(-2) if spec.sequence_parallel else Replicate()  # rows may differ
    kinds: dict[TPStyle, ParallelStyle] = {
        TPStyle.column: ColwiseParallel(),
        TPStyle.row: RowwiseParallel(output_layouts=between),
        TPStyle.vocabulary: RowwiseParallel(input_layouts=Replicate(), output_layouts=embedded),
        TPStyle.head: ShardedHead(between, loss_parallel=spec.loss_parallel),
        TPStyle.tokens: SequenceParallel()
        if spec.sequence_parallel
        else ReplicatedModule(Replicate()),
        TPStyle.positions: ReplicatedModule(places),
        TPStyle.prompt: ReplicatedModule(between),
        TPStyle.replicated: ReplicatedModule(Replicate()),
    }
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    columns = {name.rpartition(".")[0] for name, how in tp_styles.items() if how is TPStyle.column}
    for name, part in list(module.named_modules()):
        if hasattr(part, "base_layer"):
            continue  # an adapter's: what it holds is cut
        pattern = re.sub(r"\b\d+\b", "*", name).removesuffix(".base_layer")
        if pattern in tp_styles:
            style = kinds[tp_styles[pattern]]
            if (
                ".lora_B" in name
                and tp_styles[pattern] is TPStyle.tokens
                and spec.sequence_parallel
            ):
                style = SequenceParallel(use_local_output=True)
            elif ".lora_magnitude" in name or name.endswith((".ia3_l", *PREFIX)):
                style = ShardedScale(tp_styles[pattern], between)
            parallelize_module(part, mesh, style)
        elif pattern in columns:
            parallelize_module(part, mesh, GatheredInput(between))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained[name])  # which some of torch's styles forget
    module.gather_tokens = lambda x_BTW: _gather_first_input(between, (x_BTW,), mesh)[0]


def keep_gradients_sharded(module: nn.Module) -> None:
    """Cuts every gradient as its parameter is: DTensor leaves that of an embedding whole.

    FSDP computes with a parameter of its own, which is there from the first forward.
    """
    known: list[nn.Parameter] = []

    def cut(parameter: nn.Parameter) -> None:
        if not isinstance(parameter, DTensor) or not parameter.requires_grad:
            return
        if not any(parameter is other for other in known):
            known.append(parameter)
            hook = partial(_redistribute, parameter.placements)
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]  # torch lacks it

    for parameter in module.parameters():
        cut(parameter)
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_pre_hook(lambda part, _: cut(part.weight))


class GatheredInput(ParallelStyle):
    """A sublayer that reads all tokens: what it is given is joined once for all its columns."""

    def __init__(self, input_placement: Placement) -> None:
        super().__init__()
        self._input_placement = input_placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Not distribute_module: it would replicate what the columns below are to cut.
        hook = partial(self._gather_input, device_mesh)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def _gather_input(
        self, mesh: DeviceMesh, module: nn.Module, inputs: Any, kwargs: dict[str, Any]
    ) -> Any:
        if inputs:
            return _gather_first_input(self._input_placement, inputs, mesh), kwargs
        first, *_ = kwargs  # transformers names what a sublayer reads
        return inputs, kwargs | {
            first: _gather_first_input(self._input_placement, (kwargs[first],), mesh)[0]
        }


class ReplicatedModule(ParallelStyle):
    """Every rank computes the same with all of the weights, and goes on with its ``output``."""

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
    """What scales features, or stands before them: cut as those are, or whole where they are."""

    def __init__(self, style: TPStyle, residual_placement: Placement) -> None:
        super().__init__()
        held = {TPStyle.column: Shard(0), TPStyle.row: Shard(1), TPStyle.tokens: Replicate()}
        self._weight_placement = held[style]
        self._feature_placement = residual_placement if style is TPStyle.tokens else Shard(2)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks: Any = (self._to_dtensor, partial(_to_local, self._feature_placement))
        return distribute_module(
            module, device_mesh, partial(_shard_parameter, self._weight_placement), *hooks
        )

    def _to_dtensor(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [self._feature_placement], run_check=False)


class ShardedHead(ParallelStyle):
    """The matrix that gives logits, its rows cut; with its own weight or the embedding's."""

    def __init__(self, residual_placement: Placement, *, loss_parallel: bool) -> None:
        super().__init__()
        self._residual_placement, self._loss_parallel = residual_placement, loss_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks: Any = (self._gather_input, self._gather_logits)
        return distribute_module(module, device_mesh, partial(_shard_parameter, Shard(0)), *hooks)

    def _gather_input(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return _gather_first_input(self._residual_placement, inputs, mesh)

    def _gather_logits(self, module: nn.Module, logits_BTV: Any, mesh: DeviceMesh) -> Tensor:
        if self._loss_parallel:
            kept: Tensor = logits_BTV
            return kept
        whole: Tensor = logits_BTV.redistribute(placements=[Replicate()]).to_local()
        return whole


def _shard_parameter(placement: Placement, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        shards = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(shards))


def _gather_first_input(placement: Placement, inputs: Any, mesh: DeviceMesh) -> Any:
    """Returns the inputs with the first, of which each rank has a part, whole on every rank."""
    x, *others = inputs
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [placement], run_check=False)
    return (x.redistribute(placements=[Replicate()]), *others)


def _redistribute(placements: Sequence[Placement], gradient: DTensor) -> DTensor:
    return gradient.redistribute(placements=placements)


def _to_local(output: Placement, module: nn.Module, result: Any, mesh: DeviceMesh) -> Tensor:
    local: Tensor = result.redistribute(placements=[output]).to_local()
    return local
