"""Facts about a Hugging Face model: functions of its config whose code imports transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scalewise.errors import ConfigIssue
from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.models.base import ModelConfig, TPStyle, Weight

COLUMN = "colwise"
TP_STYLES = {
    COLUMN: TPStyle.column,
    "rowwise": TPStyle.row,
    "replicated_with_grad_allreduce": TPStyle.heads,
}
"""Supported styles of transformers' ``base_model_tp_plan``."""


@dataclass(frozen=True)
class VisionInfo:
    """Tokens and attention of a model for one input image."""

    image_size: int
    """Height and width of the image, in pixels."""
    decoder_tokens: int
    """Image tokens that the decoder reads before the text."""
    encoder_tokens: int
    """Image tokens that the encoder of the language model reads, if it has one."""
    tokens_by_layer: Mapping[str, float]
    """Image positions that a layer is applied to, by its full name; other layers read text."""
    attention_pairs: int
    """Query-key pairs times features, over all layers before the language model."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model from its configuration and its module on the meta device."""

    vocabulary: int
    """Vocabulary size, in tokens."""
    context: int
    """Longest sequence, in tokens."""
    layers: int
    """Number of blocks of all stacks."""
    heads: int
    """Number of query heads per block."""
    key_heads: int
    """Number of key (and value) heads per block."""
    width: int
    """Width of the residual stream, in features."""
    head_size: int
    """Features per head."""
    weight_census: tuple[Weight, ...]
    """Parameters, in the order of ``named_parameters()``."""
    tied_weights: frozenset[str]
    """Names of the weights that the embedding and the head share."""
    model_type: str
    """transformers' name of the architecture."""
    linear_layers: tuple[tuple[str, tuple[int, int]], ...]
    """Linear layers of a block: name within it, (output features, input features)."""
    buffer_bytes: int
    """Bytes of all buffers."""
    dropout: float
    """Largest dropout probability in the configuration."""
    layer_order: tuple[str, ...]
    """Layers with weights in execution order, by name within the block."""
    tied_head: str | None
    """Name of the head module if it uses the embedding's weight."""
    hf_tp_plan: tuple[tuple[str, str], ...]
    """transformers' tensor-parallel style of modules in a block, by name within it."""
    has_equal_blocks: bool = True
    """Whether all blocks are of one class, and have weights of the same names and shapes."""
    returns_tuples: bool = False
    """Whether a block returns a sequence whose first element is the residual stream."""
    expert_fractions: Mapping[str, float] = field(default_factory=dict)
    """Fraction of a weight that one token is multiplied with, by name of a weight of experts."""
    packs_texts: bool = False
    """Whether position ids that start again separate the texts of a packed sequence."""
    stack_starts: tuple[int, ...] = (0,)
    """Index of the first block of each stack: one stack, encoder and decoder, or vision model,
    Q-Former and the one or two stacks of the language model."""
    source_layers: frozenset[str] = frozenset()
    """Layers that are applied to the source tokens of an encoder-decoder model, by full name."""
    vision: VisionInfo | None = None
    """Facts about the image input; None: the model reads no images."""


@lazy_dispatch
def read_info(config: ModelConfig) -> ModelInfo:
    """Facts about a model, from its configuration and its module on the meta device.

    Raises:
        ConfigError: The model is not supported.
    """
    raise not_registered(read_info, config)


@lazy_dispatch
def peft_targets(config: ModelConfig, adapter: str) -> tuple[str, ...]:
    """Linear layers of a block that PEFT adapts by default, by name within it.

    ``adapter`` is ``LORA`` or ``IA3``. If PEFT has no default for the model, all linear layers; of
    a model with experts, those of attention.
    """
    raise not_registered(peft_targets, config)


@lazy_dispatch
def weight_issues(config: ModelConfig) -> Iterable[ConfigIssue]:
    """Config issues of the weights in a local folder; only file headers are read."""
    raise not_registered(weight_issues, config)
