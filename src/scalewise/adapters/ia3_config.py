"""Config of (IA)^3: trained scales of features of frozen layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scalewise.adapters import target_modules
from scalewise.adapters.config import AdapterConfig
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, TPStyle, Weight
from scalewise.registry import register_option


@register_option("adapter", "ia3")
@dataclass(frozen=True)
class IA3AdapterConfig(AdapterConfig):
    """(IA)^3: a trained scale per feature of a frozen linear layer W (Liu et al., 2022), by PEFT.

    The scale l multiplies the input of layers that end a sublayer, ``W (l * x)``, and the output of
    all others, ``l * (W x + b)``. Scales start at one and have no weight decay.
    """

    targets: tuple[str, ...] = (target_modules.AUTO,)
    """Patterns (regex) of linear layer names within a block, such as ``attention[.]query`` or
    ``.*[.]up``; auto: keys, values and the last layer of the feedforward."""
    trained: tuple[str, ...] = ()
    """Patterns (regex) of other modules that are trained in full next to the adapter, such as
    ``.*norm``, ``embedding`` or ``head``."""
    resume: str | None = None
    """Adapter to start from: the folder of a run, a checkpoint or a PEFT folder; null: from
    scratch."""

    implementation = "scalewise.adapters.ia3_modules"
    imports = ("peft",)

    def scaled_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the linear layers that ``targets`` match."""
        return target_modules.match_targets(self.targets, model, model.ia3_targets)

    def added_weights(self, weight: Weight, tp_style: TPStyle | None) -> tuple[Weight, ...]:
        """Scale vector of a layer, whose matrix is ``weight``."""
        name, (out_features, in_features) = (
            f"{weight.name.removesuffix('.weight')}.ia3_l.default",
            weight.shape,
        )
        shape = (1, in_features) if tp_style is TPStyle.row else (out_features, 1)
        return (replace(weight, name=name, shape=shape, role="scale"),)

    def tensor_parallel_styles(self, model: ModelConfig) -> dict[str, TPStyle]:
        """Styles of the model's modules, and of scales as of their layers."""
        tp_styles = model.tensor_parallel_styles()
        layer_styles = {
            f"blocks.*.{name}": tp_styles[f"blocks.*.{name}"] for name in self.scaled_layers(model)
        }
        return tp_styles | {f"{name}.ia3_l": tp_style for name, tp_style in layer_styles.items()}

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each invalid pattern."""
        yield from target_modules.target_issues(self.targets, self.trained)
