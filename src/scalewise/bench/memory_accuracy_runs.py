"""Small runs that are trained to measure the accuracy of the predicted peak memory."""

Overrides = tuple[str, ...]

MIXED, BF16 = "precision=bf16_mixed", "precision=bf16_true"
FP8 = ("precision=fp8", "precision.compute=fp32")
FP8_MIXED = "precision=fp8"
COMPILED = "compile=block"
DROPOUT = "model.dropout=0.1"
FULL, SELECTIVE = "memory=checkpoint_full", "memory=checkpoint_selective"
EVERY_N = "memory=checkpoint_every_n"
OFFLOAD = ("memory=offload_activations", "objective.loss_chunk=64")
OFFLOAD_ALL = (*OFFLOAD, "memory.recompute=nothing")
MIXTURE = (EVERY_N, "memory.otherwise=selective")
LORA, DORA, IA3 = "adapter=lora", "adapter=dora", "adapter=ia3"
QLORA = (LORA, "quantization=nf4")
QAT, QAT_INT4 = ("quantization=qat_8da4w",), ("quantization=qat_int4",)
PROMPT = ("adapter=prompt", "adapter.tokens=32", "model.context=160")
PREFIX = ("adapter=prefix", *PROMPT[1:])
EVERYWHERE = ("adapter.targets=[.*]",)
"""Every linear layer of a block."""
HEAD = ("model.tied=false", "adapter.trained=[head,embedding]")
NORMS = ("adapter.trained=[.*norm,attention.key]",)
"""Modules that are fully trained next to an adapter."""
PAIRS = ("objective=dpo", "data.pairs=true")
PACKING = ("data.packing=true", "data.sequence=512", "model.context=512", "trainer.micro_batch=2")
"""Sequences that are long compared with the model, so that attention needs much memory."""
CLASSES = (
    *("objective=classification", "data=corpus_classes", "data.vocabulary=1024"),
    *("model.classes=2", "model.tied=false"),
)
REWARDS = ("objective=grpo", "objective.answers=4", "data=reversal", "data.sequence=32")


def mesh_overrides(**sizes: int) -> Overrides:
    """Overrides of a mesh with these sizes."""
    return ("parallelism=mesh", *(f"parallelism.{axis}={size}" for axis, size in sizes.items()))


def fsdp_overrides(shards: int, *options: str) -> Overrides:
    """Overrides of fully sharded data parallelism."""
    return ("parallelism=fsdp", f"parallelism.shards={shards}", *options)


def _pipeline_overrides(schedule: str) -> Overrides:
    return ("parallelism=pipeline", f"parallelism.pipeline_schedule={schedule}")


