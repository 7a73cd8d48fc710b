"""Small runs of DeepSpeed that are trained to measure the accuracy of the predicted peak memory."""

from scalewise.bench.memory_accuracy_runs import (
    CHUNKED,
    LORA,
    MIXED,
    OFFLOAD,
    OFFLOAD_ALL,
    WEIGHTS,
    Overrides,
)

_SMALL_BUCKETS = "parallelism.bucket_mib=1"
_SHARD_ALL = "parallelism.keep_whole_below=100"
_IN_PLACE = "parallelism.contiguous_gradients=false"
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
        (1, "trainer.global_batch=2", _SMALL_BUCKETS, *CHUNKED),
        (2, _SMALL_BUCKETS, *CHUNKED, MIXED),
        (3, _SMALL_BUCKETS, _SHARD_ALL, *CHUNKED),
        (3, _SMALL_BUCKETS, _SHARD_ALL, *OFFLOAD_ALL),
        (3, _SHARD_ALL, *OFFLOAD_ALL),
        (3, _SHARD_ALL, *OFFLOAD),
        (2, _SMALL_BUCKETS, _IN_PLACE),
        (3, _SMALL_BUCKETS, _SHARD_ALL, _IN_PLACE),
        (3, _SHARD_ALL, _IN_PLACE, MIXED),
    )
)
"""DeepSpeed runs with buckets that are small compared with the model, as for large models."""
