"""The loss guard ends a run whose loss is not finite or has diverged."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalewise.training.callbacks.loss_guard import LossGuard, TrainingDiverged


def feed(guard: LossGuard, losses: list[float], first: int = 1) -> None:
    for step, loss in enumerate(losses, start=first):
        trainer: Any = SimpleNamespace(global_step=step, accumulate_grad_batches=1)
        module: Any = SimpleNamespace()
        guard.on_train_batch_end(trainer, module, {"loss": torch.tensor(loss)}, None, step - 1)


def test_loss_guard_leaves_out_skipped_steps() -> None:
    """Two micro-batches per step; the second step is skipped."""
    guard = LossGuard(every=1, patience=1)
    trainer: Any = SimpleNamespace(accumulate_grad_batches=2)
    module: Any = SimpleNamespace(spikes=SimpleNamespace(num_skipped=3))
    guard.on_train_start(trainer, module)  # resumes after three skipped steps
    for index, loss in enumerate([2.0, 2.0, 9.0, float("nan"), 2.0, 2.0]):
        module.spikes.num_skipped += index == 3
        guard.on_train_batch_end(trainer, module, {"loss": torch.tensor(loss)}, None, index)
    guard.on_train_batch_end(trainer, module, {"loss": torch.tensor(float("nan"))}, None, 6)
    with pytest.raises(TrainingDiverged, match="the loss is nan at step 4"):
        guard.on_train_batch_end(trainer, module, {"loss": torch.tensor(2.0)}, None, 7)


def end(guard: LossGuard) -> None:
    guard.on_train_end(SimpleNamespace(), SimpleNamespace())


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("before", [0, 4])
def test_loss_guard_ends_a_run_with_nan_loss(loss: float, before: int) -> None:
    guard = LossGuard(every=1)
    feed(guard, [2.0] * before)
    with pytest.raises(TrainingDiverged, match=rf"the loss is {loss} at step {before + 1}; lower"):
        feed(guard, [loss], before + 1)


def test_loss_guard_checks_within_its_interval() -> None:
    guard = LossGuard(every=5)
    feed(guard, [1.0, float("nan"), 1.0, 1.0])
    with pytest.raises(TrainingDiverged, match="step 2"):
        feed(guard, [1.0], 5)


@pytest.mark.parametrize("hook", ["on_train_end", "on_save_checkpoint"])
def test_loss_guard_checks_before_a_checkpoint(hook: str) -> None:
    guard = LossGuard(every=100)
    feed(guard, [float("nan")])
    arguments = [SimpleNamespace()] * 2 + ([{}] if hook == "on_save_checkpoint" else [])
    with pytest.raises(TrainingDiverged, match="step 1"):
        getattr(guard, hook)(*arguments)


def test_loss_guard_ends_a_run_after_repeated_spikes() -> None:
    guard = LossGuard(factor=3, patience=3, every=1)
    feed(guard, [2.0, 2.0, 7.0, 7.0])
    with pytest.raises(
        TrainingDiverged, match=r"is 7 at step 5, 3\.5 times its running mean, and a spike in 3"
    ):
        feed(guard, [7.0], 5)


@pytest.mark.parametrize(
    "losses",
    [
        [2.0, 7.0, 7.0, 2.0] * 5,
        [2.0, 5.9, 5.9, 5.9],
        [10.0, 5.0, 2.0, 1.0, 0.5],
        [1.0 * 1.2**step for step in range(30)],
        [1.0, 0.01] + [0.0001] * 40 + [0.09] * 5,
        [],
    ],
)
def test_loss_guard_ignores_a_slow_rise(losses: list[float]) -> None:
    guard = LossGuard(factor=3, patience=3, every=4)
    feed(guard, losses)
    end(guard)


@pytest.mark.parametrize(
    "arguments",
    [{"factor": 1}, {"factor": float("nan")}, {"patience": 0}, {"every": 0}, {"floor": -1}],
)
def test_loss_guard_rejects_invalid_settings(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LossGuard(**arguments)
