"""Configs of prompt tuning and prefix tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from scalewise.adapters.config import AdapterConfig
from scalewise.errors import ConfigIssue
from scalewise.models.base import AttentionFlops, ModelConfig, TPStyle, Weight
from scalewise.registry import register_option

PROMPT_NAME = "prompt.weight"
PREFIX_NAMES = ("attention.mix.prefix_keys", "attention.mix.prefix_values")
"""Modules of the prefix, by name within a block."""


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
        """Elements of the matrices of all blocks."""
        matrices = (w for w in model.weight_census() if w.layer is not None and len(w.shape) > 1)
        return sum(weight.numel for weight in matrices)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each value out of range."""
        if self.tokens < 1:
            yield ConfigIssue(
                "adapter.tokens", self.tokens, "must be 1 or more", "set adapter.tokens=16"
            )


@register_option("adapter", "prompt")
@dataclass(frozen=True)
class PromptAdapterConfig(VirtualTokenAdapterConfig):
    """Prompt tuning: trained vectors before the token embeddings (Lester et al., 2021)."""

    @property
    def prompt_tokens(self) -> int:  # type: ignore[override]  # read only
        """Trained vectors before the token embeddings of a sequence."""
        return self.tokens

    def weights(self, model: ModelConfig) -> tuple[Weight, ...]:
        """Weights of the model, frozen, followed by the trained vectors."""
        frozen = (replace(weight, trainable=False) for weight in model.weight_census())
        return (*frozen, Weight(PROMPT_NAME, (self.tokens, model.width), "embedding"))

    def tensor_parallel_styles(self, model: ModelConfig) -> dict[str, TPStyle]:
        """Styles of the model's modules; the vectors are replicated."""
        return model.tensor_parallel_styles() | {"prompt": TPStyle.prompt}

    def flops(
        self,
        model: ModelConfig,
        sequence: int,
        target: int = 0,
        attention: AttentionFlops = AttentionFlops.kernel,
    ) -> float:
        """FLOPs of one forward and backward pass, per token of the text.

        Blocks process the vectors too; the head, whose weight is frozen, processes the tokens only.
        """
        positions, head_numel = sequence + self.tokens, model.output_size * model.width
        block_flops = (
            model.flops(positions, attention=attention)
            - 6.0 * head_numel
            - 2.0 * self.count_block_parameters(model)
        )
        return block_flops * positions / sequence + 4.0 * head_numel


@register_option("adapter", "prefix")
@dataclass(frozen=True)
class PrefixAdapterConfig(VirtualTokenAdapterConfig):
    """Prefix tuning: trained keys and values before those of every layer (Li and Liang, 2021).

    They are trained directly, without a reparametrizing MLP, and have no rotary embedding.
    """

    @property
    def prefix_tokens(self) -> int:  # type: ignore[override]  # read only
        """Trained keys and values before those of a sequence in each layer."""
        return self.tokens

    def weights(self, model: ModelConfig) -> tuple[Weight, ...]:
        """Weights of the model, frozen; those of attention are followed by its prefix."""
        return tuple(self._block_weights(model))

    def _block_weights(self, model: ModelConfig) -> Iterator[Weight]:
        shape, last_module = (self.tokens, model.kv_width), "attention.output"
        frozen = (replace(weight, trainable=False) for weight in model.weight_census())
        for (layer, is_last), weights in groupby(
            frozen, lambda w: (w.layer, last_module in w.name)
        ):
            yield from weights
            if is_last:
                for name in PREFIX_NAMES:
                    yield Weight(f"blocks.{layer}.{name}.weight", shape, "embedding", layer)

    def tensor_parallel_styles(self, model: ModelConfig) -> dict[str, TPStyle]:
        """Styles of the model's modules; prefixes are sharded by heads."""
        return model.tensor_parallel_styles() | {
            f"blocks.*.{name}": TPStyle.row for name in PREFIX_NAMES
        }

    def flops(
        self,
        model: ModelConfig,
        sequence: int,
        target: int = 0,
        attention: AttentionFlops = AttentionFlops.kernel,
    ) -> float:
        """FLOPs of one forward and backward pass, per token of the text.

        Attention reads the prefix as well. All matrices are frozen, including the head's; the
        backward pass ends before the query, key and value layers of the first block.
        """
        head_numel = model.output_size * model.width
        first_numel = model.width * (model.query_width + 2 * model.kv_width)
        skipped_numel = self.count_block_parameters(model) + head_numel + first_numel
        prefix_flops = attention.count(0.0, model.layers * self.tokens * model.query_width)
        return model.flops(sequence, attention=attention) + prefix_flops - 2.0 * skipped_numel
