"""Private names of DeepSpeed, in its source: importing it chooses an accelerator."""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from scalewise.compat import IncompatibleLibraryError, deepspeed

PARAMETER_NAMES = {"fetch_sub_module": "current_submodule", "release_sub_module": "submodule"}


def parse(module: str) -> ast.Module:
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(file.read_text("utf-8"))


def parameters(module: str, function: str) -> list[str]:
    """Parameters of a function or method without defaults."""
    (node,) = (
        node
        for node in ast.walk(parse(module))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    names = [argument.arg for argument in node.args.args]
    return names[: len(names) - len(node.args.defaults)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("_partition_all_parameters", ["self"]),
        ("_reassign_or_swap_out_partitioned_parameters", ["self", "sub_group_id"]),
        ("_swappable_optimizer_subgroup", ["self", "sub_group_id"]),
        ("_optimizer_states_and_gradient_swap_in", ["self", "sub_group_id"]),
        ("_optimizer_states_and_gradient_swap_out", ["self", "sub_group_id"]),
    ],
)
def test_stage_3_has_the_methods_of_partition_and_swap(function: str, expected: list[str]) -> None:
    assert parameters("runtime.zero.stage3", function) == expected


@pytest.mark.parametrize("function", ["fetch_sub_module", "release_sub_module"])
def test_stage_3_gathers_and_frees_modules(function: str) -> None:
    module = "runtime.zero.partitioned_param_coordinator"
    assert parameters(module, function)[:2] == ["self", PARAMETER_NAMES[function]]
    source = ast.unparse(parse("runtime.zero.parameter_offload"))
    assert f"param_coordinator.{function}(" in source
    assert "def get_param_coordinator(self):" in source


def test_gathers_and_releases_are_wrapped() -> None:
    calls: list[str] = []
    coordinator = SimpleNamespace(
        fetch_sub_module=lambda name: calls.append(f"fetch {name}"),
        release_sub_module=lambda name: calls.append(f"release {name}"),
    )
    offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    deepspeed.wrap_gathers(
        SimpleNamespace(parameter_offload=offload), lambda method: lambda: method("block")
    )
    coordinator.fetch_sub_module()
    coordinator.release_sub_module()
    assert calls == ["fetch block", "release block"]


def test_stages_1_and_2_link_states_once() -> None:
    module = "runtime.zero.stage_1_and_2"
    assert parameters(module, "_lazy_init_hp_params_optimizer_state") == ["self"]
    source = ast.unparse(parse(module))
    assert "if not self._hp_optimizer_states_linked" in source


def test_link_states_links_again_and_skips_other_stages() -> None:
    link_calls: list[bool] = []
    zero = SimpleNamespace(_hp_optimizer_states_linked=True)
    zero._lazy_init_hp_params_optimizer_state = lambda: link_calls.append(
        zero._hp_optimizer_states_linked
    )
    deepspeed.link_states(zero)
    deepspeed.link_states(SimpleNamespace())
    assert link_calls == [False]


def test_extensions_are_read_before_they_are_compiled() -> None:
    source = ast.unparse(parse("ops.op_builder.builder"))
    assert "    _loaded_ops = {}" in source
    assert "if self.name in __class__._loaded_ops" in source


def test_native_collectives_are_used_if_listed() -> None:
    source = ast.unparse(parse("comm.torch"))
    assert "deepspeed.ops.__compatible_ops__.get(" in source


def test_extensions_and_native_ops_are_set_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    package, builder = ModuleType("deepspeed"), ModuleType("deepspeed.ops.op_builder.builder")
    package.ops = ops = ModuleType("deepspeed.ops")  # type: ignore[attr-defined]
    builder.OpBuilder = SimpleNamespace(_loaded_ops={})  # type: ignore[attr-defined]
    for module in (package, builder):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    deepspeed.disable_native_ops()
    deepspeed.loaded_extensions()["name"] = "library"
    assert ops.__compatible_ops__ == {}  # type: ignore[attr-defined]
    assert builder.OpBuilder._loaded_ops == {"name": "library"}  # type: ignore[attr-defined]


def test_parameter_group_has_no_parameters() -> None:
    assert parameters("utils.groups", "_get_zero_param_intra_parallel_group") == []
    assert callable(deepspeed.parameter_group)


@pytest.mark.parametrize(
    "function",
    [
        deepspeed.partition_all,
        lambda zero: deepspeed.write_partitions(zero, 0),
        lambda zero: deepspeed.swap_in(zero, 0),
        lambda zero: deepspeed.swap_out(zero, 0),
    ],
)
def test_optimizer_without_a_method_names_the_version(function: object) -> None:
    assert not deepspeed.swaps_group(SimpleNamespace(), 0)
    with pytest.raises(IncompatibleLibraryError, match=r"deepspeed [\w.+]+ is not supported: .*_"):
        function(SimpleNamespace())  # type: ignore[operator]
