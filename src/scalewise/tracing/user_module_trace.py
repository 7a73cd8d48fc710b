"""Trace of a training step of a user-defined module on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from scalewise.compat.lightning import configure_optimizers
from scalewise.compat.torch import tree_map_only
from scalewise.errors import ConfigError
from scalewise.measure.memory import MemoryProbe
from scalewise.objectives import UserModule
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.parallelism.single import SingleConfig
from scalewise.registry import option_name
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ParallelStrategy
from scalewise.tracing.fake_tensors import FakeStageChannel, precision_plugin
from scalewise.tracing.step_trace import with_cpu_operators
from scalewise.tracing.training_step import fake_training, measure_step
from scalewise.training import import_class, user_module
from scalewise.training.trainer import silence_lightning


def trace_user_module(run: RunConfig) -> dict[str, int]:
    """Memory of a training step, measured on fake tensors with a batch of its dataloader.

    A DDP replica is traced as a single device. Its gradients stay allocated between steps if they
    are views of the buckets, and are counted twice otherwise.

    Returns:
        Bytes by metric key, and the batch size as ``rows``.

    Raises:
        ConfigError: the parallelism strategy or the module cannot be traced.
    """
    parallelism = run.parallelism
    if not isinstance(parallelism, MeshConfig | SingleConfig | DDPConfig):
        raise _trace_error(
            f"{option_name(parallelism)} requires real memory", "set parallelism=fsdp"
        )
    is_ddp = isinstance(parallelism, DDPConfig)
    bucket_views = isinstance(parallelism, DDPConfig) and parallelism.gradient_as_bucket_view
    run = with_cpu_operators(replace(run, parallelism=SingleConfig()) if is_ddp else run)
    module, data = import_class.import_user_classes(run)
    objective = run.objective
    assert isinstance(objective, UserModule)
    with silence_lightning(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*reference is not registered.*")  # of self.log
        batch = _first_batch(run, module, data)
        with fake_training(run, 0, FakeStageChannel()) as (strategy, mode):
            fake_module = import_class.construct("objective.arguments", module, objective.arguments)
            fake_batch = tree_map_only(Tensor, mode.from_tensor, batch)
            try:
                probe_metrics = _trace_step(
                    run, strategy, fake_module, fake_batch, bucket_views=bucket_views
                )
            except ConfigError:
                raise
            except Exception as error:  # user code that reads tensor data can raise anything
                message = " ".join(str(error).split())[:200] or type(error).__name__
                raise _trace_error(
                    f"cannot trace a training step: {message}", "train a few steps"
                ) from error
    if is_ddp and not bucket_views:
        probe_metrics["memory/peak_bytes"] += probe_metrics["memory/gradients_bytes"]
    return {**probe_metrics, "rows": user_module.batch_size(batch)}


def _first_batch(
    run: RunConfig, module: type[LightningModule], data: type[LightningDataModule] | None
) -> Any:
    """First batch of the training loader, of the data module or else of the module."""
    instance, data_instance = user_module.build_user_module(run)
    source: Any = instance if data is None else data_instance
    source.prepare_data()
    source.setup("fit")
    return next(iter(source.train_dataloader()))


def _trace_step(
    run: RunConfig,
    strategy: ParallelStrategy,
    module: LightningModule,
    batch: Any,
    *,
    bucket_views: bool,
) -> dict[str, int]:
    """Measure the memory of a step after the warm-up steps, in bytes by metric key."""
    if not module.automatic_optimization:
        raise _trace_error("requires a module with automatic optimization", "train a few steps")
    strategy.prepare_user_module(run, module)
    module.configure_model()
    strategy.model = module
    precision: Any = precision_plugin(run.precision.lightning_precision(), run.hardware.device)
    precision.convert_module(module)
    configured: Any = module.configure_optimizers()
    (optimizer, *others), _, _ = configure_optimizers(configured)
    if others:
        raise _trace_error("requires a module with one optimizer", "train a few steps")

    def take_step(probe: MemoryProbe | None) -> None:
        """Take an optimizer step in the order of Lightning."""
        if probe is not None:
            probe.start()
        with precision.forward_context():
            output: Any = module.training_step(precision.convert_input(batch), 0)
        loss = output["loss"] if isinstance(output, Mapping) else output
        optimizer.zero_grad(set_to_none=not bucket_views)  # after the forward pass, as Lightning
        if probe is not None:
            probe.before_backward()
        loss.backward()
        if probe is not None:
            probe.before_optimizer()
        strategy.clip_grad_norm([*module.parameters()], run.trainer.clip_norm)
        optimizer.step()

    _, metrics = measure_step(run, strategy, module, optimizer, take_step)
    return metrics


def _trace_error(reason: str, fix: str) -> ConfigError:
    return ConfigError.for_key("plan.method", "trace", reason, fix)
