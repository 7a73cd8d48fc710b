"""Configs of LoRA and its variants rsLoRA, PiSSA and DoRA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt

from scalewise.adapters import target_modules
from scalewise.adapters.config import AdapterConfig
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, TPStyle, Weight
from scalewise.registry import register_option

FACTOR_STYLES = {
    TPStyle.column: (TPStyle.replicated, TPStyle.column),
    TPStyle.row: (TPStyle.row, TPStyle.tokens),
    TPStyle.partial_row: (TPStyle.partial_row, TPStyle.partial_replicated),
    TPStyle.expert_column: (TPStyle.expert_replicated, TPStyle.expert_column),
    TPStyle.expert_row: (TPStyle.expert_row, TPStyle.expert_replicated),
}
"""Tensor parallel styles of A and B, by that of the adapted layer."""


@register_option("adapter", "lora")
@dataclass(frozen=True)
class LoRAAdapterConfig(AdapterConfig):
    """LoRA: ``W x + alpha / rank * B A x`` with W frozen (Hu et al., 2021), by PEFT."""

    rank: int = 8
    """Rank of the update: A maps to ``rank`` features, B back from them."""
    alpha: float = 16.0
    """Scale of the update; the product B A is multiplied by ``alpha / rank``."""
    dropout: float = 0.0
    """Dropout probability of the input of A during training."""
    targets: tuple[str, ...] = (target_modules.AUTO,)
    """Patterns (regex) of linear layer names within a block, such as ``attention[.]query`` or
    ``.*[.]up``, and of matrices of routed experts, ``feedforward.experts.*``; auto: the
    model's default."""
    trained: tuple[str, ...] = ()
    """Patterns (regex) of other modules that are trained in full next to the adapter, such as
    ``.*norm``, ``embedding`` or ``head``."""
    resume: str | None = None
    """Adapter to start from: the folder of a run, a checkpoint or a PEFT folder; null: from
    scratch."""

    rank_stabilized = False
    """Whether ``scale`` is alpha / sqrt(rank) instead of alpha / rank."""
    can_disable = True
    adapts_experts = True
    implementation = "scalewise.adapters.lora_modules"
    imports = ("peft",)

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilized else self.rank)

    def adapted_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the linear layers and experts that ``targets`` match."""
        return target_modules.match_targets(
            self.targets, model, model.lora_targets, with_experts=self.adapts_experts
        )

    def added_weights(self, weight: Weight, tp_style: TPStyle | None) -> tuple[Weight, ...]:
        """A and B of a layer, whose matrix is ``weight``; of experts, stacked as their matrices."""
        module, (out_features, in_features) = weight.name.removesuffix(".weight"), weight.shape
        shapes = {"A": (weight.stacked * self.rank, in_features), "B": (out_features, self.rank)}
        return tuple(
            replace(weight, name=f"{module}.lora_{part}.default.weight", shape=shape)
            for part, shape in shapes.items()
        )

    def tensor_parallel_styles(self, model: ModelConfig) -> dict[str, TPStyle]:
        """Styles of the model's modules, and of A and B.

        Under a column-parallel layer, B is column-parallel; under a row-parallel layer, A is
        row-parallel.
        """
        tp_styles, layers = model.tensor_parallel_styles(), self.adapted_layers(model)
        added = {
            f"{name}.lora_{part}.default": factor_style
            for name, tp_style in tp_styles.items()
            if name.removeprefix("blocks.*.") in layers
            for part, factor_style in zip("AB", FACTOR_STYLES[tp_style], strict=True)
        }
        return tp_styles | added

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each value out of range."""
        if self.rank < 1:
            yield ConfigIssue("adapter.rank", self.rank, "must be 1 or more", "set adapter.rank=8")
        if not self.alpha > 0:
            yield ConfigIssue(
                "adapter.alpha", self.alpha, "must be positive", "set adapter.alpha=16"
            )
        if not 0 <= self.dropout < 1:
            yield ConfigIssue("adapter.dropout", self.dropout, "must be in [0, 1)")
        yield from target_modules.target_issues(self.targets, self.trained)


@register_option("adapter", "rslora")
@dataclass(frozen=True)
class RSLoRAAdapterConfig(LoRAAdapterConfig):
    """Rank-stabilized LoRA: scales the update by ``alpha / sqrt(rank)`` (Kalajdzievski, 2023)."""

    rank_stabilized = True


@register_option("adapter", "pissa")
@dataclass(frozen=True)
class PiSSAAdapterConfig(LoRAAdapterConfig):
    """PiSSA: LoRA initialized from the largest singular values of W (Meng et al., 2024).

    The remainder of W is frozen, so that the model's initial outputs are unchanged.
    """

    reads_base_weights = True
    can_disable = False
    adapts_experts = False


@register_option("adapter", "dora")
@dataclass(frozen=True)
class DoRAAdapterConfig(LoRAAdapterConfig):
    """DoRA: LoRA of a matrix's direction, with a trained magnitude per output (Liu et al., 2024).

    ``m / |W + scale B A| * (W + scale B A) x``; the norms are constants in the backward pass. They
    cost 2 rank FLOPs per element of W in each forward pass, which the planner counts as time;
    ``flops`` excludes them, as their share falls with the number of tokens.
    """

    magnitudes = True
    reads_base_weights = True
    adapts_experts = False

    def added_weights(self, weight: Weight, tp_style: TPStyle | None) -> tuple[Weight, ...]:
        """A, B and magnitudes of a layer."""
        name = f"{weight.name.removesuffix('.weight')}.lora_magnitude_vector.default.weight"
        magnitudes = replace(weight, name=name, shape=weight.shape[:1], role="scale")
        return (*super().added_weights(weight, tp_style), magnitudes)

    def tensor_parallel_styles(self, model: ModelConfig) -> dict[str, TPStyle]:
        """Styles of LoRA, and of magnitudes, sharded as the outputs of their layer."""
        tp_styles = super().tensor_parallel_styles(model)
        for name in self.adapted_layers(model):
            is_column = tp_styles[f"blocks.*.{name}"] is TPStyle.column
            tp_style = TPStyle.column if is_column else TPStyle.tokens
            tp_styles[f"blocks.*.{name}.lora_magnitude_vector.default"] = tp_style
        return tp_styles
