"""Trainer that skips empty hooks: the same calls, in the same order, as Lightning's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fixtures.quiet_trainer import QUIET_TRAINER
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer import call
from torch import Tensor, nn
from torch.utils.data import DataLoader

from scalewise.compat import lightning_hooks
from scalewise.compat.lightning_hooks import EMPTY_HOOKS

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*LeafSpec:FutureWarning",  # Lightning with torch 2.13
)
Calls = list[tuple[Any, ...]]


class Recorder(Callback):
    """Overrides every hook of a step, and logs in one."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.calls, self.name = calls, name

    def note(self, hook: str, module: LightningModule, *args: Any) -> None:
        shapes = tuple(x.shape if isinstance(x, Tensor) else type(x).__name__ for x in args)
        self.calls.append((self.name, hook, module._current_fx_name, shapes))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.note("on_train_start", pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.note("on_train_batch_start", pl_module, batch, batch_idx)

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        self.note("on_before_zero_grad", pl_module, optimizer)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self.note("on_before_backward", pl_module, loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.note("on_after_backward", pl_module)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        self.note("on_before_optimizer_step", pl_module, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note("on_train_batch_end", pl_module, outputs, batch, batch_idx)
        pl_module.log(f"{self.name}_step", float(batch_idx), on_step=True, on_epoch=True)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.note("on_validation_batch_end", args[1], *args[2:])


@dataclass
class EqualCallback(Callback):
    """Callback whose instances are all equal; it overrides one hook."""

    calls: Calls

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.calls.append(("equal", self is cast(Any, trainer).callbacks[2]))


class AddedLater(Callback):
    """Adds a hook to itself, and a callback to the trainer, while training runs."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            vars(self)["on_after_backward"] = lambda *_: self.calls.append(("added hook",))
            cast(Any, trainer).callbacks.append(Recorder(self.calls, "added"))


class Module(LightningModule):
    """One linear layer, with some hooks of its own."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(1, 1), calls

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", loss := self.layer(batch).sum(), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).sum())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.calls.append(("module", "on_train_batch_start", self._current_fx_name, batch_idx))
        return -1 if batch_idx == 5 else None  # ends the epoch

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(("module", "on_before_optimizer_step", self._current_fx_name))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append(("module", "lr_scheduler_step", self._current_fx_name))
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class RecordingStrategy(SingleDeviceStrategy):
    """Overrides a hook of a step."""

    calls: Calls

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(("strategy", "on_train_batch_start", batch_idx))


def fit(
    kind: type[Trainer], folder: Path, **settings: Any
) -> tuple[Calls, dict[str, float], Trainer]:
    """Calls of hooks, logged metrics and the trainer of a short training."""
    torch.manual_seed(1)
    calls: Calls = []
    strategy = RecordingStrategy(torch.device("cpu"))
    strategy.calls = calls
    trainer = kind(
        **QUIET_TRAINER,
        strategy=strategy,
        max_epochs=2,
        accumulate_grad_batches=2,
        val_check_interval=2,
        default_root_dir=folder,
        callbacks=[
            Recorder(calls, "first"),
            EqualCallback(calls),
            EqualCallback(calls),
            LambdaCallback(on_before_backward=lambda *_: calls.append(("lambda",))),
            AddedLater(calls),
            Callback(),
        ],
        **settings,
    )
    data = DataLoader(torch.arange(6.0).view(6, 1, 1), batch_size=None)
    trainer.fit(Module(calls), data, data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return calls, metrics, trainer


def test_hooks_and_logged_metrics_equal_those_of_lightning(tmp_path: Path) -> None:
    expected_calls, expected_metrics, _ = fit(Trainer, tmp_path)
    calls, metrics, _ = fit(lightning_hooks.StepHookTrainer, tmp_path)
    assert {name for name, *_ in expected_calls} == {
        *("first", "equal", "lambda", "added hook", "added", "module", "strategy")
    }
    assert calls == expected_calls
    assert metrics == expected_metrics
    assert len(metrics) >= 6


def test_profiler_records_every_hook(tmp_path: Path) -> None:
    records = []
    for kind in (Trainer, lightning_hooks.StepHookTrainer):
        profiler = SimpleProfiler()
        calls, _, _ = fit(kind, tmp_path, profiler=profiler)
        durations = profiler.recorded_durations
        records.append((calls, {name: len(seconds) for name, seconds in durations.items()}))
    assert records[1] == records[0]
    assert any("Callback.on_after_backward" in name for name in records[1][1])


def test_empty_hooks_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of an empty hook that would be noticed: the base class itself is replaced."""
    calls: Calls = []
    for owner in (Callback, LightningModule):
        monkeypatch.setattr(owner, "on_after_backward", lambda *_: calls.append(("empty",)))
    fit(lightning_hooks.StepHookTrainer, tmp_path)
    assert calls == []
    fit(Trainer, tmp_path)
    assert calls


def test_debug_log_names_every_hook(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=lightning_hooks.MODULE):
        fit(lightning_hooks.StepHookTrainer, tmp_path)
    assert "StepHookTrainer: calling strategy hook: backward" in caplog.text


@pytest.mark.parametrize("fails", [True, False])
def test_functions_of_lightning_are_restored(fails: bool, tmp_path: Path) -> None:
    before = dict(vars(call))

    class Failing(Module):
        def on_after_backward(self) -> None:
            assert vars(call) != before
            if fails:
                raise RuntimeError("stop")

    trainer = lightning_hooks.StepHookTrainer(
        **QUIET_TRAINER, max_steps=1, default_root_dir=tmp_path
    )
    data = DataLoader(torch.ones(1, 1, 1), batch_size=None)
    if fails:
        with pytest.raises(RuntimeError, match="stop"):
            trainer.fit(Failing([]), data)
    else:
        trainer.fit(Failing([]), data)
    assert dict(vars(call)) == before


@pytest.mark.parametrize("name", sorted(EMPTY_HOOKS))
def test_hooks_of_lightning_are_empty(name: str) -> None:
    def empty() -> None:
        """Documentation."""

    for owner in (Callback, LightningModule, Strategy):
        if function := getattr(owner, name, None):
            assert function.__code__.co_code == empty.__code__.co_code, owner
