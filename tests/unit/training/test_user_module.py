"""User modules: rejected options and import targets."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from fixtures.rejections import assert_rejected, overrides_id
from fixtures.user_module import MyData, MyModule
from torch import nn

from scalewise.errors import ConfigError
from scalewise.planner.plan import build_plan
from scalewise.run_config import RunConfig
from scalewise.strategies.parallelize import repeated_blocks
from scalewise.training.import_class import import_class, import_user_classes
from scalewise.training.user_module import build_user_module

Compose = Callable[..., RunConfig]

USER_MODULE = (
    "objective=module",
    "objective.target=fixtures.user_module.MyModule",
    "data.target=fixtures.user_module.MyData",
    "trusted_packages=[fixtures]",
)


def test_user_module_composes_like_other_runs(compose: Compose) -> None:
    run = compose(*USER_MODULE, "+objective.arguments.width=4", "parallelism=ddp")
    assert run.name == "MyModule-ddp-fp32"
    assert {run.choices[group] for group in ("model", "data", "optimizer", "schedule")} == {
        "module"
    }
    assert pickle.loads(pickle.dumps(run)) == run
    assert import_user_classes(run) == (MyModule, MyData)
    module, data = build_user_module(run)
    assert isinstance(module, MyModule)
    assert isinstance(data, MyData)
    assert module.into.out_features == 4


@pytest.mark.parametrize(
    ("overrides", "key", "reason", "fix"),
    [
        ("model=gpt2_124m", "model", "its own model", "model=module"),
        ("data=corpus", "data", "its own data", "data=module"),
        ("optimizer=adamw", "optimizer", "its own optimizer", "optimizer=module"),
        ("schedule=cosine", "schedule", "its own schedule", "schedule=module"),
        ("adapter=lora", "adapter", "does not modify", "adapter=none"),
        ("quantization=nf4", "quantization", "does not modify", "quantization=none"),
        ("memory=checkpoint_full", "memory", "does not modify", "memory=none"),
        ("memory=auto", "memory", "does not modify", "memory=none"),
        ("compile=block", "compile", "does not modify", "compile=none"),
        ("objective.loss_chunk=8", "objective.loss_chunk", "its own loss", "null"),
        ("trainer.micro_batch=auto", "trainer.micro_batch", "loader", "data.arguments"),
        ("trainer.micro_batch=4", "trainer.micro_batch", "loader", "data.arguments"),
        ("trainer.global_batch=64", "trainer.global_batch", "loader", "null"),
        (
            "+trainer.sequence_warmup={a:{until_step:1,sequence:1}}",
            "trainer.sequence_warmup",
            "need not contain sequences",
            "trainer.sequence_warmup={}",
        ),
        ("trainer.validation_rows=8", "trainer.validation_rows", "whole data loader", "=64"),
        ("trainer.max_epochs=1.5 trainer.max_steps=null", "trainer.max_epochs", "whole", "=2"),
        ("trainer.max_tokens=9 trainer.max_steps=null", "trainer.max_tokens", "tokens", "steps"),
        ("plan.search=layout", "plan.search", "does not cover user-defined modules", "none"),
        ("plan.fit=auto", "plan.fit", "does not cover user-defined modules", "none"),
        (
            "launch.refuse_unfit=true",
            "launch.refuse_unfit",
            "does not cover user-defined modules",
            "false",
        ),
        ("parallelism=tensor", "parallelism.tensor", "cannot partition", "fsdp"),
        ("parallelism=context", "parallelism.context", "cannot partition", "fsdp"),
        ("parallelism=pipeline", "parallelism.pipeline", "cannot partition", "fsdp"),
        (
            "parallelism=fsdp parallelism.cpu_offload=true",
            "parallelism.cpu_offload",
            "off",
            "=false",
        ),
        (
            "hardware=cpu parallelism=ddp parallelism.comm_hook=bf16",
            "parallelism.comm_hook",
            "gloo does not",
            "fp16",
        ),
        (
            "parallelism=deepspeed_zero2_offload",
            "parallelism.offload_optimizer",
            "does not offload",
            "set parallelism.offload_optimizer=none",
        ),
        (
            "trusted_packages=[]",
            "objective.target",
            "is not trusted",
            "trusted_packages=[fixtures]",
        ),
        ("objective.target=MyModule", "objective.target", "is not a class path", "package.module"),
        (
            "+objective.arguments.inner={_target_: os.getcwd}",
            "objective.arguments.inner",
            "nested _target_ is not supported",
            "plain",
        ),
    ],
    ids=overrides_id,
)
def test_user_module_rejects_options_without_effect(
    compose: Compose, overrides: str, key: str, reason: str, fix: str
) -> None:
    override_list = [overrides] if "{" in overrides else overrides.split()
    replaced = {entry.partition("=")[0] for entry in override_list}
    base_overrides = [entry for entry in USER_MODULE if entry.partition("=")[0] not in replaced]
    if overrides in (
        "data=corpus",
        "trusted_packages=[]",
    ):  # the target has another issue
        base_overrides = [entry for entry in base_overrides if not entry.startswith("data.")]
    assert_rejected([*base_overrides, *override_list], key, reason, fix)


@pytest.mark.parametrize("group", ["model", "data", "optimizer", "schedule"])
def test_user_module_options_require_the_objective(compose: Compose, group: str) -> None:
    assert_rejected([f"{group}=module"], group, "requires objective=module", "objective=module")


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["objective.target=nowhere_at_all.X"], "objective.target", "cannot be imported"),
        (
            ["objective.target=fixtures.user_module.Nothing"],
            "objective.target",
            "cannot be imported",
        ),
        (
            ["objective.target=torch.nn.Linear"],
            "objective.target",
            "is not a subclass of lightning.pytorch",
        ),
        (
            ["objective.target=torch.hub.load"],
            "objective.target",
            "is not a subclass of lightning.pytorch",
        ),
        (["data.target=fixtures.user_module.MyModule"], "data.target", "LightningDataModule"),
        (["data.target=''"], "data.target", "does not define train_dataloader"),
        (["+objective.arguments.depth=3"], "objective.arguments", "unexpected keyword"),
        (["+data.arguments.depth=3"], "data.arguments", "unexpected keyword"),
        (
            ["objective.target=fixtures.user_module.FailingConstructor"],
            "objective.arguments",
            "no such table",
        ),
    ],
    ids=overrides_id,
)
def test_user_module_that_cannot_be_built_is_rejected(
    compose: Compose, overrides: list[str], key: str, reason: str
) -> None:
    replaced = {entry.partition("=")[0] for entry in overrides}
    base_overrides = [entry for entry in USER_MODULE[:3] if entry.partition("=")[0] not in replaced]
    run = compose(*base_overrides, *overrides, "trusted_packages=[fixtures,nowhere_at_all]")
    with pytest.raises(ConfigError) as excinfo:
        build_user_module(run)
    (issue,) = excinfo.value.issues
    assert issue.key == key
    assert reason in issue.reason


def test_user_module_plan_requires_a_trace(compose: Compose) -> None:
    with pytest.raises(ConfigError) as excinfo:
        build_plan(compose(*USER_MODULE))
    assert [str(issue) for issue in excinfo.value.issues] == [
        "plan.method=ledger: the analytic memory model does not cover user-defined modules; "
        "set plan.method=trace"
    ]


def test_outermost_repeated_children_are_blocks() -> None:
    def pair() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    layers = nn.ModuleList([pair(), pair()])
    module = nn.ModuleDict({"layers": layers, "head": nn.Sequential(nn.Linear(2, 2), nn.Tanh())})
    assert repeated_blocks(module) == [*layers]
    assert repeated_blocks(nn.Bilinear(2, 2, 2)) == []


def test_user_module_imports_only_trusted_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "yaml", "theirs", "not_theirs"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    path = list(sys.path)
    with pytest.raises(ConfigError, match="theirs"):
        import_class("objective.target", "theirs.Nothing", nn.Module, ("json", "yaml", "theirs"))
    assert sys.path == path
    expected = find_spec("theirs")
    assert expected is not None
    assert expected.origin == str(tmp_path / "theirs.py")
    assert find_spec("not_theirs") is None
    for name in ("json", "yaml"):
        monkeypatch.delitem(sys.modules, name)
        module_spec = find_spec(name)
        assert module_spec is not None
        assert module_spec.origin is not None
        assert not module_spec.origin.startswith(str(tmp_path)), "an installed module comes first"


def test_failed_constructor_names_its_line(compose: Compose) -> None:
    run = compose(
        *USER_MODULE[:1],
        "objective.target=fixtures.user_module.FailingConstructor",
        *USER_MODULE[2:],
    )
    with pytest.raises(
        ConfigError, match=r"no such table \(.*fixtures/user_module.py:\d+ in __init__\)"
    ):
        build_user_module(run)
