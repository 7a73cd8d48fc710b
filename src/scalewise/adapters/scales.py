"""Vectors that scale what frozen layers compute, as specs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scalewise.adapters import layers
from scalewise.adapters.spec import Adapter
from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.models.base import Model, Split, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.module import ModelModule


@option("adapter", "ia3")
@dataclass(frozen=True)
class IA3(Adapter):
    """A learnt scale for each feature of a layer, W being frozen (Liu et al., 2022), by PEFT.

    Of layers that end a sublayer, the inputs are scaled: ``W (l * x)``; of others, the outputs:
    ``l * (W x + b)``. All begin at one, and none decays.
    """

    targets: tuple[str, ...] = (layers.AUTO,)
    """Patterns (regex) of linear layers' names within a block: ``attention[.]query``, ``.*[.]up``;
    auto: keys, values, and what the feedforward's last layer reads."""
    trained: tuple[str, ...] = ()
    """Patterns of modules that are trained whole beside it: ``.*norm``, ``embedding``, ``head``."""
    resume: str | None = None
    """An adapter to begin with: a run's folder, a checkpoint, or a folder of PEFT's; None: anew."""

    imports = ("peft",)

    def scaled(self, model: Model) -> tuple[str, ...]:
        """Returns the linear layers whose whole name a target describes."""
        return layers.described(self.targets, model, model.scaled_targets)

    def added(self, weight: Weight, how: Split) -> tuple[Weight, ...]:
        """Returns the vector of a layer, of which ``weight`` is the matrix."""
        name, (out, into) = f"{weight.name.removesuffix('.weight')}.ia3_l.default", weight.shape
        shape = (1, into) if how is Split.row else (out, 1)
        return (replace(weight, name=name, shape=shape, role="scale"),)

    def tensor_split(self, model: Model) -> dict[str, Split]:
        """Returns the model's table, and each vector cut with its layer."""
        table = model.tensor_split()
        cut = {f"blocks.*.{name}": table[f"blocks.*.{name}"] for name in self.scaled(model)}
        return table | {f"{name}.ia3_l": how for name, how in cut.items()}

    def complaints(self) -> Iterator[Complaint]:
        """Yields targets that are no patterns."""
        yield from layers.complaints(self.targets, self.trained)

    def complaints_with(self, model: Model) -> Iterator[Complaint]:
        """Yields targets that describe no linear layer of the model's blocks."""
        given = (self.targets, self.trained, self.scaled(model))
        yield from layers.complaints_with(*given, model)

    def apply(self, module: ModelModule, model: Model) -> None:
        """Puts PEFT's layers in the place of the targets, and freezes everything else."""
        from scalewise.adapters.ia3 import inject

        table = model.tensor_split()
        inject(module, {name: table[f"blocks.*.{name}"] for name in self.scaled(model)})
        layers.train_whole(module, self.whole(model))

    def fill(self, module: ModelModule, seed: int) -> None:
        """Makes every scale one."""
        from scalewise.adapters.ia3 import fill

        fill(module)

    def merged(self, state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
        """Returns the model's own weights, multiplied by their scales."""
        from scalewise.adapters.ia3 import merged

        return merged(state, model)
