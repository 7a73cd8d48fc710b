"""Configuration of Hugging Face language models."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from scalewise import regular_files
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.models.base import AttentionFlops, ModelConfig, TPStyle, Weight
from scalewise.models.hf.hub import model_tokenizer
from scalewise.models.hf.model_info import (
    COLUMN,
    TP_STYLES,
    ModelInfo,
    peft_targets,
    read_info,
    weight_issues,
)
from scalewise.registry import register_option


class InitKind(StrEnum):
    """Initial weights."""

    weights = "weights"
    """The safetensors weights at ``model.path``."""
    random = "random"
    """Random weights; only config.json is read."""


TP_STYLE_BY_ROLE = {
    "embedding": TPStyle.vocabulary,
    "position": TPStyle.positions,
    "head": TPStyle.head,
}


@register_option("model", "hf")
@dataclass(frozen=True)
class HuggingFaceConfig(ModelConfig):
    """A transformers model: a causal language model, an encoder-decoder model or BLIP-2.

    Custom code in a checkpoint is never executed. Planning runs the model once with FakeTensor and
    imports torch.
    """

    path: str = ""
    """Folder with config.json and safetensors files, or a name on the Hub; the local cache is read
    first."""
    init: InitKind = InitKind.weights
    """Whether training starts from the weights at ``path`` or from random ones."""
    depth: int | None = None
    """Number of layers of each stack, with random weights; null: as config.json says."""

    embeds_all_tokens = True
    implementation = "scalewise.models.hf.weights"
    op_graph_implementation = "scalewise.tracing.hf_op_graphs"
    imports = ("scalewise.models.hf.causal_lm",)

    @property
    def info(self) -> ModelInfo:
        """Facts about the model; raises ``ConfigError`` if it is not supported."""
        try:
            return read_info(self)
        except ModuleNotFoundError as error:
            reason = f"requires {error.name}, which is not installed"
            fix = f"pip install {error.name}"
            raise ConfigError.for_key("model", "hf", reason, fix) from None

    @property
    def pretrained_path(self) -> str | None:
        """Folder or Hub name of the pretrained weights; None: random initialization."""
        return self.path if self.init is InitKind.weights else None

    def find_tokenizer_file(self) -> Path | None:
        """Return the tokenizer.json of the model, or None."""
        return model_tokenizer(self.path)

    @property
    def vocabulary(self) -> int:  # type: ignore[override]  # not a field here
        """Vocabulary size, in tokens."""
        return self.info.vocabulary

    @property
    def context(self) -> int:  # type: ignore[override]  # not a field here
        """Longest sequence, in tokens."""
        return self.info.context

    @property
    def layers(self) -> int:  # type: ignore[override]  # not a field here
        """Number of blocks of all stacks."""
        return self.info.layers

    @property
    def heads(self) -> int:  # type: ignore[override]  # not a field here
        """Number of query heads per block."""
        return self.info.heads

    @property
    def width(self) -> int:  # type: ignore[override]  # not a field here
        """Width of the residual stream, in features."""
        return self.info.width

    @property
    def key_heads(self) -> int:
        """Number of key (and value) heads per block."""
        return self.info.key_heads

    @property
    def query_width(self) -> int:
        """Features of all query heads of one token."""
        return self.info.heads * self.info.head_size

    @property
    def kv_width(self) -> int:
        """Features of all key heads of one token."""
        return self.info.key_heads * self.info.head_size

    @property
    def num_stacks(self) -> int:
        """Number of stacks of blocks."""
        return len(self.info.stack_starts)

    @property
    def has_equal_blocks(self) -> bool:
        """Whether all blocks have weights of the same names and shapes."""
        return self.info.has_equal_blocks

    @property
    def has_experts(self) -> bool:
        """Whether blocks have a mixture of experts."""
        return any(weight.role == "experts" for weight in self.weight_census())

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder, and reads no images."""
        return self.num_stacks > 1 and not self.image_size

    @property
    def image_size(self) -> int:  # type: ignore[override]  # not a field here
        """Height and width of input images, in pixels; 0: the model reads no images."""
        return self.info.vision.image_size if self.info.vision else 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.info.buffer_bytes

    @property
    def has_post_norm(self) -> bool:  # type: ignore[override]  # not a field here
        """Whether a block normalizes the output of its last linear layer."""
        return self.info.layer_order[-1] not in dict(self.info.linear_layers)

    @property
    def dropout(self) -> float:
        """Largest dropout probability in the configuration."""
        return self.info.dropout

    @property
    def tied_weights(self) -> frozenset[str]:
        """Embedding weight if the head is tied, else empty."""
        return self.info.tied_weights

    @property
    def end_modules(self) -> tuple[str, ...]:
        """Names of the token embedding and of the head, if it has a weight of its own."""
        if self.tied_weights or not self.has_equal_blocks:
            return ()
        embedding = next(it.name for it in self.weight_census() if it.role == "embedding")
        return (embedding.rpartition(".")[0], "head")

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """PEFT's default LoRA targets for the architecture, or all linear layers."""
        return peft_targets(self, "LORA")

    @property
    def ia3_targets(self) -> tuple[str, ...]:
        """PEFT's default IA3 targets for the architecture, or all linear layers."""
        return peft_targets(self, "IA3")

    def weight_census(self) -> tuple[Weight, ...]:
        """Return every parameter of the module, in the order of ``named_parameters()``."""
        return self.info.weight_census

    def flops(
        self, sequence: int, target: int = 0, attention: AttentionFlops = AttentionFlops.kernel
    ) -> float:
        """Return the FLOPs of one forward and backward pass, per token of a ``sequence``.

        6 per element of each matrix in the blocks and of the head. Attention takes 14 times the
        sequence length times the query width in each layer; :meth:`DecoderConfig.flops` has the
        derivation, and ``attention`` selects the convention. Matrices of an encoder are applied to
        the source tokens only, those of a decoder to the target tokens. Target tokens attend to
        themselves and to the source. For an image, each stack has its own number of positions.
        """
        matrices = sum(
            weight.numel
            * self.info.expert_fractions.get(weight.name, 1.0)
            * self.token_fraction(weight.name, sequence, target)
            for weight in self.weight_census()
            if len(weight.shape) > 1 and weight.role not in ("embedding", "position")
        )
        tied = self.vocabulary * self.width if self.tied_weights else 0
        *_, decoder = self.info.stack_starts
        full_pairs = decoder * (sequence - target) ** 2
        keys, queries = sequence, target or sequence
        vision_pairs = 0
        if vision := self.info.vision:
            queries = sequence + vision.decoder_tokens
            keys = queries + vision.encoder_tokens
            full_pairs, vision_pairs = (
                (decoder - self.info.stack_starts[2]) * vision.encoder_tokens**2,
                vision.attention_pairs,
            )
        decoder_layers = self.layers - decoder
        full_pairs += decoder_layers * queries * (keys - queries)
        attention_flops = attention.count(
            decoder_layers * queries**2 * self.query_width,
            full_pairs * self.query_width + vision_pairs,
        )
        matmul_flops = 6.0 * (matrices + tied * self.token_fraction("", sequence, target))
        return matmul_flops + attention_flops / sequence

    def token_fraction(self, name: str, sequence: int, target: int) -> float:
        """Return the fraction of the tokens that a matrix is applied to; other names: the head."""
        layer = name.partition(".lora_")[0].removesuffix(".weight")
        if vision := self.info.vision:
            text = sequence + vision.decoder_tokens * layer.startswith("blocks.")
            return vision.tokens_by_layer.get(layer, text) / sequence
        if not self.is_encoder_decoder:
            return 1.0
        return (sequence - target if layer in self.info.source_layers else target) / sequence

    def skipped_backward_flops(
        self, trained_names: Collection[str], sequence: int, attention: AttentionFlops
    ) -> float:
        """Return the backward FLOPs per token of vision model and Q-Former, if both are frozen."""
        vision = self.info.vision
        if vision is None:
            return 0.0
        start = self.info.stack_starts[2]
        prefixes = ("head.language_model.", *(f"blocks.{n}." for n in range(start, self.layers)))
        if not all(name.startswith(prefixes) for name in trained_names):
            return 0.0
        forward_flops = 4.0 * vision.attention_pairs
        skipped = attention.count(0.0, vision.attention_pairs) - forward_flops
        for weight in self.weight_census():
            positions = vision.tokens_by_layer.get(weight.name.removesuffix(".weight"), 0)
            if len(weight.shape) > 1 and not weight.name.startswith(prefixes):
                # 6 in forward and backward, minus 2 in forward; pixels need no gradient: 4 minus 2,
                # relative to the 2/3 of the positions that tokens_by_layer has for them.
                outside_flops = 3.0 if len(weight.shape) > 2 else 4.0
                flops = 2.0 if weight.layer is not None else outside_flops
                skipped += flops * weight.numel * positions
        return skipped / sequence

    def tensor_parallel_styles(self) -> dict[str, TPStyle]:
        """Return the styles of transformers' ``base_model_tp_plan``, and those outside the blocks.

        Without a plan, a linear layer is row-parallel if it projects to the residual width.
        """
        info = self.info
        plan, first_layers = dict(info.hf_tp_plan), (None, *info.stack_starts)
        table: dict[str, TPStyle] = {}
        for weight in self.weight_census():
            if weight.layer in first_layers:
                block = f"blocks.{weight.layer}."
                name = weight.name.rpartition(".")[0].replace(block, "blocks.*.", 1)
                style = TP_STYLE_BY_ROLE.get(weight.role, TPStyle.tokens)
                table.setdefault(name, style)  # the weight of a module precedes its bias
        for name, (out, into) in info.linear_layers:
            by_shape = TPStyle.row if out == info.width != into else TPStyle.column
            table[f"blocks.*.{name}"] = TP_STYLES.get(plan.get(name, ""), by_shape)
        table |= {
            f"blocks.*.{name}": TPStyle.heads
            for name, hf_style in info.hf_tp_plan
            if TP_STYLES.get(hf_style) is TPStyle.heads
        }
        return table | ({info.tied_head: TPStyle.head} if info.tied_head else {})

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the heads, the outputs of column-parallel layers, and the vocabulary size."""
        plan = dict(self.info.hf_tp_plan)
        columns = {
            name: out for name, (out, _) in self.info.linear_layers if plan.get(name) == COLUMN
        }
        heads = {"heads": self.heads, "key_heads": self.key_heads}
        return heads | columns | {"vocabulary": self.vocabulary}

    def with_layers(self, layers: int) -> HuggingFaceConfig:
        """Return the same configuration with another number of layers per stack."""
        return replace(self, depth=layers)

    def shrink(self, layers: int, width: int | None) -> HuggingFaceConfig:
        """Return the architecture with random weights and at most ``layers`` layers per stack."""
        depth = min(layers, self.layers // len(self.info.stack_starts))
        return replace(self, depth=depth, init=InitKind.random)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield config issues of the path, the architecture and the weights."""
        if self.depth is not None and self.depth < 1:
            yield ConfigIssue("model.depth", self.depth, "must be positive", "set model.depth=null")
        elif not self.path:
            fix = "set model.path=FOLDER, or a name on the Hub"
            yield ConfigIssue("model.path", "''", "is empty", fix)
        else:
            yield from self._validate_readable()

    def _validate_readable(self) -> Iterator[ConfigIssue]:
        try:
            census, full_census = self.weight_census(), replace(self, depth=None).weight_census()
        except ConfigError as error:
            yield from error.issues
            return
        if self.init is InitKind.random:
            return
        if census != full_census:
            reason = "differs from the number of layers of the pretrained weights"
            yield ConfigIssue("model.depth", self.depth, reason, "set model.init=random")
        if regular_files.expand_home(self.path).is_dir():
            yield from weight_issues(self)
