"""Trainer that skips empty hooks in training steps.

Lightning calls every hook of all callbacks, of the module and of the strategy, each in a context of
the profiler. Its public API has no option to skip those that nothing overrides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage

from scalewise.compat import PrivateNames

__all__ = ["StepHookTrainer"]

MODULE = "lightning.pytorch.trainer.call"
"""Module of Lightning whose functions call hooks."""
SIGNATURE_CHECK = "lightning.pytorch.loops.training_epoch_loop:is_param_in_hook_signature"
"""Function that inspects the signature of ``training_step``, at each step."""
EMPTY_HOOKS = frozenset(
    {
        "on_train_batch_start",
        "on_train_batch_end",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_before_backward",
        "on_after_backward",
        "on_before_zero_grad",
        "on_before_optimizer_step",
    }
)
"""Hooks of steps that do nothing in Lightning's base classes."""
CURRENT_HOOK = "_current_fx_name"
"""Attribute of a module with the name of the running hook, which ``self.log`` reads."""

private = PrivateNames("lightning")


class StepHookTrainer(Trainer):
    """Lightning Trainer that skips empty hooks in training steps, unless it has a profiler.

    The other hooks have the order, arguments and results of Lightning.
    """

    # Lightning compares the texts of the stages, 13 times a step.
    training = vars(Trainer)["training"].getter(
        lambda trainer: trainer.state.stage is RunningStage.TRAINING
    )

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Fit a module; the arguments are those of Lightning."""
        profiler: Profiler = self.profiler  # type: ignore[attr-defined]  # a connector sets it
        is_logged = logging.getLogger(MODULE).isEnabledFor(logging.DEBUG)
        with ExitStack() as stack:
            if type(profiler) is PassThroughProfiler and not is_logged:
                stack.enter_context(_skip_empty_hooks(self))
            super().fit(*args, **kwargs)


@contextmanager
def _skip_empty_hooks(trainer: Trainer) -> Iterator[None]:
    """Context in which a trainer calls hooks without the profiler, and skips empty ones."""
    names = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
    call_callbacks, call_module, call_strategy = (private.get(f"{MODULE}:{it}") for it in names)
    strategy: Any = trainer.strategy

    def call_callback_hooks(caller: Trainer, name: str, *args: Any, **kwargs: Any) -> None:
        if caller is not trainer or name not in EMPTY_HOOKS:
            call_callbacks(caller, name, *args, **kwargs)
            return
        module = strategy.lightning_module
        attributes = vars(module)  # Module.__setattr__ takes longer
        previous, attributes[CURRENT_HOOK] = attributes[CURRENT_HOOK], name
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        for callback in callbacks:
            if name in vars(callback) or _overrides(type(callback), name):
                hook = getattr(callback, name)
                if callable(hook):
                    hook(trainer, module, *args, **kwargs)
        attributes[CURRENT_HOOK] = previous

    def call_module_hook(
        caller: Trainer, name: str, *args: Any, pl_module: Any = None, **kwargs: Any
    ) -> Any:
        if caller is not trainer:
            return call_module(caller, name, *args, pl_module=pl_module, **kwargs)
        module = pl_module or strategy.lightning_module
        return _call_hook(module, module, name, *args, **kwargs)

    def call_strategy_hook(caller: Trainer, name: str, *args: Any, **kwargs: Any) -> Any:
        if caller is not trainer:
            return call_strategy(caller, name, *args, **kwargs)
        return _call_hook(strategy, strategy.lightning_module, name, *args, **kwargs)

    replacements = (call_callback_hooks, call_module_hook, call_strategy_hook)
    with ExitStack() as stack:
        for name, function in zip(names, replacements, strict=True):
            stack.enter_context(private.replaced(f"{MODULE}:{name}", function))
        cached_check = cache(private.get(SIGNATURE_CHECK))
        stack.enter_context(private.replaced(SIGNATURE_CHECK, cached_check))
        yield


def _call_hook(owner: Any, module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the module or the strategy, unless it is empty."""
    if name in EMPTY_HOOKS and name not in vars(owner) and not _overrides(type(owner), name):
        return None
    hook, attributes = getattr(owner, name), vars(module)
    if not callable(hook):
        return None
    previous, attributes[CURRENT_HOOK] = attributes[CURRENT_HOOK], name
    result = hook(*args, **kwargs)
    attributes[CURRENT_HOOK] = previous
    return result


def _compare_hooks(kind: type, name: str) -> bool:
    """Whether a class of a callback, module or strategy overrides a hook of Lightning."""
    bases = [base for base in (Callback, LightningModule, Strategy) if issubclass(kind, base)]
    return not any(getattr(kind, name) is getattr(base, name, None) for base in bases)


_overrides: Callable[[type, str], bool] = cache(_compare_hooks)
