"""Calls in step code by which the host may wait for a device, each with its reason.

``tests/dry_cuda/test_host_waits.py`` counts the waits of a step; this test also covers code that no
option there runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "scalewise"
STEP_PACKAGES = (
    "training",
    "strategies",
    "models",
    "objectives",
    "optimizers",
    "adapters",
    "quantization",
    "precision",
)
READING_METHODS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize"}
CREATING_FUNCTIONS = {"tensor", "as_tensor"}
"""They copy from the host if their ``device`` is not the CPU."""

ALLOWED = {
    "models/attention_segments.py from_lengths": "lengths of a packed batch, which are on the host",
    "models/attention_segments.py text_lengths": "positions of a packed batch, on the host",
    "models/decoder/state_dict_adapter.py group_rows": "import of weights, on the host",
    "models/grouped_mm.py _grouped_mm": "the CPU; on CUDA, dtypes without a grouped kernel",
    "models/grouped_mm.py _grouped_weight_gradient": "as its forward",
    "models/varlen_cpu.py _tiles": "runs on the CPU",
    "optimizers/implementations.py wait": "optimizer.offload: the host steps after the gradient",
    "optimizers/low_bit_adam.py _restore_scales": "when a run resumes",
    "optimizers/paged.py wait_for_state": "only where the host reads the state",
    "strategies/activation_offload.py _read_file": "memory of the host",
    "strategies/activation_offload.py _save": "the CPU, which offloads to disk",
    "strategies/deepspeed.py averages_by_name": "checkpoints",
    "strategies/deepspeed.py lightning_module_state_dict": "checkpoints",
    "strategies/deepspeed.py save_checkpoint": "checkpoints",
    "strategies/expert_parallel.py _row_counts": "parallelism.expert: rows of each rank",
    "strategies/pinned_memory.py _unpin": "when a model is deleted",
    "strategies/zero_state_dict.py _allocate_state": "when a run resumes",
    "training/callbacks/expert_metrics.py take_rows": "steps that log",
    "training/callbacks/loss_guard.py wait": "a copy that began ten micro-batches earlier",
    "training/callbacks/metrics_recorder.py _build_rows": "steps that log",
    "training/callbacks/metrics_recorder.py peak_rank_memory": "steps that log",
    "training/callbacks/pruning.py _report_new_values": "trials of a hyperparameter search",
    "training/callbacks/reference_logprobs.py on_fit_start": "before the first step",
    "training/callbacks/state_recorder.py _write": "scalewise verify alone",
    "training/callbacks/state_recorder.py describe_batch": "scalewise verify alone",
    "training/lightning_module.py _is_spike": "trainer.skip_sigma: the host decides on each step",
    "training/lightning_module.py _scale_loss": "the first step",
    "training/lightning_module.py on_validation_epoch_end": "validation",
    "training/rollout.py sample": "sampled answers, which are strings",
    "training/step_statistics.py state_dict": "checkpoints",
    "training/signal_stop.py _wait_for_exchange": "a tensor of the host",
    "training/signal_stop.py poll": "a tensor of the host",
}
"""Reasons by file and function."""


def synchronizing_functions(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Innermost function of each call that may wait for a device."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, keywords = node.func.attr, {keyword.arg for keyword in node.keywords}
            reads = name in READING_METHODS and not node.args
            if reads or (name in CREATING_FUNCTIONS and "device" in keywords):
                yield function
        is_function = isinstance(node, ast.FunctionDef)
        yield from synchronizing_functions(node, node.name if is_function else function)


def test_step_code_waits_only_where_it_may() -> None:
    files = [file for name in STEP_PACKAGES for file in (SOURCE / name).rglob("*.py")]
    found = {
        f"{file.relative_to(SOURCE).as_posix()} {function}"
        for file in files
        for function in synchronizing_functions(ast.parse(file.read_text("utf-8")))
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("loss.item()", ["step"]),
        ("torch.cuda.synchronize()", ["step"]),
        ("torch.tensor([1], device=x.device)", ["step"]),
        ("torch.tensor([1])", []),
        ("module.cpu", []),
        ("values.numpy(force)", []),
    ],
)
def test_synchronizing_calls_are_found(statement: str, expected: list[str]) -> None:
    tree = ast.parse(f"def step(x):\n    return {statement}\n")
    assert [*synchronizing_functions(tree)] == expected
