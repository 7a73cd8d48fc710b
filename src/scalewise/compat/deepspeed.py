"""Private names of DeepSpeed, which reads its accelerator from the environment when imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scalewise.compat import PrivateNames

__all__ = [
    "disable_native_ops",
    "link_states",
    "loaded_extensions",
    "parameter_group",
    "partition_all",
    "swap_in",
    "swap_out",
    "swaps_group",
    "wrap_gathers",
    "write_partitions",
]

private = PrivateNames("deepspeed")


def disable_native_ops() -> None:
    """Let DeepSpeed use torch's collectives on the CPU; no option disables its own."""
    private.get("deepspeed:ops").__compatible_ops__ = {}  # found by slow probes if not set


def loaded_extensions() -> dict[str, object]:
    """Compiled extensions by name, which DeepSpeed reads before it compiles; it has no registry."""
    extensions: dict[str, object] = private.get(
        "deepspeed.ops.op_builder.builder:OpBuilder._loaded_ops"
    )
    return extensions


def parameter_group() -> Any:
    """Process group of partitioned parameters; ``zero.Init`` documents no default for it."""
    return private.get("deepspeed.utils.groups:_get_zero_param_intra_parallel_group")()


def link_states(zero: Any) -> None:
    """Link parameters to their optimizer state in stages 1 and 2.

    DeepSpeed does so after the step of the first group, when later groups have no state yet.
    """
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):  # stages 1 and 2
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


@private.reads("_partition_all_parameters")
def partition_all(zero: Any) -> None:
    """Partition parameters of stage 3 that are gathered; no public method does."""
    zero._partition_all_parameters()


@private.reads("_reassign_or_swap_out_partitioned_parameters")
def write_partitions(zero: Any, group: int) -> None:
    """Copy the master weights of a group to its parameters in stage 3; no public method does."""
    zero._reassign_or_swap_out_partitioned_parameters(group)


@private.reads("fetch_sub_module", "release_sub_module")
def wrap_gathers(zero: Any, wrapper: Callable[[Any], Any]) -> None:
    """Wrap the gathers and releases of stage 3; its coordinator has no documented hook."""
    coordinator = zero.parameter_offload.get_param_coordinator()
    coordinator.fetch_sub_module = wrapper(coordinator.fetch_sub_module)
    coordinator.release_sub_module = wrapper(coordinator.release_sub_module)


def swaps_group(zero: Any, group: int) -> bool:
    """Whether the state of a group is on NVMe; stages 1 and 2 have none there."""
    swaps = getattr(zero, "_swappable_optimizer_subgroup", None)
    return swaps is not None and bool(swaps(group))


@private.reads("_optimizer_states_and_gradient_swap_in")
def swap_in(zero: Any, group: int) -> None:
    """Read the state of a group from NVMe; no public method does."""
    zero._optimizer_states_and_gradient_swap_in(group)


@private.reads("_optimizer_states_and_gradient_swap_out")
def swap_out(zero: Any, group: int) -> None:
    """Write the state of a group to NVMe; no public method does."""
    zero._optimizer_states_and_gradient_swap_out(group)