SMALL = (
    "experiment=smoke",
    "tracking=none",
    "callbacks=[none]",
    "data=synthetic",
    "data.sequence=128",
    "model.layers=4",
    "model.width=128",
    "model.heads=4",
    "model.feedforward=384",
    "model.vocabulary=1024",
    "model.context=128",
    "trainer.max_steps=3",
    "trainer.validate_every=null",
    "trainer.log_every=3",
    "trainer.micro_batch=4",
    "trainer.global_batch=8",
    "schedule.warmup_steps=1",
    "checkpoint=none",
    "launch.isolation=process",
)
"""Overrides of all runs that are trained."""
WEIGHTS = (
    "model.width=256",
    "model.tied=false",
    "model.vocabulary=256",
    "trainer.micro_batch=1",
    "memory=checkpoint_full",
)
"""Few tokens and large weights, so that weights and gradients determine the peak."""
_TALL = (
    "data.sequence=16",
    "model.vocabulary=16384",
    "trainer.micro_batch=1",
    "trainer.global_batch=2",
)
"""Few tokens and one large weight, so that the optimizer's temporary tensors determine the peak."""
_GPT2 = (
    "model.norm=layernorm",
    "model.position=learned",
    "model.activation=gelu",
    "model.bias=true",
)
_QWEN = ("model.qk_norm=head", "model.qkv_bias=true", "model.head_width=64")
_MULTIPLIERS = (
    *("model.embedding_multiplier=2.0", "model.residual_multiplier=0.5"),
    *("model.attention_multiplier=0.3", "model.logit_divisor=2.0"),
)
_OLMO2 = ("model.qk_norm=projection", "model.norm_placement=post", *_MULTIPLIERS)
_GEMMA3 = (
    *("model.norm=zero_centered_rmsnorm", "model.norm_placement=sandwich"),
    *("model.activation=geglu", "model.qk_norm=head", "model.window=32", "model.global_every=2"),
    *("model.rope_local_theta=100.0", "model.embedding_multiplier=8.0"),
)
_GEMMA2 = (
    *("model.norm=zero_centered_rmsnorm", "model.norm_placement=sandwich", "model.kv_heads=2"),
    *("model.activation=geglu", "model.window=32", "model.global_every=2"),
    *("model.attention_softcap=50.0", "model.logit_softcap=30.0"),
)
_PHI = (
    *("model.norm=layernorm", "model.activation=gelu", "model.bias=true", "model.tied=false"),
    *("model.residual=parallel_one_norm", "model.rotary_fraction=0.5", "model.head_bias=true"),
)
_GPT_NEOX = (*_PHI, "model.residual=parallel", "model.head_bias=false")
_IN_BACKWARD = (
    "optimizer.in_backward=true",
    "trainer.clip_norm=null",
    "trainer.global_batch=null",
    *WEIGHTS,
)
EMA = "callbacks=[ema]"
_DDP, _TENSOR = ("parallelism=ddp",), ("parallelism=tensor",)
_CHUNKED = ("objective.loss_chunk=64", "model.vocabulary=4096", "model.layers=2")
"""Large vocabulary with a chunked loss, so that the logits determine the peak."""
_SHARDED_PIPELINE = (
    *mesh_overrides(pipeline=2, shards=2),
    "parallelism.pipeline_micro_batches=4",
)
_ZERO1 = fsdp_overrides(2, "parallelism.shard=optimizer")
_ZERO2 = fsdp_overrides(2, "parallelism.shard=gradients")

