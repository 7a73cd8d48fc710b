"""Golden test: results of 20 small runs, and the files and keys that they write."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.compatibility_matrix import EXTRA_OPTIONS
from fixtures.golden import golden_record, key_tree
from fixtures.job_runner import JobRunner
from fixtures.strategies import GPT2, LLAMA, TINY_DECODER, mesh

STEPS = 5


def vendor_id() -> str:
    """Vendor of the processor, as the kernel reports it; empty if unknown."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if sys.platform == "linux" else ""
    return next((line.split()[-1] for line in info.splitlines() if "vendor_id" in line), "")


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
MACHINE = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {vendor_id()}"
"""Bitwise equal results are expected for equal kernels only; MKL chooses them by vendor too."""
BF16_EPSILON = 2.0**-8
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
    is_same_machine = golden["machine"] == MACHINE
    # Processors with bf16 matrix units round other partial sums.
    tolerance = BF16_EPSILON if name == "bf16_mixed" and not is_same_machine else 1e-4
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert record[key] == pytest.approx(golden[key], rel=tolerance), key
    if is_same_machine:
        assert record["weights"] == golden["weights"]
