"""Every layout takes the steps that one device takes: losses, gradients and weights, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.doors import Folder
from fixtures.jobs import Job
from fixtures.layouts import GPT2, LAYOUTS, LLAMA, SHAPE, marks
from safetensors.torch import load_file

from scalewise import compose

TOLERANCE = 1e-5
STEPS = 3
SGD = (
    "optimizer=sgd",
    "optimizer.lr=0.3",
    "optimizer.momentum=0.9",
    "optimizer.weight_decay=0.01",
    "schedule=constant",
    "schedule.warmup_steps=0",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every=1",
    "trainer.validate_every=3",
    "trainer.validation_rows=5",
    "trusted_packages=[fixtures]",
    "+callbacks.gradients._target_=fixtures.probes.Gradients",
)

BATCHES: dict[str, tuple[str, ...]] = {
    "one_pass": (*LLAMA, "trainer.global_batch=12", "trainer.clip_norm=null"),
    "all_at_once": (*GPT2, "trainer.global_batch=11", "trainer.clip_norm=0.1", "data.masked=0.3"),
    "accumulated": (*LLAMA, "trainer.global_batch=12", "trainer.clip_norm=null"),
    "clipped": (*LLAMA, "trainer.global_batch=12", "trainer.clip_norm=0.1"),
    "uneven": (*LLAMA, "trainer.global_batch=11", "trainer.clip_norm=null"),
    "masked": (*LLAMA, "trainer.global_batch=12", "trainer.clip_norm=null", "data.masked=0.3"),
}
"""``all_at_once`` accumulates, clips, masks labels and leaves the last micro batch uneven."""

USUAL = ("all_at_once",)
CASES = [
    pytest.param(
        layout,
        batch,
        marks=marks(layout) + (() if batch in USUAL else (pytest.mark.exhaustive,)),
    )
    for layout in LAYOUTS
    for batch in BATCHES
]

Reference = Callable[[str], Folder]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Reference:
    """Returns the run of a batch on one device in one pass; each is trained once."""
    job = Job(tmp_path_factory.mktemp("alone"), shared_cache)
    kept: dict[str, Folder] = {}

    def reference(batch: str) -> Folder:
        if batch not in kept:
            kept[batch] = job.of(*SHAPE, *SGD, *BATCHES[batch], "trainer.micro_batch=12")
        return kept[batch]

    return reference


@pytest.mark.parametrize(("layout", "batch"), CASES)
def test_a_layout_takes_the_steps_of_one_device(
    layout: str, batch: str, alone: Reference, tmp_path: Path, shared_cache: Path
) -> None:
    parts = (*SHAPE, *SGD, *BATCHES[batch], *LAYOUTS[layout])
    ranks = compose([*parts, "trainer.micro_batch=12"]).parallelism.data_parallel_size
    micro_batch = 12 // ranks // (1 if batch == "one_pass" else 3)
    pieces = [f"parallelism.pipeline_micro_batches={micro_batch}"] * ("pipeline" in layout)
    run = Job(tmp_path, shared_cache).of(*parts, f"trainer.micro_batch={micro_batch}", *pieces)
    assert_equal(run, alone(batch))


def assert_equal(run: Folder, reference: Folder) -> None:
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert run.column(key) == pytest.approx(reference.column(key), rel=TOLERANCE), key
    for step in range(STEPS):
        assert_close(gradients(run, step), gradients(reference, step), f"gradients of step {step}")
    assert_close(run.weights(), reference.weights(), "weights")


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    """Within the tolerance of each tensor's largest number.

    A key's bias adds the same to all scores of a query, so that its gradient is zero but for
    rounding, and so is the bias, which starts at zero: both are measured against the others.
    """
    assert got.keys() == wanted.keys(), what
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    for name, tensor in wanted.items():
        rounding = name.endswith("key.bias")
        scale = largest if rounding else float(tensor.abs().max())
        torch.testing.assert_close(
            got[name],
            tensor,
            rtol=TOLERANCE,
            atol=TOLERANCE * scale,
            msg=lambda said, name=name: f"{what}: {name}: {said}",
        )


def gradients(run: Folder, step: int) -> dict[str, torch.Tensor]:
    """Returns what the ranks wrote of a step, together."""
    held: dict[str, torch.Tensor] = {}
    for file in sorted(run.path.glob(f"gradients-{step}-*.safetensors")):
        held |= load_file(file)
    return held
