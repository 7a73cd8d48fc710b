"""Private names of Lightning: presence, signature and relied-on behaviour."""

from inspect import getsource, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.quiet_trainer import QUIET_TRAINER
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from scalewise.compat import IncompatibleLibraryError, lightning

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*LeafSpec:FutureWarning",  # Lightning with torch 2.13
)


class Module(LightningModule):
    """One linear layer that records its hooks and batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((batch.flatten().tolist(), lightning.data_fetcher(self.trainer).fetched))
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch.flatten().tolist())

    def double(self, value: int) -> int:
        return 2 * value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build_trainer(folder: Path, **settings: Any) -> Trainer:
    return Trainer(
        **QUIET_TRAINER,
        devices=1,
        max_epochs=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        plugins=[LightningEnvironment()],
        **settings,
    )


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(count)).view(-1, 1), batch_size=1)  # type: ignore[arg-type]


def test_ddp_arguments_are_passed_to_the_ddp_module() -> None:
    strategy = DDPStrategy(static_graph=True, bucket_cap_mb=3)
    assert lightning.ddp_arguments(strategy) == {"static_graph": True, "bucket_cap_mb": 3}
    assert "**self._ddp_kwargs" in getsource(DDPStrategy._setup_model)


def test_call_through_wrapper_calls_a_method_inside_of_forward() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module, self.calls = module, 0

        def forward(self, *args: Any) -> Any:
            self.calls += 1
            return self.module(*args)

    strategy, module = SingleDeviceStrategy(), Module()
    strategy.model, strategy._lightning_module = Wrapper(module), module
    assert lightning.call_through_wrapper(strategy, module.double, 4) == 8
    assert strategy.model.calls == 1


def test_model_parallel_initializes_before_it_builds_a_mesh() -> None:
    assert [*signature(ModelParallelStrategy._setup_distributed).parameters] == ["self"]
    source = getsource(ModelParallelStrategy.setup_environment)
    assert source.index("self._setup_distributed()") < source.index("self._device_mesh")
    with pytest.raises(IncompatibleLibraryError, match="_setup_distributed"):
        lightning.init_model_parallel(object())  # type: ignore[arg-type]


def test_node_environment_is_what_deepspeed_reads() -> None:
    source = getsource(DeepSpeedStrategy._set_node_environment_variables)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        assert f'"{name}"' in source, name
    with pytest.raises(IncompatibleLibraryError, match="_set_node_environment_variables"):
        lightning.set_node_environment(object())  # type: ignore[arg-type]


def test_init_optimizers_returns_an_optimizer_and_a_schedule() -> None:
    assert [*signature(DeepSpeedStrategy._init_optimizers).parameters] == ["self"]
    source = getsource(DeepSpeedStrategy._init_optimizers)
    assert "_init_optimizers_and_lr_schedulers(self.lightning_module)" in source
    assert "return optimizers[0], lr_schedulers[0] if lr_schedulers else None" in source
    with pytest.raises(IncompatibleLibraryError, match="_init_optimizers"):
        lightning.init_optimizers(object())  # type: ignore[arg-type]


def test_disabled_signal_broadcast_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", calls.append)
    trainer = build_trainer(tmp_path)
    lightning.disable_signal_broadcast(trainer)
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert calls == []
    assert "self._broadcast_sigterm_tensor()" in getsource(_TrainingEpochLoop.advance)


def test_steps_end_after_any_number_of_batches(tmp_path: Path) -> None:
    steps: list[int] = []
    record = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: steps.append(trainer.global_step)
    )
    trainer = build_trainer(
        tmp_path, callbacks=[record], val_check_interval=9, check_val_every_n_epoch=None
    )
    lightning.replace_step_boundaries(trainer, {1, 4, 6}.__contains__, lambda _: False)
    trainer.fit(Module(), loader(6))
    assert steps == [1, 1, 1, 2, 2, 3]
    source = getsource(_TrainingEpochLoop)
    assert "self._accumulated_batches_reached()" in source
    assert "self._should_check_val_fx(" in source
    assert "% self.trainer.val_check_batch == 0" in source
    incompatible: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=object()))
    with pytest.raises(IncompatibleLibraryError, match="_should_check_val_fx"):
        lightning.replace_step_boundaries(incompatible, bool, bool)


def test_data_fetcher_counts_the_batches_it_has_read(tmp_path: Path) -> None:
    module = Module()
    build_trainer(tmp_path).fit(module, loader(3))
    assert [batch for batch, _ in module.seen] == [[0.0], [1.0], [2.0]]
    batch_counts = [count for _, count in module.seen]
    assert batch_counts == sorted(batch_counts)
    assert batch_counts[-1] == 3


def test_loaders_are_prepared_by_the_functions_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reversed(Sampler[int]):
        def __init__(self, source: Any) -> None:
            self.source = source

        def __iter__(self) -> Any:
            return reversed([*self.source])

        def __len__(self) -> int:
            return len(self.source)

    prepare_calls: list[tuple[type, bool]] = []

    def prepare(prepared_loader: Any, is_validation: bool) -> Any:
        prepare_calls.append((type(prepared_loader.sampler), is_validation))
        return prepared_loader

    monkeypatch.setattr(_DataConnector, "_requires_distributed_sampler", lambda *_: True)
    module, trainer = Module(), build_trainer(tmp_path)
    lightning.replace_loader_preparation(trainer, lambda it: Reversed(it.sampler), prepare)
    trainer.fit(module, loader(3), loader(2))
    batches = [entry[0] if isinstance(entry, tuple) else entry for entry in module.seen]
    assert batches == [[2.0], [1.0], [0.0], [1.0], [0.0]]
    assert sorted(prepare_calls, key=str) == sorted([(Reversed, False), (Reversed, True)], key=str)


def test_loaders_that_are_not_sharded_keep_their_sampler(tmp_path: Path) -> None:
    module, trainer = Module(), build_trainer(tmp_path)
    samplers: list[type] = []

    def prepare(prepared_loader: Any, _: bool) -> Any:
        samplers.append(type(prepared_loader.sampler))
        return prepared_loader

    lightning.replace_loader_preparation(trainer, lambda _: pytest.fail("sharded"), prepare)
    trainer.fit(module, loader(2))
    assert samplers == [SequentialSampler]


def test_configure_optimizers_separates_optimizers_and_schedules() -> None:
    optimizer = Module().configure_optimizers()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizers, schedules, monitor = lightning.configure_optimizers(([optimizer], [schedule]))  # type: ignore[arg-type]
    assert (optimizers, monitor) == ([optimizer], None)
    assert len(schedules) == 1
    assert lightning.configure_optimizers(optimizer) == ([optimizer], [], None)


def test_skipped_process_group_is_not_initialized() -> None:
    strategy = ModelParallelStrategy()
    lightning.skip_process_group(strategy)
    lightning.init_model_parallel(strategy)
    assert not torch.distributed.is_initialized()


def test_fused_optimizers_unscale_gradients_themselves() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    assert lightning.handles_unscaling(torch.optim.AdamW(parameters, fused=True))
    assert not lightning.handles_unscaling(torch.optim.AdamW(parameters))
