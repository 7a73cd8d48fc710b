"""Private names of torch for fake tensor runs: relied-on behaviour."""

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._redistribute import _gen_transform_infos

from scalewise.compat import torch as compat_torch
from scalewise.compat import torch_distributed


@pytest.fixture
def fake_group() -> Iterator[None]:
    torch_distributed.init_fake_process_group(1, 4)
    yield
    dist.destroy_process_group()
    torch_distributed.clear_sharding_caches()


def test_collectives_of_the_fake_group_do_nothing(fake_group: None) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1]


def test_operators_of_collectives_need_no_group_for_fake_tensors() -> None:
    collectives = torch_distributed.functional_collectives
    with compat_torch.FakeTensorMode():
        x = torch.ones(2)
        assert collectives.all_gather_into_tensor(x, 4, "").shape == (8,)
        assert collectives.all_reduce(x, "sum", "").shape == (2,)


def test_sharding_caches_are_cleared(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    sharded = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    sharded.redistribute(mesh, [Shard(1)])
    assert _gen_transform_infos.cache_info().currsize > 0
    torch_distributed.clear_sharding_caches()
    assert _gen_transform_infos.cache_info().currsize == 0


class Ops(compat_torch.TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_modes_do_not_see_the_run_for_shapes(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (4,))

    def count(context: Any) -> int:
        torch_distributed.clear_sharding_caches()
        sharded = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
        with context, Ops() as mode:
            sharded.exp()
        return mode.names.count("aten::exp")

    num_ops = count(torch_distributed.uncounted_shape_propagation())
    assert num_ops == 1


def test_mesh_and_to_empty_are_built_by_the_functions_given(fake_group: None) -> None:
    calls: list[str] = []

    def record(name: str) -> Callable[..., Any]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def record_call(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return original(*args, **kwargs)

            return record_call

        return wrap

    before = DeviceMesh.__init__, nn.Module.to_empty
    with (
        torch_distributed.replaced_mesh_init(record("mesh")),
        torch_distributed.replaced_to_empty(record("empty")),
    ):
        assert init_device_mesh("cpu", (4,)).size() == 4
        nn.Linear(1, 1).to_empty(device="meta")
    assert calls == ["mesh", "empty"]
    assert (DeviceMesh.__init__, nn.Module.to_empty) == before


def test_stages_exchange_metadata_by_the_functions_given(fake_group: None) -> None:
    sent_metadata: list[Any] = []

    def send(stage: PipelineStage, metadata: Any, to_stage: int) -> None:
        sent_metadata.append((stage.stage_index, to_stage, metadata))

    def receive(stage: PipelineStage, from_stage: int) -> Any:
        if from_stage < stage.stage_index:
            return sent_metadata[0][2]
        return torch_distributed.gradient_metadata(stage)

    def run(index: int) -> Any:
        stage = PipelineStage(nn.Linear(2, 2), index, 2, torch.device("cpu"), group=group)
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (y - t).square().sum())
        arguments = (torch.ones(2, 2),) if index == 0 else ()
        schedule.step(*arguments, **({} if index == 0 else {"target": torch.ones(2, 2)}))
        return stage

    dist.destroy_process_group()
    for rank in (0, 1):
        torch_distributed.init_fake_process_group(rank, 2)
        group = dist.group.WORLD
        with torch_distributed.replaced_stage_metadata(send, receive):
            stage = run(rank)
        assert all(parameter.grad is not None for parameter in stage.submod.parameters()), rank
        if rank == 0:
            dist.destroy_process_group()
    assert sent_metadata[0][:2] == (0, 1)


def test_stage_methods_have_the_expected_parameters() -> None:
    assert [*signature(PipelineStage._send_meta).parameters] == ["self", "meta", "dst_stage"]
    assert [*signature(PipelineStage._recv_meta).parameters] == ["self", "src_stage"]


def test_fsdp_parameters_have_gathered_tensors_and_gradients(one_rank: None) -> None:
    module = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    module(torch.ones(1, 4)).sum().backward()
    (parameter,) = torch_distributed.fsdp_parameters(module)
    gathered, shard = torch_distributed.parameter_pair(parameter)
    assert (type(gathered), gathered.shape) == (nn.Parameter, (4, 4))
    assert shard is next(module.parameters())
    (full_tensor,) = parameter.all_gather_outputs
    assert full_tensor.numel() == 16
    (gradient,) = torch_distributed.unsharded_gradients(parameter)
    assert gradient.tolist() == torch.ones(4, 4).tolist()
    module.set_requires_gradient_sync(True)
    module(torch.ones(1, 4)).sum().backward()
    assert torch_distributed.unsharded_gradients(parameter) == []


def test_fsdp_placements_shard_parameters_over_another_mesh(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shards"))
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    place = torch_distributed.fsdp_placements(mesh)
    placements = {module[1].weight: place(None), module[2].weight: place(Shard(1))}
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)), shard_placement_fn=dict(placements).get)
    assert isinstance(module, FSDPModule)
    dtensors = [cast(DTensor, parameter) for parameter in module.parameters()]
    assert [parameter.device_mesh.ndim for parameter in dtensors] == [1, 2, 2]
    assert [parameter.placements[-1] for parameter in dtensors] == [Shard(0), Shard(0), Shard(1)]
    assert len(torch_distributed.fsdp_parameters(module)) == 3


def test_fsdp_module_without_parameters_has_none(one_rank: None) -> None:
    module = fully_shard(nn.Sequential(), mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(module, FSDPModule)
    assert torch_distributed.fsdp_parameters(module) == []


def test_strided_shard_has_a_shard_of_each_part(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    placement = torch_distributed.strided_shard(0, 2)
    assert torch_distributed.is_strided_shard(placement)
    assert not torch_distributed.is_strided_shard(Shard(0))
    sharded = distribute_tensor(torch.arange(16), mesh, [placement], src_data_rank=None)
    assert sharded.to_local().tolist() == [2, 3, 10, 11]
