"""Private names of torch: presence, signature and relied-on behaviour."""

import gc
import weakref
from datetime import timedelta
from inspect import getsource, signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing.spawn import ProcessContext
from torch.nn import functional as F
from torch.optim import Muon
from torch.utils.checkpoint import checkpoint

from scalewise.compat import torch as compat_torch
from scalewise.compat import torch_distributed
from scalewise.optimizers.muon import newton_schulz


class RecordOps(compat_torch.TorchDispatchMode):
    """Records operators and their results."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_function_without_dispatch_modes_is_not_recorded() -> None:
    with RecordOps() as recorder:
        value = compat_torch.without_dispatch_modes(torch.zeros)(2) + 1
    assert value.tolist() == [1, 1]
    assert recorder.ops == [torch.ops.aten.add.Tensor]


def test_failed_rank_is_reported_before_torch_elastic_waits_for_the_others() -> None:
    calls: list[str] = []
    processes = [SimpleNamespace(pid=pid, join=lambda t: calls.append("join")) for pid in (70, 71)]
    context: Any = SimpleNamespace(processes=processes)
    method = ProcessContext._join_procs_with_timeout
    with torch_distributed.on_rank_failure(lambda pids: calls.append(str(pids))):
        ProcessContext._join_procs_with_timeout(context, 0.0)
    assert calls == ["{0: 70, 1: 71}", "join", "join"]
    assert ProcessContext._join_procs_with_timeout is method
    source = getsource(ProcessContext.join)
    assert source.index("process.terminate()") < source.index(
        "self._join_procs_with_timeout(30 if grace_period is None else grace_period)"
    )
    assert "self._pc.join(-1)" in getsource(MultiprocessContext._poll)


def test_timeout_of_all_groups_is_set(one_rank: None) -> None:
    groups: list[Any] = [dist.group.WORLD, dist.new_group([0])]
    torch_distributed.set_group_timeouts(timedelta(seconds=7))
    for group in groups:
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(seconds=7)


def test_dispatch_mode_sees_operators_also_of_the_backward_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    with RecordOps() as mode:
        (x * x).sum().backward()
    names = [op.name() for op in mode.ops]
    assert names.count("aten::mul.Tensor") >= 3
    assert mode.ops[0].namespace == "aten"


def test_traceable_wrapper_subclass_is_a_dtensor_and_no_plain_tensor(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    wrapped = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    assert compat_torch.is_traceable_wrapper_subclass(wrapped)
    names, _ = wrapped.__tensor_flatten__()
    assert torch.equal(getattr(wrapped, names[0]), torch.ones(2))
    assert not compat_torch.is_traceable_wrapper_subclass(torch.ones(2))
    assert not compat_torch.is_traceable_wrapper_subclass("text")


def test_item_is_the_operator_that_reads_a_scalar() -> None:
    with RecordOps() as mode:
        torch.ones(2).sum().item()
    assert mode.ops[-1] is compat_torch.READ_SCALAR_OP


def test_to_is_the_operator_that_casts() -> None:
    with RecordOps() as mode:
        torch.ones(2).to(torch.bfloat16)
    assert mode.ops[-1] is compat_torch.CAST_OP


def test_tree_leaves_of_nested_containers() -> None:
    assert compat_torch.tree_leaves(([1, (2,)], {"a": 3, "b": None})) == [1, 2, 3, None]


def test_unset_fake_temporarily_makes_real_tensors() -> None:
    with compat_torch.DevicelessFakeTensorMode():
        assert isinstance(torch.ones(2), compat_torch.FakeTensor)
        with compat_torch.unset_fake_temporarily():
            assert not isinstance(torch.ones(2), compat_torch.FakeTensor)
        assert isinstance(torch.ones(2), compat_torch.FakeTensor)


def test_muon_steps_equal_those_of_the_public_class() -> None:
    assert [*signature(compat_torch.adjust_lr).parameters] == ["lr", "adjust_lr_fn", "param_shape"]
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 4))
    copy = nn.Parameter(weight.detach().clone())
    weight.grad = torch.randn(6, 4)
    optimizer = Muon([weight], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0)
    public_optimizer = Muon([copy], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0)
    copy.grad = weight.grad.clone()
    (group,) = public_optimizer.param_groups
    ((parameter, gradient, momentum),) = compat_torch.matrices_of_group(public_optimizer, group)
    assert parameter is copy
    with torch.no_grad():
        momentum.lerp_(gradient, 0.1)
        update = newton_schulz(
            gradient.lerp(momentum, 0.9).bfloat16()[None],
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        rate = compat_torch.adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        parameter.add_(update[0], alpha=-rate)
    optimizer.step()
    assert torch.equal(weight, copy)


def test_allocation_profiler_reports_allocations_and_frees() -> None:
    compat_torch.start_allocation_profiler()
    tensor = torch.empty(3001, dtype=torch.uint8)
    address = tensor.data_ptr()
    del tensor
    events = compat_torch.stop_allocation_profiler()
    sizes = [
        size
        for _, _, data_ptr, size in sorted(compat_torch.iter_allocations(events))
        if data_ptr == address
    ]
    assert sizes == [3001, -3001]


def test_attention_runs_one_of_the_attention_operators() -> None:
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    with RecordOps() as mode:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    operators = {op.overloadpacket for op in mode.ops}
    assert operators & compat_torch.ATTENTION_OPS
    assert all(packet.default for packet in compat_torch.ATTENTION_OPS)


def test_flash_attention_on_the_cpu_equals_the_public_function() -> None:
    query, key, value = (torch.randn(1, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    output, logsumexp = compat_torch.flash_attention_cpu(query, key, value, True)
    torch.testing.assert_close(output, expected)
    scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    torch.testing.assert_close(logsumexp, scores.masked_fill(later, -torch.inf).logsumexp(-1))
    gradient = torch.randn_like(output)
    found = compat_torch.flash_attention_cpu_backward(
        gradient, query, key, value, output, logsumexp, True
    )
    for actual, wanted in zip(
        found, torch.autograd.grad(expected, (query, key, value), gradient), strict=True
    ):
        torch.testing.assert_close(actual, wanted)


def test_lower_right_bias_exists_within_a_fake_tensor_mode() -> None:
    with compat_torch.FakeTensorMode():
        bias = compat_torch.lower_right_bias(2, 4)
        query, key = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 4, 8)
        assert F.scaled_dot_product_attention(query, key, key, bias).shape == query.shape


def test_grouped_matmul_operator_is_that_of_grouped_mm() -> None:
    rows, matrices = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(2, 8, 8).bfloat16()
    ends = torch.tensor([1, 4], dtype=torch.int32)
    with RecordOps() as mode:
        F.grouped_mm(rows, matrices, offs=ends)
    assert compat_torch.GROUPED_MATMUL_OP.default in mode.ops


def test_varlen_attention_operator_has_its_name() -> None:
    from torch.nn.attention import varlen

    query = torch.ones(3, 2, 8, device="meta")
    lengths = torch.ones(2, dtype=torch.int32, device="meta")
    with RecordOps() as mode:
        varlen.varlen_attn(query, query, query, lengths, lengths, 3, 3, window_size=(-1, 0))
    assert compat_torch.VARLEN_ATTENTION_OP in [op.name() for op in mode.ops]


def test_fake_and_meta_tensors_have_no_values() -> None:
    assert compat_torch.has_no_values(torch.ones(1, device="meta"))
    assert not compat_torch.has_no_values(torch.ones(1))
    with compat_torch.FakeTensorMode():
        assert compat_torch.has_no_values(torch.ones(1))


def test_function_without_dynamo_runs_eagerly() -> None:
    tensors: list[Tensor] = []

    @compat_torch.disable_dynamo
    def note(x: Tensor) -> Tensor:
        tensors.append(x)
        return x + 1

    compiled = torch.compile(lambda x: note(x * 2) * 3, backend="eager")
    for value in (1.0, 2.0):
        assert compiled(torch.full((), value)) == (value * 2 + 1) * 3
    assert [x.item() for x in tensors] == [2.0, 4.0]


def test_recompile_limit_is_raised_and_not_lowered() -> None:
    with torch._dynamo.config.patch(recompile_limit=8):
        for limit, expected in ((5, 8), (24, 24), (16, 24)):
            compat_torch.raise_recompile_limit(limit)
            assert torch.compiler.config.recompile_limit == expected, limit
    assert torch._dynamo.config.recompile_limit == 8


def test_storage_id_is_shared_by_views_and_ends_with_the_storage() -> None:
    tensor = torch.ones(4, device="meta")
    storage = tensor.untyped_storage()
    assert compat_torch.storage_id(storage) == compat_torch.storage_id(tensor[1:].untyped_storage())
    assert compat_torch.storage_id(storage) != compat_torch.storage_id(
        torch.ones(4, device="meta").untyped_storage()
    )
    ended_ids: list[int] = []
    weakref.finalize(storage, ended_ids.append, 1)
    del tensor, storage
    gc.collect()
    assert ended_ids == [1]


def test_tensor_version_counts_changes_in_place() -> None:
    tensor = torch.zeros(2)
    before = compat_torch.tensor_version(tensor)
    tensor.add_(1)
    assert compat_torch.tensor_version(tensor) == before + 1
    assert compat_torch.tensor_version(tensor[:1]) == before + 1


def test_norm_of_each_tensor() -> None:
    norms = compat_torch.norm_of_each([torch.full((4,), 2.0), torch.zeros(0)])
    assert [float(norm) for norm in norms] == [4.0, 0.0]


def test_multiply_all_changes_tensors_in_place() -> None:
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    compat_torch.multiply_all_(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.0, 1.0, 1.0]]


def test_collective_operators_are_in_the_known_namespaces(one_rank: None) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    group = dist.group.WORLD
    with RecordOps() as mode:
        dist.all_reduce(torch.ones(2))
        gathered_tensor = torch_distributed.all_gather(x, 0, group)
        exchanged_tensor = torch_distributed.all_to_all(x, None, None, group)
        assert torch.equal(gathered_tensor + 0, x)
        assert torch.equal(exchanged_tensor + 0, x)
        (gathered_tensor.sum() + exchanged_tensor.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    collectives = [op for op in mode.ops if op.namespace in compat_torch.COLLECTIVE_NAMESPACES]
    assert len({op.namespace for op in collectives}) == 2
    assert any(op in torch_distributed.SAVED_COLLECTIVES for op in collectives)
    names = [
        argument
        for op in collectives
        for argument in [it.name for it in op._schema.arguments]
        if argument == "group_name"
    ]
    assert names


def test_async_collective_tensor_is_the_result_of_a_functional_collective(one_rank: None) -> None:
    from torch.distributed._functional_collectives import all_reduce

    result = all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert isinstance(result, torch_distributed.AsyncCollectiveTensor)
    assert type(result.wait()) is Tensor


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (schedules.PipelineScheduleSingle, "_stage"),
        (schedules.PipelineScheduleMulti, "_stages"),
    ],
)
def test_pipeline_schedules_keep_their_stages(schedule: type, name: str) -> None:
    assert f"self.{name} = stage" in getsource(schedule.__init__)  # type: ignore[misc]


def test_schedule_stages_of_one_or_several() -> None:
    class Schedule:
        def __init__(self, **attributes: object) -> None:
            self.__dict__.update(attributes)

    assert torch_distributed.schedule_stages(Schedule(_stage="a")) == ["a"]
    assert torch_distributed.schedule_stages(Schedule(_stages=["a", "b"])) == ["a", "b"]


def test_pipeline_stages_have_the_methods_that_are_extended() -> None:
    assert [*signature(_PipelineStageBase.backward_maybe_with_nosync).parameters] == [
        "self",
        "backward_type",
        "bwd_kwargs",
        "last_backward",
    ]
    assert "args_recv_info" in getsource(_PipelineStageBase)
    assert "grad_recv_info" in getsource(_PipelineStageBase)
    assert callable(_PipelineStageBase.backward_one_chunk)
    assert callable(checkpoint)


def test_tree_map_only_maps_values_of_a_type() -> None:
    mapped_tree = compat_torch.tree_map_only(
        int, lambda number: -number, {"a": [1, "b"], "c": (2,)}
    )
    assert mapped_tree == {"a": [-1, "b"], "c": (-2,)}


def test_fake_tensor_mode_has_no_data() -> None:
    with compat_torch.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.ones(3))
        assert (fake + torch.ones(3)).shape == (3,)
    assert isinstance(fake, compat_torch.FakeTensor)
    assert not isinstance(torch.ones(3), compat_torch.FakeTensor)


def test_apply_hook_runs_after_each_move_and_cast() -> None:
    class Module(compat_torch.ModuleWithApplyHook):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dtypes = nn.Linear(1, 1), list[torch.dtype]()

        def after_apply(self) -> None:
            self.dtypes.append(self.layer.weight.dtype)

    module = Module()
    nn.Sequential(module).to(torch.bfloat16)
    assert module.double().to_empty(device="meta") is module
    assert module.dtypes == [torch.bfloat16, torch.float64, torch.float64]


def test_registered_tensors_can_be_replaced() -> None:
    module = nn.BatchNorm1d(2, affine=False)
    assert compat_torch.registered_parameters(module) == {"weight": None, "bias": None}
    buffers = compat_torch.registered_buffers(module)
    buffers["running_mean"] = torch.full((2,), 3.0)
    assert module.get_buffer("running_mean").tolist() == [3, 3]
    layer = nn.Linear(2, 2)
    parameters = compat_torch.registered_parameters(layer)
    parameters["weight"] = nn.Parameter(torch.zeros(2, 2))
    assert not layer.weight.any()
    assert dict(layer.named_parameters())["weight"] is parameters["weight"]


def test_replaced_functions_are_those_of_the_context() -> None:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    original = F.relu
    with compat_torch.replaced_functions({"relu": double}):
        assert F.relu(torch.ones(1)).item() == 2
    assert F.relu is original
