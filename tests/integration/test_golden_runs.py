"""Golden test: results of 20 small runs, and the files and keys that they write."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.compatibility_matrix import EXTRA_OPTIONS
from fixtures.golden import golden_record, key_tree
from fixtures.job_runner import JobRunner
from fixtures.strategies import GPT2, LLAMA, TINY_DECODER, mesh

STEPS = 5
SMALL_RUN = (
    *TINY_DECODER,
    f"trainer.max_steps={STEPS}",
    "trainer.global_batch=8",
    "trainer.micro_batch=2",
    "trainer.log_every=1",
    f"trainer.validate_every={STEPS}",
    "trainer.validation_rows=4",
    f"checkpoint.every={STEPS}",
)
RUNS: dict[str, tuple[str, ...]] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "sgd": (*LLAMA, "optimizer=sgd"),
    "lion": (*LLAMA, "optimizer=lion"),
    "muon": (*LLAMA, "optimizer=muon"),
    "adafactor": (*LLAMA, "optimizer=adafactor"),
    "adamw_8bit": (*LLAMA, "optimizer=adamw_8bit"),
    "linear": (*LLAMA, "schedule=linear", "schedule.warmup_steps=2"),
    "bf16_mixed": (*LLAMA, "precision=bf16_mixed"),
    "lora": (*LLAMA, "adapter=lora"),
    "dora": (*LLAMA, "adapter=dora"),
    "qlora": (*LLAMA, "adapter=lora", "quantization=nf4"),
    "dpo": (*LLAMA, *EXTRA_OPTIONS["objective"]["dpo"]),
    "reversal": (*LLAMA, "data=reversal", "data.sequence=32"),
    "ddp": (*LLAMA, "parallelism=ddp"),
    "fsdp": (*LLAMA, "parallelism=fsdp"),
    "tensor": (*LLAMA, "parallelism=tensor"),
    "context": (*LLAMA, "parallelism=context"),
    "pipeline": (*LLAMA, "parallelism=pipeline"),
    "pipeline x shards": (*LLAMA, *mesh(pipeline=2, shards=2)),
}
MACHINE = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
"""Bitwise equal results are expected for equal kernels only."""
OPEN_MAPPINGS = {
    "status": {"machine", "versions", "choices"},
    "plan": {"ledger", "phases", "step_parts"},
}
"""Keys below these keys of a file are not frozen, because they depend on the run."""


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names and bytes, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def keys_of(run: RunDir, name: str) -> object:
    content = run.json(f"{name}.json")
    return key_tree(
        {key: 0 if key in OPEN_MAPPINGS.get(name, ()) else content[key] for key in content}
    )


def describe_run(run: RunDir) -> dict[str, Any]:
    """Record of a finished run."""
    return {
        "weights": hash_of(run.weights(STEPS)),
        "machine": MACHINE,
        "train/loss": run.column("train/loss"),
        "train/grad_norm": run.column("train/grad_norm"),
        "val/loss": run.column("val/loss"),
        "tensors": sorted(run.weights(STEPS)),
        "files": sorted(str(path.relative_to(run.path)) for path in run.content),
        **{name: keys_of(run, name) for name in ("status", "plan", "summary")},
        "columns": list(run.metrics[0]),
    }


@pytest.mark.parametrize("name", RUNS)
def test_run_has_golden_weights_and_files(name: str, run_job: JobRunner) -> None:
    record = describe_run(run_job.without_defaults(*SMALL_RUN, *RUNS[name]))
    golden = golden_record(f"run_{name.replace(' x ', '_')}", record)
    for key in ("tensors", "files", "status", "plan", "summary", "columns"):
        assert record[key] == golden[key], key
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert record[key] == pytest.approx(golden[key], rel=1e-4), key
    if golden["machine"] == MACHINE:
        assert record["weights"] == golden["weights"]
