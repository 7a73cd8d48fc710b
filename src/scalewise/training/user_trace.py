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

from scalewise.errors import ConfigError
from scalewise.layouts.base import Layout
from scalewise.measure.memory import MemoryProbe
from scalewise.objectives import UserModule
from scalewise.parallelism.ddp import DDP
from scalewise.parallelism.mesh import Mesh
from scalewise.parallelism.single import Single
from scalewise.run import Run
from scalewise.training import fake, targets, trace, user
from scalewise.training.fit import lightning_quiet


def traced(run: Run) -> dict[str, int]:
    """Returns the bytes that the probe measures of a step, by key, and ``rows`` of its batch.

    Replicas hold what a single device does, with gradients in buckets that outlive the step, or
    once more where these are copies.
    Raises ``ConfigError`` for a layout or a module that a trace cannot follow.
    """
    layout = run.parallelism
    if not isinstance(layout, Mesh | Single | DDP):
        raise _refused(f"{type(layout).__name__} works on real memory", "set parallelism=fsdp")
    views = isinstance(layout, DDP) and layout.gradient_as_bucket_view
    copied = isinstance(layout, DDP) and not views
    run = trace.on_cpu(replace(run, parallelism=Single()) if isinstance(layout, DDP) else run)
    module, data = user.classes(run)
    objective = run.objective
    assert isinstance(objective, UserModule)
    with ExitStack() as around:
        around.enter_context(lightning_quiet())
        around.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*reference is not registered.*")  # of self.log
        batch = _batch(run, module, data)
        around.enter_context(fake.ranks(run.world_size, 0, fake.Wire()))
        strategy = trace.layout_of(run)  # a mesh computes with its ranks' numbers
        mode = around.enter_context(fake.tensors())
        made = targets.made("objective.arguments", module, objective.arguments)
        try:
            found = _step(
                run, strategy, made, tree_map_only(Tensor, mode.from_tensor, batch), views=views
            )
        except ConfigError:
            raise
        except Exception as error:  # whatever foreign code does where there are no numbers
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise _refused(f"cannot follow a step of it: {said}", "train a few steps") from error
    found["memory/peak_bytes"] += copied * found["memory/gradients_bytes"]
    return {**found, "rows": user.rows(batch)}


def _batch(run: Run, module: type[LightningModule], data: type[LightningDataModule] | None) -> Any:
    """Returns the first batch of its loader."""
    made_module, made_data = user.built(run) if data is None else (None, user.built(run)[1])
    source: Any = made_data or made_module
    source.prepare_data()
    source.setup("fit")
    return next(iter(source.train_dataloader()))


def _step(
    run: Run, layout: Layout, module: LightningModule, batch: Any, *, views: bool
) -> dict[str, int]:
    """Returns what a step holds, after a few that are not counted."""
    if not module.automatic_optimization:
        raise _refused("does not follow a module that steps by itself", "train a few steps")
    layout.adopt(run, module)
    module.configure_model()
    layout.model = module
    precision: Any = trace.precision_of(run)
    precision.convert_module(module)
    configured: Any = module.configure_optimizers()
    (optimizer, *others), _, _ = _configure_optimizers(configured)
    if others:
        raise _refused("follows the steps of one optimizer", "train a few steps")

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
        layout.clip(module, run.trainer.clip_norm)
        optimizer.step()

    for _ in range(trace.WARM_STEPS):
        take(None)
    averages = trace.averages_of(run, module)
    probe = MemoryProbe(module, optimizer, layout.root_device, layout.holdings(), averages=averages)
    take(probe)
    return probe.finish()


def _refused(reason: str, cure: str) -> ConfigError:
    return ConfigError.one("plan.method", "trace", reason, cure)
