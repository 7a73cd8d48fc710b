"""Learnt numbers in the place of words before a text, as specs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from scalewise.adapters.config import AdapterConfig
from scalewise.adapters.target_modules import is_adapter_weight
from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, TPStyle, Weight

if TYPE_CHECKING:
    from scalewise.models.base_module import ModelModule
    from scalewise.run_config import RunConfig

NAME = "prompt.weight"
PREFIX = ("attention.mix.prefix_keys", "attention.mix.prefix_values")
"""Modules within a block."""


@dataclass(frozen=True)
class VirtualTokenAdapterConfig(AdapterConfig):
    """Trained virtual tokens before the tokens of each sequence; they have positions and no labels.

    As in PEFT, they are initialized from a normal distribution with standard deviation 1.
    """

    tokens: int = 16
    """Length of the virtual prompt, in tokens."""
    resume: str | None = None
    """Adapter to start from: the folder of a run, a checkpoint or a PEFT folder; null: from
    scratch."""

    can_merge = False

    def count_block_parameters(self, model: ModelConfig) -> int:
        """Returns the numbers of the matrices of all blocks."""
        matrices = (w for w in model.weight_census() if w.layer is not None and len(w.shape) > 1)
        return sum(weight.numel for weight in matrices)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields figures out of range."""
        if self.tokens < 1:
            yield ConfigIssue(
                "adapter.tokens", self.tokens, "must be 1 or more", "set adapter.tokens=16"
            )

    def validate_with_run(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields rows that leave no room, and what asks the model without what stands before."""
        places, most = run.data.sequence + self.tokens, run.model.context
        if run.data.sequence <= most < places:
            reason = f"and data.sequence={run.data.sequence} are more than model.context={most}"
            fix = f"set data.sequence={most - self.tokens}"
            if most <= self.tokens:
                room = min(self.tokens, most) // 2
                fix = f"set adapter.tokens={room} data.sequence={min(places, most) - room}"
            yield ConfigIssue("adapter.tokens", self.tokens, reason, fix)
        if run.objective.pairs or run.objective.reference_objective is not None:
            chosen = run.choices.get("adapter", type(self).__name__)
            objective = run.choices.get("objective", "")
            reason = f"cannot be turned off, as objective={objective} asks the model without it"
            yield ConfigIssue("adapter", chosen, reason, "set adapter=lora")

    def init_weights(self, module: ModelModule, seed: int) -> None:
        """Draws what is learnt."""
        from scalewise.models import init

        for name, parameter in module.named_parameters():
            if is_adapter_weight(name):
                init.init_normal(name, parameter, seed, 1.0)


@register_option("adapter", "prompt")
@dataclass(frozen=True)
class PromptAdapterConfig(VirtualTokenAdapterConfig):
    """Prompt tuning: trained vectors before the token embeddings (Lester et al., 2021)."""

    @property
    def prompt_tokens(self) -> int:  # type: ignore[override]  # it is read alone
        """Returns the vectors before the tokens of a row."""
        return self.tokens

    def weights(self, model: ModelConfig) -> tuple[Weight, ...]:
        """Returns the model's own, frozen, and the vectors after them."""
        own = (replace(weight, trainable=False) for weight in model.weight_census())
        return (*own, Weight(NAME, (self.tokens, model.width), "embedding"))

    def tensor_parallel_styles(self, model: ModelConfig) -> dict[str, TPStyle]:
        """Returns the model's table, and the vectors whole."""
        return model.tensor_parallel_styles() | {"prompt": TPStyle.prompt}

    def flops(self, model: ModelConfig, sequence: int, target: int = 0) -> float:
        """Returns the flops of one forward and backward pass, per token of the text.

        Blocks compute the vectors too; the head, whose weight is frozen, the tokens alone.
        """
        places, head = sequence + self.tokens, model.output_size * model.width
        blocks = model.flops(places) - 6.0 * head - 2.0 * self.count_block_parameters(model)
        return blocks * places / sequence + 4.0 * head

    def validate_with_run(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what vectors cannot stand in or be left out of."""
        yield from super().validate_with_run(run)
        if run.data.packing:
            reason = "stands before a row, and data.packing=true lays several texts into one"
            chosen = run.choices.get("adapter", "prompt")
            yield ConfigIssue("adapter", chosen, reason, "set data.packing=false")

    def apply(self, module: ModelModule, model: ModelConfig) -> None:
        """Freezes the model, and puts the vectors before what its first block reads."""
        module.requires_grad_(False)
        module.add_prompt_tokens(self.tokens)


@register_option("adapter", "prefix")
@dataclass(frozen=True)
class PrefixAdapterConfig(VirtualTokenAdapterConfig):
    """Prefix tuning: trained keys and values before those of every layer (Li and Liang, 2021).

    They are trained directly, without a reparametrizing MLP, and have no rotary embedding.
    """

    @property
    def prefix_tokens(self) -> int:  # type: ignore[override]  # it is read alone
        """Returns the keys, and values, before those of a row in each layer."""
        return self.tokens

    def weights(self, model: ModelConfig) -> tuple[Weight, ...]:
        """Returns the model's own, frozen, and within each block what its attention learns."""
        return tuple(self._block_weights(model))

    def _block_weights(self, model: ModelConfig) -> Iterator[Weight]:
        shape, within = (self.tokens, model.kv_width), "attention.output"
        own = (replace(weight, trainable=False) for weight in model.weight_census())
        for (layer, last), weights in groupby(own, lambda w: (w.layer, within in w.name)):
            yield from weights
            if last:
                for name in PREFIX:
                    yield Weight(f"blocks.{layer}.{name}.weight", shape, "embedding", layer)

    def tensor_parallel_styles(self, model: ModelConfig) -> dict[str, TPStyle]:
        """Returns the model's table, and keys and values cut by heads, as those of rows are."""
        return model.tensor_parallel_styles() | {f"blocks.*.{name}": TPStyle.row for name in PREFIX}

    def flops(self, model: ModelConfig, sequence: int, target: int = 0) -> float:
        """Returns the flops of one forward and backward pass, per token of the text.

        Attention reads the learnt keys as well. All matrices are frozen, the head's too; gradients
        end before what the first layer makes queries, keys and values by.
        """
        head = model.output_size * model.width
        first = model.width * (model.query_width + 2 * model.kv_width)
        spared = self.count_block_parameters(model) + head + first
        return model.flops(sequence + self.tokens) - 2.0 * spared

    def apply(self, module: ModelModule, model: ModelConfig) -> None:
        """Freezes the model, and puts keys and values before those of each layer."""
        module.requires_grad_(False)
        module.add_prefix_kv(self.tokens)
