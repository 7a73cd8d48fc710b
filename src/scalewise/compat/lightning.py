"""Private names of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    Strategy,
)
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader

from scalewise.compat import PrivateNames

__all__ = [
    "call_through_wrapper",
    "configure_optimizers",
    "data_fetcher",
    "ddp_arguments",
    "disable_signal_broadcast",
    "handles_unscaling",
    "init_model_parallel",
    "init_optimizers",
    "replace_loader_preparation",
    "replace_step_boundaries",
    "set_node_environment",
    "skip_process_group",
]

private = PrivateNames("lightning")

with private:
    from lightning.pytorch.core.optimizer import _configure_optimizers as configure_optimizers

    """Optimizers and schedules of what a module returns; the public API sets them in a trainer."""

with private:
    from lightning.fabric.plugins.precision.amp import (
        _optimizer_handles_unscaling as handles_unscaling,
    )

    """Whether the kernel of an optimizer unscales fp16 gradients; torch's attribute is private."""

if not TYPE_CHECKING:
    __getattr__ = private.missing_name


@private.reads("_ddp_kwargs")
def ddp_arguments(strategy: DDPStrategy) -> dict[str, Any]:
    """Arguments of the DDP module; the public API sets them only."""
    return strategy._ddp_kwargs


def call_through_wrapper(strategy: Strategy, method: Callable[..., Any], *args: Any) -> Any:
    """Call a method of the Lightning module through the strategy's wrapper, such as DDP's.

    The public API does so for the training, validation, test and prediction step only.
    """
    return _redirection(strategy)(strategy.model, strategy.lightning_module, method.__name__, *args)


@private.reads("_forward_redirection")
def _redirection(strategy: Strategy) -> Callable[..., Any]:
    return strategy._forward_redirection


@private.reads("_setup_distributed")
def init_model_parallel(strategy: ModelParallelStrategy) -> None:
    """Initialize the process group; the public method also builds a mesh of two axes."""
    strategy._setup_distributed()


def skip_process_group(strategy: ModelParallelStrategy) -> None:
    """Let ``setup_environment`` build the mesh only; it has no option for an existing group."""
    private.replace_attribute(strategy, "_setup_distributed", lambda: None)


@private.reads("_set_node_environment_variables")
def set_node_environment(strategy: DeepSpeedStrategy) -> None:
    """Set the variables that DeepSpeed reads; the public method also starts DeepSpeed."""
    strategy._set_node_environment_variables()


@private.reads("_init_optimizers")
def init_optimizers(strategy: DeepSpeedStrategy) -> tuple[Any, Any]:
    """Optimizer and schedule of the module; the public method also builds DeepSpeed's engine."""
    return strategy._init_optimizers()


def disable_signal_broadcast(trainer: Trainer) -> None:
    """Omit the broadcast of received signals before each micro-batch, which has no option."""
    private.replace_attribute(
        trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None
    )


@private.reads("_accumulated_batches_reached", "_should_check_val_fx")
def replace_step_boundaries(
    trainer: Trainer, is_step_end: Callable[[int], bool], is_validated: Callable[[int], bool]
) -> None:
    """Let the number of accumulated micro-batches differ between steps; its option is a constant.

    Args:
        trainer: Trainer before it fits.
        is_step_end: Whether a step ends after a number of micro-batches of the run.
        is_validated: Whether a validation follows a number of micro-batches of the run.
    """
    loop = trainer.fit_loop.epoch_loop
    should_validate = loop._should_check_val_fx

    def accumulated_batches_reached() -> bool:
        return is_step_end(loop.batch_progress.current.ready)

    def should_check_val_fx(data_fetcher: Any) -> bool:
        # Lightning validates after each multiple of this number of micro-batches.
        number = loop.total_batch_idx + 1
        trainer.val_check_batch = number if is_validated(number) else number + 1
        return should_validate(data_fetcher)

    private.replace_attribute(loop, "_accumulated_batches_reached", accumulated_batches_reached)
    private.replace_attribute(loop, "_should_check_val_fx", should_check_val_fx)


@private.reads("_data_fetcher")
def data_fetcher(trainer: Trainer) -> Any:
    """Iterator of the training batches; the public API offers none during an epoch."""
    return trainer.fit_loop._data_fetcher


@private.reads("_data_connector", "_prepare_dataloader", "_requires_distributed_sampler")
def replace_loader_preparation(
    trainer: Trainer,
    build_sampler: Callable[[DataLoader[Any]], Any],
    prepare: Callable[[Any, bool], Any],
) -> None:
    """Let a trainer prepare data loaders otherwise; its option only disables sharding.

    Args:
        trainer: Trainer before its loaders are prepared.
        build_sampler: Sampler for a loader that is sharded.
        prepare: Function of a loader prepared by Lightning, and of whether it is for validation.
    """
    connector: Any = trainer._data_connector
    is_sharded, lightning_prepare = (
        connector._requires_distributed_sampler,
        connector._prepare_dataloader,
    )

    def resolve_sampler(loader: DataLoader[Any], shuffle: bool, mode: object = None) -> Any:
        return build_sampler(loader) if is_sharded(loader) else loader.sampler

    def prepare_dataloader(loader: Any, shuffle: bool, mode: Any) -> Any:
        loader = lightning_prepare(loader, shuffle, mode)
        return prepare(loader, mode is not RunningStage.TRAINING)

    private.replace_attribute(connector, "_resolve_sampler", resolve_sampler)
    private.replace_attribute(connector, "_prepare_dataloader", prepare_dataloader)
