"""Compilation that ``compile=auto`` applies, and where it is recorded."""

from __future__ import annotations

import pytest
from fixtures.hf_checkpoints import RANDOM_T5

from scalewise import ConfigError, compose
from scalewise.config.compose import changed_from_defaults
from scalewise.launch.config_hash import config_hash
from scalewise.launch.executor import restore_run
from scalewise.planner.suggested_fix import memory_saving_changes
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope

H100 = ("hardware=h100", "hardware.devices_per_node=2")
REJECTED = {
    "offload": ("memory=offload_activations",),
    "quantization": ("adapter=lora", "quantization=nf4"),
    "ZeRO-3": ("parallelism=deepspeed_zero3",),
    "zero-bubble": ("parallelism=pipeline", "parallelism.pipeline_schedule=zbv_zero_bubble"),
    "encoder-decoder": (*RANDOM_T5, "data=synthetic", "objective=seq2seq", "data.target_length=8"),
    "dense blocks before experts": ("model=deepseek_v2_lite",),
    "user module": (
        *("objective=module", "objective.target=fixtures.user_module.MyModule"),
        *("data.target=fixtures.user_module.MyData", "trusted_packages=[fixtures]"),
    ),
}
"""Options with which ``compile=block`` is rejected."""
COMPILED = (
    (),
    ("memory=checkpoint_selective",),
    ("adapter=lora",),
    ("precision=fp8",),
    ("parallelism=fsdp",),
    ("parallelism=tensor",),
    ("parallelism=pipeline", "parallelism.pipeline_schedule=interleaved_1f1b"),
    ("parallelism=fsdp", "parallelism.pipeline_schedule=zbv_zero_bubble"),
    ("parallelism=deepspeed_zero2",),
)


def cuda_run(*overrides: str) -> RunConfig:
    return compose([*H100, *overrides], check_machine=False)


@pytest.mark.parametrize("overrides", COMPILED, ids=" ".join)
def test_auto_compiles_blocks_on_cuda(overrides: tuple[str, ...]) -> None:
    run = cuda_run(*overrides)
    assert run.compile.scope is CompileScope.auto
    assert run.applied_compile.scope is CompileScope.block
    assert run.is_compiled


def test_auto_compiles_nothing_on_the_cpu() -> None:
    run = compose(["hardware=cpu"])
    assert run.applied_compile.scope is CompileScope.none
    assert not run.is_compiled


@pytest.mark.parametrize("name", REJECTED)
@pytest.mark.usefixtures("example_files")
def test_auto_compiles_nothing_where_block_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        cuda_run(*REJECTED[name], "compile=block")
    (issue,) = error.value.issues
    assert issue.key in ("compile", "compile.scope", "memory.offload")
    assert cuda_run(*REJECTED[name]).applied_compile.scope is CompileScope.none


@pytest.mark.parametrize("scope", ["none", "block", "whole"])
def test_explicit_scope_is_applied_as_it_is(scope: str) -> None:
    assert cuda_run(f"compile={scope}").applied_compile.scope == scope


def test_auto_keeps_the_other_settings() -> None:
    assert cuda_run("compile.backend=aot_eager").applied_compile.backend == "aot_eager"


@pytest.mark.parametrize(
    ("overrides", "scope"), [((), "block"), (("memory=offload_activations",), "none")]
)
def test_records_have_the_applied_scope(overrides: tuple[str, ...], scope: str) -> None:
    run = cuda_run(*overrides)
    recorded = restore_run(run.as_dict())
    assert recorded.compile.scope == scope
    assert recorded.choices["compile"] == run.applied_choices["compile"] == scope
    assert config_hash(run) == config_hash(cuda_run(*overrides, f"compile={scope}"))
    assert "compile.scope" not in [change["key"] for change in changed_from_defaults(run)]


def test_offload_is_a_suggested_fix_of_auto_only() -> None:
    """With offloaded activations, auto is none."""
    for scope, is_offered in (("auto", True), ("none", True), ("block", False)):
        changes = memory_saving_changes(cuda_run(f"compile={scope}"))
        offers = ["memory=offload_activations" in change.overrides for change in changes]
        assert any(offers) == is_offered, scope