TRAINED: tuple[Overrides, ...] = (
    (),
    (DROPOUT, LORA),
    OFFLOAD_ALL,
    ("objective.loss_chunk=64",),
    _GPT2,
    WEIGHTS,
    (LORA, MIXED),
    (*FP8, *WEIGHTS),
    (*QAT, *WEIGHTS),
    PACKING,
    (*_GEMMA3, FULL),
    (*_GEMMA2, *PACKING),
    _PHI,
    ("optimizer=adamw_8bit", *_TALL),
    _IN_BACKWARD,
    fsdp_overrides(2, *_IN_BACKWARD),
    _DDP,
    fsdp_overrides(2, *QLORA, *WEIGHTS),
    fsdp_overrides(2, LORA, *NORMS),
    (*_ZERO1, MIXED, *WEIGHTS),
    (*_ZERO2, MIXED, *WEIGHTS),
    _pipeline_overrides("one_f_one_b"),
    mesh_overrides(pipeline=2, shards=2),
    (*_SHARDED_PIPELINE, FULL, "model.width=256", "model.feedforward=1024"),
    (*_TENSOR, *_CHUNKED),
    (*_TENSOR, *_TALL),
    fsdp_overrides(2, EMA, *WEIGHTS),
)
TRAINED_SELDOM: tuple[Overrides, ...] = (
    _QWEN,
    (*_QWEN, MIXED),
    (*_QWEN, *_TENSOR),
    _OLMO2,
    (*_OLMO2, MIXED, SELECTIVE),
    _GEMMA3,
    (*_GEMMA3, MIXED),
    (*_GEMMA3, *PACKING),
    (*_GEMMA3, *_TENSOR, FULL),
    (*_GEMMA3, "parallelism=context", "parallelism.attention=gather"),
    (*_GEMMA3, *_pipeline_overrides("one_f_one_b")),
    _GEMMA2,
    (*_GEMMA2, MIXED, SELECTIVE),
    (*_GEMMA2, *PACKING, BF16),
    (*_GEMMA2, *PACKING, FULL, *_CHUNKED),
    (*_GEMMA2, *_CHUNKED),
    (*_GEMMA2, *_CHUNKED, MIXED),
    (*_GEMMA2, *_CHUNKED, LORA),
    (*_GEMMA2, *PREFIX, "model.window=null", "model.global_every=null"),
    (*_GEMMA2, COMPILED),
    (*_GEMMA2, *_TENSOR),
    (*_GEMMA2, *_TENSOR, "parallelism.loss_parallel=false"),
    fsdp_overrides(2, *_GEMMA2, MIXED),
    (*_GEMMA2, "parallelism=context"),
    (*_GEMMA2, "parallelism=context", "parallelism.attention=gather"),
    (*_GEMMA2, *_pipeline_overrides("one_f_one_b")),
    _GPT_NEOX,
    (*_GPT_NEOX, MIXED, SELECTIVE),
    (*_GPT_NEOX, LORA),
    (*_GPT_NEOX, COMPILED),
    (*_GPT_NEOX, *_TENSOR),
    (*_PHI, MIXED),
    (*_PHI, FULL),
    (*_PHI, LORA),
    (*_PHI, DROPOUT),
    (*_PHI, COMPILED),
    (*_PHI, *_CHUNKED, "model.tied=false"),
    (*_PHI, *_CHUNKED, MIXED),
    (*_PHI, *_TENSOR),
    (*_PHI, *_TENSOR, "parallelism.sequence_parallel=false"),
    fsdp_overrides(2, *_PHI, *WEIGHTS),
    (*_PHI, *_pipeline_overrides("one_f_one_b")),
    (EMA, LORA),
    (*_ZERO1, *WEIGHTS),
    (*_ZERO2, *WEIGHTS, "trainer.global_batch=4"),
    fsdp_overrides(2, "parallelism.reshard_after_forward=false", MIXED, *WEIGHTS),
    (*mesh_overrides(shards=2, tensor=2), "parallelism.shard=optimizer", MIXED, *WEIGHTS),
    (*_SHARDED_PIPELINE, "parallelism.shard=optimizer"),
    (*_DDP, EMA, *WEIGHTS),
    (*_TENSOR, EMA, MIXED, *WEIGHTS),
    (*_pipeline_overrides("one_f_one_b"), EMA, *WEIGHTS, "trainer.micro_batch=2"),
    (DROPOUT,),
    (DROPOUT, BF16, "model.kv_heads=2"),
    (DROPOUT, MIXED, SELECTIVE),
    (DROPOUT, FULL),
    (DROPOUT, COMPILED),
    (DROPOUT, *PREFIX),
    (DROPOUT, *OFFLOAD),
    (DROPOUT, *_DDP),
    (DROPOUT, *_TENSOR),
    fsdp_overrides(2, DROPOUT),
    (*mesh_overrides(context=2), DROPOUT),
    (*_CHUNKED, MIXED),
    (*_CHUNKED, "model.tied=false"),
    (*_CHUNKED, LORA),
    (*_CHUNKED, LORA, *HEAD, MIXED),
    (*_CHUNKED, *_TENSOR, MIXED),
    (*_CHUNKED, *_TENSOR, "parallelism.loss_parallel=false"),
    (*_CHUNKED, *_DDP),
    fsdp_overrides(2, *_CHUNKED, MIXED),
    (*_CHUNKED, *_pipeline_overrides("one_f_one_b")),
    (COMPILED,),
    (COMPILED, MIXED),
    (COMPILED, *_GPT2),
    (COMPILED, FULL),
    (COMPILED, LORA, MIXED),
    (COMPILED, FP8_MIXED),
    (COMPILED, *QAT),
    (COMPILED, *PACKING),
    ("compile=whole",),
    (*PAIRS, LORA),
    (*_DDP, MIXED, SELECTIVE),
    fsdp_overrides(2, IA3, *EVERYWHERE),
    (LORA, MIXED, *HEAD),
    (*QLORA, *WEIGHTS),
    (FULL,),
    (EVERY_N,),
    ("optimizer=sgd", "trainer.global_batch=4"),
    (DORA, MIXED),
    ("adapter=rslora", *EVERYWHERE),
    ("adapter=pissa", *EVERYWHERE, MIXED),
    (IA3, MIXED),
    fsdp_overrides(2, MIXED, SELECTIVE),
    fsdp_overrides(2, MIXED, *WEIGHTS),
    ("parallelism=context", MIXED),
    (*_TENSOR, MIXED, SELECTIVE),
    (*_DDP, "optimizer=sgd", "trainer.global_batch=16"),
    PAIRS,
    fsdp_overrides(2, LORA),
    fsdp_overrides(2, DORA, *EVERYWHERE),
    (MIXED,),
    (*PACKING, FULL),
    (*PACKING, *_GPT2),
    (*PACKING, MIXED, SELECTIVE, "data.sequence=256"),
    (*PACKING, *_TENSOR),
    (*PACKING, "parallelism=context", "parallelism.attention=gather"),
    (*PACKING, *_pipeline_overrides("one_f_one_b")),
    (SELECTIVE,),
    (*FP8, SELECTIVE),
    (*FP8, *_GPT2, "precision.recipe=rowwise"),
    (FP8_MIXED, *WEIGHTS, SELECTIVE),
    (FP8_MIXED, "precision.parameters=bf16", *WEIGHTS),
    (*_DDP, *FP8, *WEIGHTS),
    fsdp_overrides(2, *FP8, *WEIGHTS),
    fsdp_overrides(2, FP8_MIXED, *WEIGHTS),
    (*_pipeline_overrides("one_f_one_b"), *FP8),
    QAT,
    (*QAT_INT4, *WEIGHTS),
    (*QAT, SELECTIVE),
    (*QAT, FULL, "objective.loss_chunk=64"),
    (*QAT, MIXED, *WEIGHTS),
    (*QAT_INT4, BF16, *WEIGHTS),
    (*_DDP, *QAT, *WEIGHTS),
    (*_DDP, *QAT_INT4, MIXED),
    fsdp_overrides(2, *QAT, *WEIGHTS),
    fsdp_overrides(2, *QAT_INT4, MIXED, *WEIGHTS),
    fsdp_overrides(2, *QAT),
    fsdp_overrides(2, *QAT, *_IN_BACKWARD),
    ("parallelism=context", *QAT),
    (*_pipeline_overrides("one_f_one_b"), *QAT),
    (*OFFLOAD_ALL, *QAT),
    (MIXED, *WEIGHTS),
    (*_DDP, *WEIGHTS),
    fsdp_overrides(2),
    fsdp_overrides(2, *WEIGHTS),
    fsdp_overrides(4, *WEIGHTS),
    ("parallelism=hsdp", *WEIGHTS),
    _TENSOR,
    (*mesh_overrides(shards=2, tensor=2), MIXED, *WEIGHTS),
    (*_pipeline_overrides("gpipe"), MIXED, "trainer.micro_batch=8"),
    mesh_overrides(pipeline=2, tensor=2),
    (*_SHARDED_PIPELINE, *WEIGHTS, "trainer.micro_batch=4", "trainer.global_batch=16"),
    (
        *_SHARDED_PIPELINE,
        *("parallelism.pipeline_schedule=gpipe", MIXED, *WEIGHTS, "trainer.micro_batch=4"),
    ),
    (*_SHARDED_PIPELINE, *WEIGHTS, "memory=none", "trainer.micro_batch=4"),
    (*QLORA, MIXED, SELECTIVE),
    (*QLORA, "adapter.targets=[.*]"),
    (*_pipeline_overrides("one_f_one_b"), *QLORA),
    (LORA, "quantization=fp4", "quantization.double=false", *WEIGHTS),
    (LORA, "quantization=int8", *WEIGHTS),
    fsdp_overrides(2, LORA, "quantization=int8", MIXED, *WEIGHTS),
    (BF16,),
    fsdp_overrides(2, BF16),
    (*PAIRS, "objective.loss_chunk=64"),
    REWARDS,
    (*_DDP, *REWARDS),
    fsdp_overrides(2, *REWARDS, LORA, "objective.beta=0.1"),
    CLASSES,
    (*CLASSES, MIXED, SELECTIVE, "objective.loss_chunk=64"),
    (*CLASSES, LORA, "adapter.trained=[head]"),
    fsdp_overrides(2, *CLASSES),
    (*_pipeline_overrides("one_f_one_b"), *CLASSES),
    (*PAIRS, LORA, *WEIGHTS),
    fsdp_overrides(2, *PAIRS),
    fsdp_overrides(2, *PAIRS, LORA, *WEIGHTS),
    (*_TENSOR, *PAIRS, LORA),
    fsdp_overrides(2, "parallelism.reduce_each_micro_batch=false", *WEIGHTS),
    fsdp_overrides(2, "parallelism.prefetch=2", *WEIGHTS),
    (*_TENSOR, *WEIGHTS),
    (*mesh_overrides(shards=2, tensor=2), MIXED, *_TALL),
    (*_TENSOR, "parallelism.sequence_parallel=false", "parallelism.loss_parallel=false", MIXED),
    ("parallelism=context", "parallelism.attention=gather"),
    _pipeline_overrides("gpipe"),
    (*_pipeline_overrides("one_f_one_b"), FULL),
    (*_pipeline_overrides("one_f_one_b"), *MIXTURE),
    (MIXED, *MIXTURE, "memory.every=1.5"),
    OFFLOAD,
    (*OFFLOAD_ALL, MIXED),
    (*OFFLOAD_ALL, *WEIGHTS),
    (*OFFLOAD_ALL, *_GPT2),
    (*OFFLOAD, "memory.recompute=selective"),
    (*OFFLOAD_ALL, LORA, MIXED),
    (*OFFLOAD, *QLORA),
    (*_DDP, *OFFLOAD_ALL, MIXED),
    fsdp_overrides(2, *OFFLOAD_ALL),
    (*_TENSOR, *OFFLOAD_ALL),
    ("parallelism=context", *OFFLOAD_ALL),
    (*_pipeline_overrides("one_f_one_b"), *OFFLOAD),
    (*_pipeline_overrides("one_f_one_b"), *OFFLOAD_ALL, "trainer.micro_batch=8"),
    fsdp_overrides(2, *MIXTURE, "memory.every=3"),
    (DORA, *EVERYWHERE, *_GPT2),
    (DORA, *EVERYWHERE, *WEIGHTS),
    (DORA, *EVERYWHERE, SELECTIVE, "adapter.dropout=0.1"),
    (*_TENSOR, DORA, *EVERYWHERE, FULL),
    fsdp_overrides(2, DORA, *EVERYWHERE, MIXED),
    (*_TENSOR, LORA, *EVERYWHERE, FULL),
    (*_TENSOR, DORA, *EVERYWHERE),
    (*_pipeline_overrides("one_f_one_b"), DORA, *EVERYWHERE),
    (IA3, *EVERYWHERE, *_GPT2),
    fsdp_overrides(2, IA3, *EVERYWHERE, MIXED, SELECTIVE),
    (*_TENSOR, IA3, *EVERYWHERE, FULL),
    (LORA, *NORMS, *_GPT2),
    (LORA, "adapter.trained=[embedding]"),
    (*PROMPT, *_GPT2),
    (*PROMPT, MIXED, SELECTIVE),
    (*PROMPT, FULL, "objective.loss_chunk=64"),
    (*_DDP, *PROMPT, *WEIGHTS),
    fsdp_overrides(2, *PROMPT, MIXED),
    (*_TENSOR, *PROMPT),
    (*_TENSOR, *PROMPT, FULL, "objective.loss_chunk=64"),
    (*_TENSOR, "parallelism.sequence_parallel=false", *PROMPT, *_GPT2, MIXED),
    (*mesh_overrides(shards=2, tensor=2), *PROMPT, MIXED, SELECTIVE),
    (*_TENSOR, *PROMPT, *WEIGHTS),
    (*PREFIX, *_GPT2),
    (*PREFIX, MIXED, SELECTIVE),
    (*PREFIX, FULL, "data.packing=true"),
    (*_DDP, *PREFIX, *WEIGHTS),
    fsdp_overrides(2, *PREFIX, MIXED),
    (*_TENSOR, *PREFIX),
    (*_TENSOR, *PREFIX, FULL, "data.packing=true"),
    (*_TENSOR, "parallelism.sequence_parallel=false", *PREFIX, *_GPT2, MIXED),
    (*mesh_overrides(shards=2, tensor=2), *PREFIX, MIXED, SELECTIVE),
    (*_TENSOR, *PREFIX, *WEIGHTS),
    (*_pipeline_overrides("one_f_one_b"), *PREFIX),
    (*QLORA, *HEAD),
    fsdp_overrides(2, LORA, *HEAD, MIXED, *WEIGHTS),
    (*_DDP, IA3, "model.tied=false", "adapter.trained=[head]"),
    (*_TENSOR, LORA, *NORMS, FULL),
    (*_TENSOR, LORA, *HEAD, MIXED),
    (*_pipeline_overrides("one_f_one_b"), LORA, *HEAD),
    (LORA, *NORMS, SELECTIVE, "objective.loss_chunk=64"),
    ("optimizer=adafactor", *WEIGHTS),
    ("optimizer=adamw_8bit", *_IN_BACKWARD),
    ("optimizer=adamw_8bit", *_IN_BACKWARD, "model.tied=true", "model.vocabulary=8192"),
    ("optimizer=adafactor", *_IN_BACKWARD),
    (LORA, *_IN_BACKWARD, "memory=none"),
    fsdp_overrides(2, MIXED, *_IN_BACKWARD),
    ("parallelism=hsdp", *_IN_BACKWARD),
    (*_TENSOR, *_IN_BACKWARD),
    ("optimizer=adamw_4bit", BF16, *_TALL),
    ("optimizer=adamw_paged", *_TALL),
    ("optimizer=adamw_paged", "precision=bf16_true", *_TALL),
    ("optimizer=lion", *WEIGHTS),
    ("optimizer=muon", *WEIGHTS),
    fsdp_overrides(2, "optimizer=muon", *WEIGHTS),
    fsdp_overrides(2, "optimizer=muon", *_IN_BACKWARD),
    ("parallelism=hsdp", "optimizer=muon", MIXED, *WEIGHTS),
    ("optimizer=schedule_free", "schedule=constant", *WEIGHTS),
    fsdp_overrides(2, "optimizer=adamw_8bit", *_TALL),
)
"""Run of the exhaustive tests only."""

