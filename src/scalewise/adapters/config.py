"""Base class of adapter configs, and weight census of an adapted model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

from scalewise import regular_files
from scalewise.adapters import target_modules
from scalewise.errors import ConfigIssue
from scalewise.models.base import AttentionFlops, ModelConfig, TPStyle, Weight, is_adapter_weight
from scalewise.registry import register_option, with_fields


class AdapterConfig:
    """Config of the trained parameters: added ones, and modules trained in full."""

    rank: int = 0
    """Rank of the added update; 0: none."""
    prompt_tokens: int = 0
    """Trained vectors before the token embeddings of a sequence; they take its first positions."""
    prefix_tokens: int = 0
    """Trained keys and values before those of each layer; they take the first positions."""
    dropout: float = 0.0
    """Dropout probability of the input of the added update."""
    reads_base_weights = False
    """Whether initialization or training reads the model's matrices, which cannot be packed
    then."""
    adapts_experts: ClassVar[bool] = False
    """Whether ``targets`` may match the matrices of routed experts."""
    magnitudes: bool = False
    """Whether rows of adapted matrices have trained magnitudes."""
    can_disable: bool = False
    """Whether ``disable_adapter`` restores the outputs of the model before training."""
    can_merge: bool = True
    """Whether the adapter can be merged into the model's weights."""
    targets: tuple[str, ...] = ()
    """Patterns (regex) of the linear layers that are adapted."""
    trained: tuple[str, ...] = ()
    """Patterns (regex) of modules that are trained in full."""
    resume: str | None = None
    """Adapter to start from."""
    implementation: ClassVar[str] = ""
    """Module that registers functions of ``adapters.build``; empty: that one itself."""
    imports: tuple[str, ...] = ()
    """Slow imports of the ranks, which the forkserver preloads."""

    def resolve(self) -> Self:
        """Copy with an absolute ``resume``.

        The folder of a run is replaced by its newest checkpoint.
        """
        if self.resume is None:
            return self
        folder = regular_files.expand_home(self.resume).absolute()
        *_, newest = [None, *sorted((folder / "checkpoints").glob("step-*/manifest.json"))]
        return with_fields(self, resume=str(newest.parent if newest else folder))

    def weights(self, model: ModelConfig) -> tuple[Weight, ...]:
        """All weights of the adapted model, in the order of the module's parameters.

        The model's own weights are frozen, except modules that are trained in full. The added
        weights of a layer follow its own.
        """
        return tuple(self._weights(model))

    def _weights(self, model: ModelConfig) -> Iterator[Weight]:
        target_layers, fully_trained = (
            {*self.adapted_layers(model), *self.scaled_layers(model)},
            self.fully_trained_modules(model),
        )
        tp_styles = model.tensor_parallel_styles()
        added: tuple[Weight, ...] = ()
        for weight in model.weight_census():
            layer = target_modules.layer_name(weight)
            if weight.name.endswith(".weight"):  # a bias precedes added weights
                yield from added
                added = ()
            yield replace(
                weight, trainable=target_modules.module_name(weight.name) in fully_trained
            )
            if layer in target_layers:
                added = self.added_weights(weight, tp_styles.get(f"blocks.*.{layer}"))
        yield from added

    def adapted_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the layers with an update of rank ``rank``."""
        return ()

    def scaled_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the layers whose inputs or outputs are scaled."""
        return ()

    def fully_trained_modules(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the model's modules that are trained in full."""
        return target_modules.match_modules(self.trained, model)

    def added_weights(self, weight: Weight, tp_style: TPStyle | None) -> tuple[Weight, ...]:
        """Weights that are added to a layer, whose matrix is ``weight``.

        ``tp_style``: tensor-parallel style of the layer; None: experts.
        """
        return ()

    def tensor_parallel_styles(self, model: ModelConfig) -> dict[str, TPStyle]:
        """Tensor-parallel style of each module with parameters, including added ones."""
        return model.tensor_parallel_styles()

    def flops(
        self,
        model: ModelConfig,
        sequence: int,
        target: int = 0,
        attention: AttentionFlops = AttentionFlops.kernel,
    ) -> float:
        """FLOPs of one forward and backward pass, per token, as ``ModelConfig.flops``.

        A frozen m x n layer saves its weight gradient, 2 m n per token. An added one costs 6 m n,
        as any trained layer. The vision encoder of an image-text model may be frozen entirely.
        """
        frozen_numel = added_numel = 0.0
        trained = [weight.name for weight in self.weights(model) if weight.trainable]
        for weight in self.weights(model):
            is_lookup = weight.layer is None or weight.role in ("scale", "position")
            if is_lookup or len(weight.shape) < 2:
                continue
            count = weight.numel * model.token_fraction(weight.name, sequence, target)
            if is_adapter_weight(weight.name):
                added_numel += count
            elif not weight.trainable:
                frozen_numel += count
        if not {"head", *map(target_modules.module_name, model.tied_weights)} & {
            *self.fully_trained_modules(model)
        }:
            head_numel = model.output_size * model.width  # also if tied
            frozen_numel += head_numel * model.token_fraction("head", sequence, target)
        skipped_flops = 2.0 * frozen_numel
        skipped_flops += model.skipped_backward_flops(trained, sequence, attention)
        return model.flops(sequence, target, attention) - skipped_flops + 6.0 * added_numel

    def active_parameters(self, model: ModelConfig) -> int:
        """Parameters that one token is computed with: of factors of experts, those of its own."""
        added = [weight for weight in self.weights(model) if is_adapter_weight(weight.name)]
        active = sum(
            round(weight.numel * model.token_fraction(weight.name, model.context, 0))
            if weight.stacked > 1
            else weight.numel
            for weight in added
        )
        return model.active_parameters + active

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each value out of range."""
        yield from ()


@lru_cache(maxsize=64)
def weight_census(adapter: AdapterConfig, model: ModelConfig) -> tuple[Weight, ...]:
    """All weights of an adapted model; cached for the planner's search."""
    return adapter.weights(model)


@lru_cache(maxsize=64)
def weight_census_by_kind(
    adapter: AdapterConfig, model: ModelConfig
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Weights of one block, as all blocks are alike, and those outside of blocks."""
    weights = weight_census(adapter, model)
    block = tuple(weight for weight in weights if weight.layer == 0)
    return block, tuple(weight for weight in weights if weight.layer is None)


@register_option("adapter", "none")
@dataclass(frozen=True)
class NoAdapterConfig(AdapterConfig):
    """No adapter: every parameter is trained."""

    def weights(self, model: ModelConfig) -> tuple[Weight, ...]:
        """Weights of the model, all trained."""
        return model.weight_census()

    def flops(
        self,
        model: ModelConfig,
        sequence: int,
        target: int = 0,
        attention: AttentionFlops = AttentionFlops.kernel,
    ) -> float:
        """FLOPs of one forward and backward pass, per token."""
        return model.flops(sequence, target, attention)
