"""Private names of torch, without its distributed packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.compiler import config as compiler_config
from torch.optim import Muon

from scalewise.compat import PrivateNames

__all__ = [
    "ATTENTION_OPS",
    "CAST_OP",
    "COLLECTIVE_NAMESPACES",
    "GROUPED_MATMUL_OP",
    "READ_SCALAR_OP",
    "VARLEN_ATTENTION_OP",
    "DevicelessFakeTensorMode",
    "FakeTensor",
    "FakeTensorMode",
    "ModuleWithApplyHook",
    "TorchDispatchMode",
    "adjust_lr",
    "disable_dynamo",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "has_no_values",
    "is_traceable_wrapper_subclass",
    "iter_allocations",
    "lower_right_bias",
    "matrices_of_group",
    "multiply_all_",
    "norm_of_each",
    "raise_recompile_limit",
    "registered_buffers",
    "registered_parameters",
    "replaced_functions",
    "start_allocation_profiler",
    "stop_allocation_profiler",
    "storage_id",
    "tensor_version",
    "tree_leaves",
    "tree_map_only",
    "unset_fake_temporarily",
    "without_dispatch_modes",
]

P = ParamSpec("P")
T = TypeVar("T")

private = PrivateNames("torch")

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
"""Namespaces of torch's collective operators, which a dispatch mode sees; not documented."""

with private:
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes,
        is_traceable_wrapper_subclass,
    )

    """Interception of operators, its suspension, and test for subclasses such as DTensor; no public
    API."""

with private:
    from torch.utils._pytree import tree_leaves, tree_map_only

    """Leaves of nested containers, and functions of them; no public module traverses them."""

with private:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

    """Tensors without data, their mode, and context that suspends it; none has a public name."""

with private:
    from torch.optim._muon import _adjust_lr as adjust_lr

    """Learning rate of Muon for the shape of a matrix, which has no public function."""

with private:
    from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
    from torch._C._profiler import (
        ProfilerActivity,
        ProfilerConfig,
        ProfilerState,
        RecordScope,
        _EventType,
        _ExperimentalConfig,
    )

    _PROFILER = (
        ProfilerConfig(
            ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig()
        ),
        {ProfilerActivity.CPU},
    )
    """Profile memory only."""

with private:
    READ_SCALAR_OP = torch.ops.aten._local_scalar_dense.default
    """Operator of ``Tensor.item``, which a dispatch mode sees."""

with private:
    CAST_OP = torch.ops.aten._to_copy.default
    """Operator of ``Tensor.to``, which a dispatch mode sees."""

with private:
    ATTENTION_OPS = frozenset(
        {
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
            torch.ops.aten._scaled_dot_product_flash_attention,
            torch.ops.aten._scaled_dot_product_efficient_attention,
            torch.ops.aten._scaled_dot_product_cudnn_attention,
            torch.ops.aten._efficient_attention_forward,
        }
    )
    """Operators of ``scaled_dot_product_attention``; their public function is not an operator."""

    GROUPED_MATMUL_OP = torch.ops.aten._grouped_mm
    """Operator of ``torch.nn.functional.grouped_mm``."""

VARLEN_ATTENTION_OP = "torch_attn::_varlen_attn"
"""Operator of ``torch.nn.attention.varlen``, whose import loads ``torch._dynamo``."""

with private:
    from torch._compile import _disable_dynamo as disable_dynamo

    """``torch.compiler.disable`` without the import of ``torch._dynamo`` when it decorates."""

if not TYPE_CHECKING:
    __getattr__ = private.missing_name


def raise_recompile_limit(limit: int) -> None:
    """Raise the number of compilations of a function, beyond which it runs in eager mode.

    The setting is public; torch reads it from a module of the whole process.
    """
    compiler_config.recompile_limit = max(compiler_config.recompile_limit, limit)


class DevicelessFakeTensorMode(FakeTensorMode):
    """Mode that creates no tensor on a device, even if ``torch.cuda`` says that there is one."""

    @property
    def avoid_device_init(self) -> bool:
        """True; torch's answer depends on ``torch.cuda.is_available``."""
        return True