_SMALL_BUCKETS = "parallelism.bucket_mib=1"
_SHARD_ALL = "parallelism.keep_whole_below=100"
ZERO: tuple[Overrides, ...] = tuple(
    (f"parallelism=deepspeed_zero{stage}", *WEIGHTS, *overrides)
    for stage, *overrides in (
        (1, "trainer.global_batch=2"),
        (1, "trainer.global_batch=2", MIXED),
        (1, "trainer.global_batch=2", "parallelism.overlap_comm=false"),
        (1, "trainer.global_batch=4"),
        (1, "trainer.global_batch=4", MIXED),
        (2, _SMALL_BUCKETS),
        (2, _SMALL_BUCKETS, MIXED),
        (2, _SMALL_BUCKETS, "parallelism.replicas=4"),
        (3, _SMALL_BUCKETS, _SHARD_ALL),
        (3, _SMALL_BUCKETS, _SHARD_ALL, MIXED),
        (3, _SMALL_BUCKETS, _SHARD_ALL, "parallelism.replicas=4"),
        (1, "trainer.global_batch=2", LORA),
        (2, _SMALL_BUCKETS, LORA),
        (2, _SMALL_BUCKETS, LORA, MIXED),
        (3, _SMALL_BUCKETS, _SHARD_ALL, LORA),
        (1, "trainer.global_batch=2", _SMALL_BUCKETS, *_CHUNKED),
        (2, _SMALL_BUCKETS, *_CHUNKED, MIXED),
        (3, _SMALL_BUCKETS, _SHARD_ALL, *_CHUNKED),
        (3, _SMALL_BUCKETS, _SHARD_ALL, *OFFLOAD_ALL),
        (3, _SHARD_ALL, *OFFLOAD_ALL),
        (3, _SHARD_ALL, *OFFLOAD),
    )
)
"""DeepSpeed runs with buckets that are small compared with the model, as for large models."""
