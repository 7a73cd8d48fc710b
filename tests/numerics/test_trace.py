"""The ledger beside a trace of the suite's own code, on worlds that no machine here has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from scalewise.plan import memory
from scalewise.run import Run
from scalewise.training.trace import on_cpu, refusal, traced

Compose = Callable[..., Run]

LLAMA = (
    "model=llama3_8b",
    "hardware=h100_8x4",
    "data=synthetic",
    "data.sequence=4096",
    "trainer.micro_batch=1",
)
MIXED, BF16 = "precision=bf16_mixed", "precision=bf16_true"
FULL, SELECTIVE = "memory=checkpoint_full", "memory=checkpoint_selective"
SUMS = "trainer.global_batch=32"
LORA = "adapter=lora"
LONG = pytest.mark.exhaustive


def fsdp(shards: int) -> tuple[str, ...]:
    return ("parallelism=fsdp", f"parallelism.shard={shards}")


def mesh(**sizes: int) -> tuple[str, ...]:
    return ("parallelism=mesh", *(f"parallelism.{axis}={size}" for axis, size in sizes.items()))


def pipeline(schedule: str = "one_f_one_b", **sizes: int) -> tuple[str, ...]:
    return (
        *mesh(**({"pipeline": 2} | sizes)),
        f"parallelism.pipeline_schedule={schedule}",
        "trainer.micro_batch=4",
    )


CASES = [
    (MIXED,),
    (MIXED, *fsdp(128), FULL),
    (MIXED, *mesh(shard=16, tensor=8), FULL),
    (MIXED, *fsdp(8), LORA),
    (BF16, *mesh(tensor=8)),
    (MIXED, *fsdp(8), "objective.loss_chunk=1024"),
    (LORA, "objective.loss_chunk=1024"),
    (MIXED, *pipeline(shard=4), FULL),
]
SELDOM = [
    (),
    (BF16,),
    (MIXED, FULL),
    (MIXED, LORA),
    (BF16, LORA, FULL),
    (MIXED, *fsdp(8)),
    (MIXED, *fsdp(8), SUMS),
    (MIXED, *fsdp(8), SUMS, "parallelism.reduce_each_micro_batch=false"),
    (MIXED, *fsdp(32), "parallelism.reshard_after_forward=false"),
    (MIXED, *fsdp(128), SELECTIVE),
    (MIXED, *mesh(replicate=2, shard=8), SUMS),
    (MIXED, *mesh(tensor=8)),
    (MIXED, *mesh(context=8)),
    (MIXED, FULL, *fsdp(32), "model=llama3_70b"),
    (MIXED, FULL, *mesh(shard=4, tensor=8), "model=llama3_70b"),
    ("model=gpt2_124m", "data.sequence=1024", "trainer.micro_batch=8"),
    (MIXED, *fsdp(4), "model=openllama_7b", "data.sequence=2048"),
    (MIXED, *pipeline(), LORA),
    (MIXED, *pipeline("gpipe"), SUMS),
    (MIXED, *pipeline(tensor=4)),
    (MIXED, *pipeline(pipeline=4, replicate=2)),
    (MIXED, *pipeline("interleaved_1f1b"), "parallelism.stages_per_rank=2"),
    (MIXED, *pipeline("interleaved_1f1b", shard=2), "parallelism.stages_per_rank=2"),
    (*pipeline(), "model=gpt2_124m", "data.sequence=1024"),
    (MIXED, SELECTIVE, *pipeline(context=2, tensor=4)),
]


@pytest.fixture
def run_of(compose: Compose) -> Compose:
    return lambda *line: compose(*LLAMA, *line, here=False)


@pytest.mark.parametrize(
    "line", [*CASES, *(pytest.param(line, marks=LONG) for line in SELDOM)], ids=" ".join
)
def test_ledger_and_trace_agree(line: tuple[str, ...], run_of: Compose) -> None:
    run = run_of(*line)
    assert refusal(run) is None
    found, foreseen = traced(run), memory.worst(on_cpu(run))
    error = foreseen.peak / found.peak - 1
    fullest = max(found.moments, key=lambda moment: found.moments[moment])
    print(f"{' '.join(line)}: {error:+.2%}, {found.peak:,} at {fullest}")
    assert abs(error) < 0.05
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (12, (MIXED, FULL)),
        *(
            pytest.param(layers, line, marks=LONG)
            for layers, line in [
                (12, (MIXED, *fsdp(8), SUMS)),
                (12, (MIXED, *fsdp(4), "model=openllama_7b", "data.sequence=2048")),
                (12, (MIXED, *mesh(tensor=8))),
                (12, (MIXED, *mesh(shard=16, tensor=8), FULL)),
                (24, (MIXED, *pipeline(shard=2))),
            ]
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_shallow_copies_tell_of_the_whole(
    layers: int, line: tuple[str, ...], run_of: Compose
) -> None:
    run = run_of(*line, f"model.layers={layers}")
    assert traced(run).peak == pytest.approx(traced(run, whole=True).peak, rel=0.02)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (("parallelism=ddp", "parallelism.replicas=8"), "DDP works on real memory"),
        (("parallelism=deepspeed_zero3",), "DeepSpeed works on real memory"),
        (("compile=block",), "what a compiler fuses"),
        (("precision=fp16_mixed",), "fp16 is not computed on the CPU"),
        ((*fsdp(8), "parallelism.cpu_offload=true"), "what is offloaded"),
    ],
)
def test_what_cannot_be_traced_says_why(
    line: tuple[str, ...], reason: str, run_of: Compose
) -> None:
    assert reason in (refusal(run_of(*line)) or "")
