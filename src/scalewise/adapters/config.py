"""What every adapter answers: which weights it freezes and which it adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from scalewise.adapters import target_modules
from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, TPStyle, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.base_module import ModelModule
    from scalewise.run_config import RunConfig


class AdapterConfig(ABC):
    """What is trained of a model, as a spec.

    ``turns_off``: whether a module computes without it, on demand, what it did before training.
    ``merges``: whether weights of the model alone compute what it does. ``ahead``: vectors
    that it puts before the tokens of a row. ``before``: keys and values that it puts before those
    of each layer. Both take the first places of a row.
    """

    rank: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    dropout: float = 0.0
    reads_base_weights = False
    """Whether it is made of the model's own matrices, which then have to be whole."""
    magnitudes: bool = False
    """Whether the rows of adapted matrices have magnitudes of their own."""
    can_disable: bool = False
    can_merge: bool = True
    targets: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    resume: str | None = None
    imports: tuple[str, ...] = ()
    """Modules that its ranks import and that take long: a fork server may have them already."""

    def resolve(self) -> Self:
        """Returns it with ``resume`` as a whole path; of a run's folder, the newest checkpoint."""
        if self.resume is None:
            return self
        folder = Path(self.resume).expanduser().absolute()
        *_, newest = [None, *sorted((folder / "checkpoints").glob("step-*/manifest.json"))]
        return replace(self, resume=str(newest.parent if newest else folder))  # type: ignore[type-var]  # a dataclass

    def weights(self, model: ModelConfig) -> tuple[Weight, ...]:
        """Returns every tensor once, in the order of the module's parameters.

        They are the model's own, frozen but for what is trained whole, and after each layer what
        is added to it.
        """
        return tuple(self._weights(model))

    def _weights(self, model: ModelConfig) -> Iterator[Weight]:
        changed, whole = (
            {*self.adapted_layers(model), *self.scaled_layers(model)},
            self.fully_trained_modules(model),
        )
        table = model.tensor_parallel_styles()
        added: tuple[Weight, ...] = ()
        for weight in model.weight_census():
            layer = target_modules.layer_name(weight)
            if weight.name.endswith(".weight"):  # a bias comes before what is added
                yield from added
                added = ()
            yield replace(weight, trainable=target_modules.module_name(weight.name) in whole)
            if layer in changed:
                added = self.added_weights(weight, table[f"blocks.*.{layer}"])
        yield from added

    def adapted_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns the layers that get matrices of ``rank`` beside them, by name within a block."""
        return ()

    def scaled_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns the layers whose outputs or inputs are scaled, by name within a block."""
        return ()

    def fully_trained_modules(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns the modules of the model that are trained themselves, by name as others are."""
        return target_modules.match_modules(self.trained, model)

    def added_weights(self, weight: Weight, tp_style: TPStyle) -> tuple[Weight, ...]:
        """Returns what is added to a layer, of which ``weight`` is the matrix.

        ``tp_style``: which side of it tensor parallelism cuts.
        """
        return ()

    def tensor_parallel_styles(self, model: ModelConfig) -> dict[str, TPStyle]:
        """Returns how tensor parallelism cuts each module with weights, added ones as well."""
        return model.tensor_parallel_styles()

    def flops(self, model: ModelConfig, sequence: int, target: int = 0) -> float:
        """Returns the flops of one forward and backward pass, per token, as ``Model.flops``.

        A frozen m x n layer spares its gradient, 2 m n a token; an added one costs 6 m n, as any
        that is trained. Of a model that reads pictures, what reads them may be frozen whole.
        """
        frozen = added = 0.0
        trained = [weight.name for weight in self.weights(model) if weight.trainable]
        for weight in self.weights(model):
            looked_up = weight.layer is None or weight.role in ("scale", "position")
            if looked_up or len(weight.shape) < 2:
                continue
            count = weight.numel * model.token_fraction(weight.name, sequence, target)
            if target_modules.is_adapter_weight(weight.name):
                added += count
            elif not weight.trainable:
                frozen += count
        if not {"head", *map(target_modules.module_name, model.tied_weights)} & {
            *self.fully_trained_modules(model)
        }:
            head = model.output_size * model.width  # tied or not
            frozen += head * model.token_fraction("head", sequence, target)
        spared = 2.0 * frozen + model.skipped_backward_flops(trained, sequence)
        return model.flops(sequence, target) - spared + 6.0 * added

    def merge_weights(self, state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
        """Returns whole weights of the model alone that compute what these do, adapter and all."""
        return dict(state)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields figures out of range."""
        yield from ()

    def validate_with(self, model: ModelConfig) -> Iterator[ConfigIssue]:
        """Yields what ``model`` does not have."""
        yield from ()

    def validate_with_run(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what it does not go with in the other parts of ``run``."""
        yield from ()

    def validate_machine(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields why a run of sound specs cannot begin with the adapter at ``resume``."""
        if self.resume is not None:
            from scalewise.adapters import resume

            yield from resume.resume_issues(self, run)

    @abstractmethod
    def apply(self, module: ModelModule, model: ModelConfig) -> None:
        """Freezes and adds weights, in place, in a model or a part of it on the meta device."""

    def disable(self, module: ModelModule) -> AbstractContextManager[None]:
        """Returns the context in which a module computes as if there were no adapter."""
        raise NotImplementedError

    @abstractmethod
    def init_weights(self, module: ModelModule, seed: int) -> None:
        """Gives the added weights of a materialized module, sharded or not, their first values."""

    def init_or_load_weights(self, module: ModelModule, model: ModelConfig, seed: int) -> None:
        """Gives what is trained of such a module the values that training begins with."""
        self.init_weights(module, seed)
        if self.resume is not None:
            from scalewise.adapters import resume

            resume.load_adapter(module, self.resume, model)


@lru_cache(maxsize=64)
def weight_census(adapter: AdapterConfig, model: ModelConfig) -> tuple[Weight, ...]:
    """Returns every weight of an adapted model once; a search asks a thousand times."""
    return adapter.weights(model)


@lru_cache(maxsize=64)
def weight_census_by_kind(
    adapter: AdapterConfig, model: ModelConfig
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Returns the weights of one block, all blocks being alike, and those outside of blocks."""
    whole = weight_census(adapter, model)
    block = tuple(weight for weight in whole if weight.layer == 0)
    return block, tuple(weight for weight in whole if weight.layer is None)


@register_option("adapter", "none")
@dataclass(frozen=True)
class NoAdapterConfig(AdapterConfig):
    """No adapter: every parameter is trained."""

    def weights(self, model: ModelConfig) -> tuple[Weight, ...]:
        """Returns the model's own."""
        return model.weight_census()

    def flops(self, model: ModelConfig, sequence: int, target: int = 0) -> float:
        """Returns the model's."""
        return model.flops(sequence, target)

    def apply(self, module: ModelModule, model: ModelConfig) -> None:
        """Changes nothing."""

    def init_weights(self, module: ModelModule, seed: int) -> None:
        """Has nothing to fill."""
