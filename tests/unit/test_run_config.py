"""``RunConfig``: batch arithmetic, validation and its plain form."""

import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import yaml

from scalewise.hardware import DeviceKind
from scalewise.models.base import AttentionFlops
from scalewise.registry import registered_targets
from scalewise.run_config import RunConfig
from scalewise.validation.run_issues import iter_issues

Compose = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("overrides", "world_size", "accumulation", "global_batch", "tokens"),
    [
        ([], 1, 1, 8, 8 * 256),
        (["trainer.global_batch=32"], 1, 4, 32, 32 * 256),
        (["parallelism=ddp"], 2, 1, 16, 16 * 256),
        (["parallelism=ddp", "parallelism.replicas=4"], 4, 1, 32, 32 * 256),
        (["parallelism=ddp", "parallelism.replicas=1"], 1, 1, 8, 8 * 256),
        (
            ["parallelism=ddp", "trainer.micro_batch=2", "trainer.global_batch=12"],
            2,
            3,
            12,
            12 * 256,
        ),
        (["data.sequence=64", "trainer.micro_batch=1"], 1, 1, 1, 64),
        (["trainer.global_batch=9"], 1, 2, 9, 9 * 256),
        (["trainer.global_batch=3"], 1, 1, 3, 3 * 256),
        (["parallelism=ddp", "trainer.global_batch=17"], 2, 2, 17, 17 * 256),
        (["parallelism=fsdp"], 2, 1, 16, 16 * 256),
        (["parallelism=hsdp", "trainer.global_batch=96"], 4, 3, 96, 96 * 256),
        (["parallelism=tensor"], 2, 1, 8, 8 * 256),
        (["parallelism=context", "trainer.global_batch=20"], 2, 3, 20, 20 * 256),
        (["parallelism=pipeline", "parallelism.shards=3"], 6, 1, 24, 24 * 256),
    ],
)
def test_run_config_step_arithmetic(
    compose: Compose,
    overrides: list[str],
    world_size: int,
    accumulation: int,
    global_batch: int,
    tokens: int,
) -> None:
    run = compose("hardware=cpu", *overrides)
    assert run.world_size == world_size
    assert run.accumulation == accumulation
    assert run.global_batch == global_batch
    num_padding = run.accumulation * run.samples_per_forward - global_batch
    assert 0 <= num_padding < run.samples_per_forward
    assert run.tokens_per_step == tokens
    flops = run.model.flops(run.data.sequence, 0, AttentionFlops.causal)
    assert run.flops_per_step == flops * tokens


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ("max_steps=7", 7),
        ("max_tokens=1", 1),
        ("max_tokens=2048", 1),
        ("max_tokens=2049", 2),
        ("max_epochs=1", 13),  # 100 rows, 8 a step
        ("max_epochs=0.5", 7),
        ("max_epochs=2", 25),
    ],
)
def test_run_config_length(compose: Compose, length: str, steps: int) -> None:
    run = compose("trainer.max_steps=null", f"trainer.{length}")
    assert run.num_steps(100) == steps


def test_run_config_round_trips_through_yaml(compose: Compose) -> None:
    run = compose("experiment=smoke", "tracking.tags=[a,'null',\"1\"]", "data.sequence=64")
    config_dict = run.as_dict()
    loaded_dict = yaml.safe_load(yaml.safe_dump(config_dict))
    assert loaded_dict == config_dict
    assert loaded_dict["trainer"]["micro_batch"] == 4
    assert loaded_dict["model"]["norm"] == "rmsnorm"
    assert loaded_dict["tracking"]["tags"] == ["a", "null", "1"]
    assert loaded_dict["callbacks"]["guard"]["_target_"].endswith("LossGuard")


def test_run_config_rebuilds_from_its_record(compose: Compose) -> None:
    run = compose()
    for group, values in run.as_dict().items():
        spec = getattr(run, group)
        if isinstance(values, dict) and "_target_" in values:
            assert registered_targets()[values["_target_"]] is type(spec), (group, values)
            assert set(values) == {"_target_", *(entry.name for entry in fields(spec))}, (
                group,
                values,
            )


def test_run_config_is_picklable_and_immutable(compose: Compose) -> None:
    run = compose("experiment=smoke", "callbacks=[guard,ema]")
    assert pickle.loads(pickle.dumps(run)) == run
    with pytest.raises(FrozenInstanceError):
        run.seed = 2


def test_resolve_is_idempotent(compose: Compose) -> None:
    run = compose("parallelism=ddp", check_machine=False)
    assert run.parallelism.world_size >= 1
    assert run.resolve() == run


def test_nan_is_rejected_in_any_group(compose: Compose) -> None:
    from dataclasses import replace

    run = compose()
    for group, key in [("model", "rope_theta"), ("launch", "timeout"), ("hardware", "tf32_tflops")]:
        spec: Any = getattr(run, group)
        changed_run = replace(run, **{group: replace(spec, **{key: float("inf")})})
        assert f"{group}.{key}" in [issue.key for issue in iter_issues(changed_run)], (group, key)


@pytest.mark.parametrize(
    ("overrides", "imports"),
    [
        ([], ()),
        (["adapter=lora"], ("peft",)),
        (["adapter=ia3"], ("peft",)),
        (["adapter=prefix", "data.sequence=64"], ()),
        (["parallelism=ddp"], ()),
        (["parallelism=fsdp"], ("scalewise.strategies.nd_parallel",)),
    ],
)
def test_forkserver_imports_match_rank_requirements(
    compose: Compose, overrides: list[str], imports: tuple[str, ...]
) -> None:
    run = compose(*overrides)
    assert run.imports == imports
    assert replace(run, hardware=replace(run.hardware, device=DeviceKind.cuda)).imports == ()
