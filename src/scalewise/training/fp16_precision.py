"""Precision plugin of fp16 with gradient scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer

from scalewise.compat.lightning import handles_unscaling


class FP16Precision(MixedPrecision):
    """Lightning's fp16 precision, whose gradients are unscaled before they are clipped.

    Lightning leaves it to a fused optimizer to unscale the gradients, which is after their norm
    was measured and clipped. Its kernel then only skips steps with infinite gradients.

    Args:
        device: Type of the device, such as ``cuda``.
    """

    def __init__(self, device: str) -> None:
        super().__init__("16-mixed", device)

    def optimizer_step(  # type: ignore[override]  # as in Lightning
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, unscale the gradients, clip them and step."""

        def unscaling_closure() -> Any:
            result = closure()
            skips_step = result is None and model.automatic_optimization
            if handles_unscaling(optimizer) and not skips_step:
                assert self.scaler is not None
                self.scaler.unscale_(optimizer)
            return result

        return super().optimizer_step(optimizer, model, unscaling_closure, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip gradients, also those of fused optimizers, which Lightning rejects."""
        Precision.clip_gradients(self, optimizer, *args, **kwargs)
