"""Golden test: the numbers that ``scalewise plan`` computes for 40 runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.golden import golden_record
from fixtures.rejections import use_cpu_machine

from scalewise.config.compose import compose
from scalewise.planner.host_memory import checkpoint_bytes, node_memory
from scalewise.planner.plan import build_plan, sum_plans

CLUSTER = "hardware=h100_8x4 data=synthetic"
DEVICE = "hardware=h100 data=synthetic"
CPU = "hardware=cpu hardware.memory_gib=8 hardware.host_memory_gib=16 experiment=smoke"
RUNS = (
    f"{CLUSTER} model=llama3_8b parallelism=fsdp",
    f"{CLUSTER} model=llama3_8b parallelism=fsdp precision=bf16_mixed",
    f"{CLUSTER} model=llama3_8b parallelism=fsdp precision=fp8 memory=checkpoint_selective",
    f"{CLUSTER} model=llama3_8b parallelism=fsdp parallelism.reshard_after_forward=false",
    f"{CLUSTER} model=llama3_8b parallelism=fsdp parallelism.cpu_offload=true",
    f"{CLUSTER} model=llama3_8b parallelism=hsdp precision=bf16_mixed",
    f"{CLUSTER} model=llama3_8b parallelism=ddp precision=bf16_mixed",
    f"{CLUSTER} model=llama3_8b parallelism=deepspeed_zero1 precision=bf16_mixed",
    f"{CLUSTER} model=llama3_8b parallelism=deepspeed_zero2 precision=bf16_mixed",
    f"{CLUSTER} model=llama3_8b parallelism=deepspeed_zero3 precision=bf16_mixed",
    f"{CLUSTER} model=llama3_8b parallelism=deepspeed_zero3_offload precision=bf16_mixed",
    f"{CLUSTER} model=llama3_8b parallelism=fsdp memory=auto",
    f"{CLUSTER} model=llama3_8b parallelism=fsdp trainer.micro_batch=auto"
    " trainer.global_batch=256 precision=bf16_mixed",
    f"{CLUSTER} model=llama3_70b parallelism=fsdp precision=bf16_mixed memory=checkpoint_full",
    f"{CLUSTER} model=llama3_70b parallelism=mesh parallelism.shards=4 parallelism.tensor=8"
    " precision=bf16_mixed memory=checkpoint_full",
    f"{CLUSTER} model=llama3_70b parallelism=mesh parallelism.pipeline=4 parallelism.tensor=8"
    " precision=bf16_mixed memory=checkpoint_full",
    f"{CLUSTER} model=llama3_8b parallelism=mesh parallelism.shards=16 parallelism.context=2"
    " precision=bf16_mixed data.sequence=8192 memory=checkpoint_full",
    f"{CLUSTER} model=llama3_8b parallelism=mesh parallelism.pipeline=2 parallelism.shards=16"
    " parallelism.pipeline_schedule=interleaved_1f1b precision=bf16_mixed",
    f"{CLUSTER} model=openllama_13b parallelism=fsdp optimizer=muon precision=bf16_mixed",
    f"{DEVICE} model=gpt2_124m",
    f"{DEVICE} model=gpt2_124m compile=block precision=bf16_mixed",
    f"{DEVICE} model=gpt2_124m memory=checkpoint_full",
    f"{DEVICE} model=gpt2_124m memory=checkpoint_every_n",
    f"{DEVICE} model=gpt2_124m memory=offload_activations",
    f"{DEVICE} model=gpt2_124m optimizer=sgd",
    f"{DEVICE} model=gpt2_124m optimizer=adamw_8bit",
    f"{DEVICE} model=gpt2_124m optimizer=adafactor",
    f"{DEVICE} model=llama3_1b precision=bf16_true",
    f"{DEVICE} model=llama3_8b adapter=lora precision=bf16_true",
    f"{DEVICE} model=llama3_8b adapter=lora quantization=nf4 precision=bf16_true",
    f"{DEVICE} model=llama3_8b adapter=prompt precision=bf16_true",
    f"{DEVICE} model=tinyllama_1b adapter=prefix precision=bf16_mixed",
    "hardware=rtx4090 data=synthetic model=openllama_7b adapter=lora quantization=int8"
    " precision=bf16_true",
    "hardware=a100_80g data=synthetic model=openllama_3b adapter=dora precision=bf16_mixed",
    "hardware=v100 data=synthetic model=llama_160m precision=fp16_mixed",
    CPU,
    f"{CPU} parallelism=fsdp",
    f"{CPU} parallelism=pipeline",
    f"{CPU} parallelism=context optimizer=lion",
    f"{CPU} trainer.micro_batch=2 trainer.global_batch=16 parallelism=tensor",
)


def numbers_of(overrides: str) -> dict[str, Any]:
    """All numbers of a plan that its text shows."""
    plan = build_plan(compose(overrides.split(), check_machine=False))
    run, fit, step = plan.run, plan.fit, plan.step_time
    host = fit.host_breakdown or node_memory(run)
    sums = sum_plans([plan])
    return {
        "ranks": run.world_size,
        "tokens per step": run.tokens_per_step,
        "micro-batch": run.trainer.micro_batch,
        "parameters": run.model.num_parameters,
        "bytes at the peak": fit.breakdown.peak,
        "bytes of entries at the peak": sorted(
            size
            for entry in fit.breakdown.entries
            if (size := entry.bytes.get(fit.breakdown.peak_phase, 0))
        ),
        "bytes of entries at most": sorted(
            entry.max_bytes for entry in fit.breakdown.entries if entry.max_bytes
        ),
        "bytes of phases": sorted(size for size in fit.breakdown.phases.values() if size),
        "bytes reserved": list(fit.reserved),
        "capacity": fit.capacity,
        "fits": fit.status.is_acceptable,
        "bytes of a node": host.peak,
        "bytes of a checkpoint": checkpoint_bytes(run),
        "seconds of a step": None if step is None else step.seconds,
        "seconds of parts": sorted(step.parts().values()) if step else [],
        "interval of seconds": plan.step_seconds_range and list(plan.step_seconds_range),
        "tokens/s": plan.tokens_per_s,
        "MFU": plan.mfu,
        "MFU (PaLM)": plan.mfu_palm,
        "suggested fix": list(plan.suggested_fix.overrides) if plan.suggested_fix else None,
        "chosen": list(plan.overrides),
        "sums": sorted(v for v in vars(sums).values() if isinstance(v, int | float)),
    }


@pytest.fixture(scope="module", autouse=True)
def _machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_cpu_machine(monkeypatch)
        yield


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    return golden_record("plans", {overrides: numbers_of(overrides) for overrides in RUNS})


def test_golden_plans_are_complete(plans: dict[str, Any]) -> None:
    assert plans.keys() == set(RUNS)
    assert len(RUNS) == 40


@pytest.mark.parametrize("overrides", RUNS)
def test_plan_has_the_golden_numbers(overrides: str, plans: dict[str, Any]) -> None:
    actual, golden = numbers_of(overrides), plans[overrides]
    assert actual.keys() == golden.keys()
    for key, value in golden.items():
        if isinstance(value, float) or (isinstance(value, list) and key.startswith("seconds")):
            assert actual[key] == pytest.approx(value, rel=1e-12), key
        else:
            assert actual[key] == value, key