class ModuleWithApplyHook(nn.Module):
    """Module with a hook after each move or cast, for which several public methods exist."""

    def after_apply(self) -> None:
        """Called after parameters and buffers were moved or cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch lacks the annotation
        self.after_apply()
        return self


@contextmanager
def replaced_functions(functions: Mapping[str, Callable[..., Tensor]]) -> Iterator[None]:
    """Context in which functions of ``torch.nn.functional`` are others, also in recomputation.

    Autograd leaves modes of torch functions in backward.
    """
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(private.replaced(f"torch.nn.functional:{name}", function))
        yield


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor is fake or on the meta device; fake tensors have no public test."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def lower_right_bias(queries: int, keys: int) -> Tensor:
    """Symbolic lower-right causal mask, whose class cannot be created within a dispatch mode."""
    from torch.nn.attention.bias import causal_lower_right  # loads torch._dynamo

    with _disable_current_modes():
        return causal_lower_right(queries, keys)


def without_dispatch_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Function that dispatch modes, such as that of selective checkpointing, do not see."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return wrapped


@private.reads("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention_cpu(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of flash attention; the public function returns the output only."""
    operands = query_BHTD, key_BKSD, value_BKSD
    results: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *operands, 0.0, is_causal
    )
    return results


@private.reads("_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_cpu_backward(
    gradient_BHTD: Tensor,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    output_BHTD: Tensor,
    logsumexp_BHT: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; no public function takes the logsumexp."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    operands = query_BHTD, key_BKSD, value_BKSD, output_BHTD, logsumexp_BHT
    gradients: tuple[Tensor, Tensor, Tensor] = backward(gradient_BHTD, *operands, 0.0, is_causal)
    return gradients


@private.reads("_parameters")
def registered_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Own parameters of a module, to be replaced; the public iterator omits absent ones."""
    return module._parameters


@private.reads("_buffers")
def registered_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Own buffers of a module, to be replaced; the public iterator omits absent ones."""
    return module._buffers


@private.reads("_cdata")
def storage_id(storage: UntypedStorage) -> int:
    """Identity of a storage while it lives; ``data_ptr`` is 0 for fake and meta tensors."""
    return int(storage._cdata)


@private.reads("_version")
def tensor_version(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor; no public counter exists."""
    return tensor._version


@private.reads("_foreach_mul_")
def multiply_all_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by one kernel; ``torch.nn.utils`` clips parameters only."""
    torch._foreach_mul_(tensors, factor)


@private.reads("_foreach_norm")
def norm_of_each(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """2-norm of each tensor; ``torch.nn.utils.get_total_norm`` returns that of all together."""
    norms: tuple[Tensor, ...] = torch._foreach_norm(tensors)
    return norms


@private.reads("_init_group")
def matrices_of_group(
    optimizer: Muon, group: dict[str, Any]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Parameter, gradient and momentum of each matrix; the public step also updates them."""
    matrices: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    optimizer._init_group(group, *matrices)
    return zip(*matrices, strict=True)


def start_allocation_profiler() -> None:
    """Record CPU allocations; ``torch.profiler`` also records operators, which are large.

    In compiled code, records of operators may be incomplete.
    """
    config, activities = _PROFILER
    _prepare_profiler(config, activities)
    scopes = {RecordScope.CUSTOM_CLASS}  # excludes operators
    _enable_profiler(config, activities, scopes)  # type: ignore[call-arg]  # torch's stub lacks it


def stop_allocation_profiler() -> list[Any]:
    """Events of the profiler since its start; the public profiler returns no event tree."""
    events: list[Any] = _disable_profiler().experimental_event_tree()
    return events


def iter_allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Time, index, address and bytes of each allocation; the bytes of a free are negative."""
    for number, event in enumerate(events):
        if event.tag == _EventType.Allocation:
            _, allocation = event.typed
            yield event.start_time_ns, number, allocation.ptr, allocation.alloc_size
        yield from iter_allocations(event.children)
