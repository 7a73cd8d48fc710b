"""Large runs that are traced to measure the accuracy of the predicted peak memory."""

from scalewise.bench.memory_accuracy_runs import (
    BF16,
    DORA,
    EVERYWHERE,
    FP8_MIXED,
    FULL,
    IA3,
    LORA,
    MIXED,
    MIXTURE,
    PAIRS,
    QAT,
    QAT_INT4,
    SELECTIVE,
    Overrides,
    fsdp_overrides,
    mesh_overrides,
)

LARGE = (
    "model=llama3_8b",
    "hardware=h100_8x4",
    "data=synthetic",
    "data.sequence=4096",
    "trainer.micro_batch=1",
)
"""Overrides of all runs that are traced."""
ACCUMULATION = "trainer.global_batch=32"


def pipeline_overrides(schedule: str = "one_f_one_b", **sizes: int) -> Overrides:
    """Overrides of a pipeline of two stages, or of ``sizes`` of a mesh."""
    return (
        *mesh_overrides(**({"pipeline": 2} | sizes)),
        f"parallelism.pipeline_schedule={schedule}",
        "trainer.micro_batch=4",
    )


TRACED: tuple[Overrides, ...] = (
    (MIXED,),
    (MIXED, *fsdp_overrides(128), FULL),
    (MIXED, *mesh_overrides(shards=16, tensor=8), FULL),
    (MIXED, *fsdp_overrides(8), LORA),
    (BF16, *mesh_overrides(tensor=8)),
    (MIXED, *fsdp_overrides(8), "objective.loss_chunk=1024"),
    (LORA, "objective.loss_chunk=1024"),
)
TRACED_SELDOM: tuple[Overrides, ...] = (
    (*QAT, MIXED, *fsdp_overrides(8), FULL),
    (*QAT_INT4, MIXED, *fsdp_overrides(8)),
    (FP8_MIXED, *fsdp_overrides(8), FULL),
    (FP8_MIXED, *mesh_overrides(replicate=2, shards=8), ACCUMULATION),
    (MIXED, *pipeline_overrides(shards=4), FULL),
    (),
    (BF16,),
    (MIXED, FULL),
    (MIXED, LORA),
    (BF16, LORA, FULL),
    (MIXED, *fsdp_overrides(8), DORA, *EVERYWHERE),
    (BF16, *mesh_overrides(tensor=8), DORA, *EVERYWHERE),
    (MIXED, *fsdp_overrides(8), IA3),
    (MIXED, *fsdp_overrides(8), LORA, "quantization=nf4"),
    (BF16, LORA, "quantization=fp4", "quantization.double=false", FULL),
    (MIXED, *mesh_overrides(shards=4, context=2), LORA, "quantization=int8"),
    (MIXED, *fsdp_overrides(8)),
    (MIXED, *fsdp_overrides(8), LORA, *PAIRS),
    (MIXED, *fsdp_overrides(8), ACCUMULATION),
    (MIXED, *fsdp_overrides(8), ACCUMULATION, "parallelism.reduce_each_micro_batch=false"),
    (MIXED, *fsdp_overrides(32), "parallelism.reshard_after_forward=false"),
    (MIXED, *fsdp_overrides(128), SELECTIVE),
    (MIXED, *fsdp_overrides(128), *MIXTURE),
    (MIXED, *mesh_overrides(replicate=2, shards=8), ACCUMULATION),
    (MIXED, *mesh_overrides(tensor=8)),
    (MIXED, *mesh_overrides(context=8)),
    (MIXED, FULL, *fsdp_overrides(32), "model=llama3_70b"),
    (MIXED, FULL, *mesh_overrides(shards=4, tensor=8), "model=llama3_70b"),
    ("model=gpt2_124m", "data.sequence=1024", "trainer.micro_batch=8"),
    (MIXED, *fsdp_overrides(4), "model=openllama_7b", "data.sequence=2048"),
    (MIXED, *pipeline_overrides(), LORA),
    (MIXED, *pipeline_overrides("gpipe"), ACCUMULATION),
    (MIXED, *pipeline_overrides(tensor=4)),
    (MIXED, *pipeline_overrides(pipeline=4, replicate=2)),
    (MIXED, *pipeline_overrides("interleaved_1f1b"), "parallelism.stages_per_rank=2"),
    (MIXED, *pipeline_overrides("interleaved_1f1b", shards=2), "parallelism.stages_per_rank=2"),
    (*pipeline_overrides(), "model=gpt2_124m", "data.sequence=1024"),
    (MIXED, SELECTIVE, *pipeline_overrides(context=2, tensor=4)),
)
"""Run of the exhaustive tests only."""
