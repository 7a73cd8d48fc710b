"""One step of a user's module with no memory behind its tensors, on a batch of its own loader."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.optimizer import _configure_optimizers
from torch import Tensor
from torch.utils._pytree import tree_map_only

from scalewise.config.registry import option_name
from scalewise.errors import ConfigError
from scalewise.measure.memory import MemoryProbe
from scalewise.objectives import UserModule
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.parallelism.single import SingleConfig
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ParallelStrategy
from scalewise.training import fake_distributed, fake_tensor_trace, import_class, user_module
from scalewise.training.fit import silence_lightning


def trace_user_module(run: RunConfig) -> dict[str, int]:
    """Returns the bytes that the probe measures of a step, by key, and ``rows`` of its batch.

    Replicas hold what a single device does, with gradients in buckets that outlive the step, or
    once more where these are copies.
    Raises ``ConfigError`` for a layout or a module that a trace cannot follow.
    """
    layout = run.parallelism
    if not isinstance(layout, MeshConfig | SingleConfig | DDPConfig):
        raise _trace_error(f"{option_name(layout)} works on real memory", "set parallelism=fsdp")
    views = isinstance(layout, DDPConfig) and layout.gradient_as_bucket_view
    copied = isinstance(layout, DDPConfig) and not views
    run = fake_tensor_trace.with_cpu_operators(
        replace(run, parallelism=SingleConfig()) if isinstance(layout, DDPConfig) else run
    )
    module, data = user_module.import_classes(run)
    objective = run.objective
    assert isinstance(objective, UserModule)
    with ExitStack() as around:
        around.enter_context(silence_lightning())
        around.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*reference is not registered.*")  # of self.log
        batch = _first_batch(run, module, data)
        around.enter_context(
            fake_distributed.fake_ranks(run.world_size, 0, fake_distributed.FakeStageChannel())
        )
        strategy = fake_tensor_trace.fake_strategy(run)  # a mesh computes with its ranks' numbers
        mode = around.enter_context(fake_distributed.fake_tensor_mode())
        made = import_class.construct("objective.arguments", module, objective.arguments)
        try:
            found = _trace_step(
                run, strategy, made, tree_map_only(Tensor, mode.from_tensor, batch), views=views
            )
        except ConfigError:
            raise
        except Exception as error:  # whatever foreign code does where there are no numbers
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise _trace_error(
                f"cannot follow a step of it: {said}", "train a few steps"
            ) from error
    found["memory/peak_bytes"] += copied * found["memory/gradients_bytes"]
    return {**found, "rows": user_module.batch_rows(batch)}


def _first_batch(
    run: RunConfig, module: type[LightningModule], data: type[LightningDataModule] | None
) -> Any:
    """Returns the first batch of its loader."""
    made_module, made_data = (
        user_module.build_user_module(run)
        if data is None
        else (None, user_module.build_user_module(run)[1])
    )
    source: Any = made_data or made_module
    source.prepare_data()
    source.setup("fit")
    return next(iter(source.train_dataloader()))


def _trace_step(
    run: RunConfig, strategy: ParallelStrategy, module: LightningModule, batch: Any, *, views: bool
) -> dict[str, int]:
    """Returns what a step holds, after a few that are not counted."""
    if not module.automatic_optimization:
        raise _trace_error("does not follow a module that steps by itself", "train a few steps")
    strategy.prepare_user_module(run, module)
    module.configure_model()
    strategy.model = module
    precision: Any = fake_tensor_trace.precision_plugin(run)
    precision.convert_module(module)
    configured: Any = module.configure_optimizers()
    (optimizer, *others), _, _ = _configure_optimizers(configured)
    if others:
        raise _trace_error("follows the steps of one optimizer", "train a few steps")

    def take(probe: MemoryProbe | None) -> None:
        """Takes a step as Lightning does."""
        if probe is not None:
            probe.start()
        with precision.forward_context():
            told: Any = module.training_step(precision.convert_input(batch), 0)
        loss = told["loss"] if isinstance(told, Mapping) else told
        optimizer.zero_grad(set_to_none=not views)  # as late as Lightning does
        if probe is not None:
            probe.before_backward()
        loss.backward()
        if probe is not None:
            probe.before_optimizer()
        strategy.clip_grad_norm(module, run.trainer.clip_norm)
        optimizer.step()

    for _ in range(fake_tensor_trace.WARM_STEPS):
        take(None)
    averages = fake_tensor_trace.averages_of(run, module)
    probe = MemoryProbe(
        module, optimizer, strategy.root_device, strategy.strategy_buffers(), averages=averages
    )
    take(probe)
    return probe.finish()


def _trace_error(reason: str, fix: str) -> ConfigError:
    return ConfigError.for_key("plan.method", "trace", reason, fix)
