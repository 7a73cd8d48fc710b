"""Conversion of linear layers to fp8, dispatched on the precision config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalewise.hardware import DeviceKind
from scalewise.lazy_dispatch import lazy_dispatch
from scalewise.models.base import ModelConfig
from scalewise.precision.config import Precision

if TYPE_CHECKING:
    from scalewise.models.base_module import ModelModule


@lazy_dispatch
def apply_precision(
    config: Precision, module: ModelModule, model: ModelConfig, device: DeviceKind
) -> None:
    """Replace layers by fp8 layers, in place: none."""
