"""Any language model of transformers, as a spec; what it is, its configuration says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise.config.registry import register_option
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.models.base import ModelConfig, StageSlice, TPStyle, Weight
from scalewise.models.hf.compatibility import hf_issues
from scalewise.models.hf.model_info import COLUMN, SPLITS, ModelInfo
from scalewise.models.op_graph import ForwardSpec, ModelOpGraphs

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.base_module import ModelModule
    from scalewise.models.hf.causal_lm import CausalLMModule
    from scalewise.run_config import RunConfig


class InitKind(StrEnum):
    """Initial weights."""

    weights = "weights"
    """The safetensors weights at ``model.path``."""
    random = "random"
    """Random weights; only config.json is read."""


ENDS = {"embedding": TPStyle.vocabulary, "position": TPStyle.positions, "head": TPStyle.head}


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

    imports = ("scalewise.models.hf.causal_lm",)

    @property
    def info(self) -> ModelInfo:
        """Returns what the configuration says; raises ``ConfigError`` where it cannot be read."""
        try:
            from scalewise.models.hf import introspection
        except ModuleNotFoundError as error:
            reason = f"is known by {error.name}, which is not installed"
            fix = f"pip install {error.name}"
            raise ConfigError.for_key("model", "hf", reason, fix) from None
        return introspection.read_model_info(self.path, self.depth)

    @property
    def pretrained_path(self) -> str | None:
        """Returns the folder or name of the weights that it begins with; None: fresh ones."""
        return self.path if self.init is InitKind.weights else None

    def find_tokenizer_file(self) -> Path | None:
        """Returns the tokenizer.json at its path; None where there is none."""
        from scalewise.models.hf import hub

        return hub.model_tokenizer(self.path)

    @property
    def vocabulary(self) -> int:  # type: ignore[override]  # not a field here
        """Returns the token ids."""
        return self.info.vocabulary

    @property
    def context(self) -> int:  # type: ignore[override]  # not a field here
        """Returns the tokens of the longest row."""
        return self.info.context

    @property
    def layers(self) -> int:  # type: ignore[override]  # not a field here
        """Returns the blocks."""
        return self.info.layers

    @property
    def heads(self) -> int:  # type: ignore[override]  # not a field here
        """Returns the query heads per block."""
        return self.info.heads

    @property
    def width(self) -> int:  # type: ignore[override]  # not a field here
        """Returns the features of the residual stream."""
        return self.info.width

    @property
    def key_heads(self) -> int:
        """Returns the key (and value) heads per block."""
        return self.info.key_heads

    @property
    def query_width(self) -> int:
        """Returns the features of all queries of one token."""
        return self.info.heads * self.info.head_size

    @property
    def kv_width(self) -> int:
        """Returns the features of all keys of one token."""
        return self.info.key_heads * self.info.head_size

    @property
    def is_encoder_decoder(self) -> bool:
        """Returns whether it is an encoder with a decoder."""
        return len(self.info.stack_starts) > 1 and not self.image_size

    @property
    def image_size(self) -> int:  # type: ignore[override]  # not a field here
        """Returns the side of the pictures that it reads, pixels; 0: none."""
        return self.info.vision.image_size if self.info.vision else 0

    @property
    def buffer_bytes(self) -> int:
        """Returns the bytes of what the module holds beside its weights."""
        return self.info.buffer_bytes

    @property
    def has_post_norm(self) -> bool:  # type: ignore[override]  # not a field here
        """Returns whether a block norms what its last linear layer gives."""
        return self.info.layer_order[-1] not in dict(self.info.linear_layers)

    @property
    def dropout(self) -> float:
        """Returns the largest share that it drops while training."""
        return self.info.dropout

    @property
    def tied_weights(self) -> frozenset[str]:
        """Returns the embedding, if it is the head too."""
        return self.info.tied_weights

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Returns those that PEFT has for the architecture; all linear layers where it has none."""
        from scalewise.models.hf import introspection

        return introspection.default_lora_targets(self.info, "LORA")

    @property
    def ia3_targets(self) -> tuple[str, ...]:
        """Returns those that PEFT scales in the architecture; all linear layers where none."""
        from scalewise.models.hf import introspection

        return introspection.default_lora_targets(self.info, "IA3")

    def weight_census(self) -> tuple[Weight, ...]:
        """Returns every tensor of ``HuggingFaceModule.named_parameters()``, in its order."""
        return self.info.weight_census

    def flops(self, sequence: int, target: int = 0) -> float:
        """Returns the flops of one forward and backward pass, per token of a ``sequence``.

        6 for each number of a matrix in a block and of the head, and 14 times the row's length
        times the width of the queries for attention in each layer: derived in ``Decoder.flops``.
        The matrices of an encoder multiply its tokens alone, those of a decoder the others; its
        answers attend to themselves and to what the encoder has read. Of a picture each stack has
        its own places.
        """
        matrices = sum(
            weight.numel * self.token_fraction(weight.name, sequence, target)
            for weight in self.weight_census()
            if len(weight.shape) > 1 and weight.role not in ("embedding", "position")
        )
        tied = self.vocabulary * self.width if self.tied_weights else 0
        *_, decoder = self.info.stack_starts
        pairs = decoder * (sequence - target) ** 2
        read, written = sequence, target or sequence
        seen = 0
        if picture := self.info.vision:
            written = sequence + picture.decoder_tokens
            read = written + picture.encoder_tokens
            pairs, seen = (
                (decoder - self.info.stack_starts[2]) * picture.encoder_tokens**2,
                picture.attention_pairs,
            )
        pairs += (self.layers - decoder) * written * read
        attention = 14.0 * (pairs * self.query_width + seen) / sequence
        return 6.0 * (matrices + tied * self.token_fraction("", sequence, target)) + attention

    def token_fraction(self, name: str, sequence: int, target: int) -> float:
        """Returns the share of a row's tokens that a matrix multiplies; other names: the head."""
        layer = name.partition(".lora_")[0].removesuffix(".weight")
        if picture := self.info.vision:
            text = sequence + picture.decoder_tokens * layer.startswith("blocks.")
            return picture.tokens_by_layer.get(layer, text) / sequence
        if not self.is_encoder_decoder:
            return 1.0
        return (sequence - target if layer in self.info.source_layers else target) / sequence

    def skipped_backward_flops(self, trained_names: Collection[str], sequence: int) -> float:
        """Returns them of what reads pictures, where nothing of it is trained."""
        picture = self.info.vision
        if picture is None:
            return 0.0
        start = self.info.stack_starts[2]
        writers = ("head.language_model.", *(f"blocks.{n}." for n in range(start, self.layers)))
        if not all(name.startswith(writers) for name in trained_names):
            return 0.0
        found = 10.0 * picture.attention_pairs  # 14 both ways, and 4 forward
        for weight in self.weight_census():
            places = picture.tokens_by_layer.get(weight.name.removesuffix(".weight"), 0)
            if len(weight.shape) > 1 and not weight.name.startswith(writers):
                # 6 both ways, and 2 forward; of pixels, which have no gradient, 4 and 2.
                further = 3.0 if len(weight.shape) > 2 else 4.0
                found += (2.0 if weight.layer is not None else further) * weight.numel * places
        return found / sequence

    def build_op_graphs(self, forward_spec: ForwardSpec) -> ModelOpGraphs:
        """Returns the parts as they ran once with no memory behind their tensors."""
        if len(self.info.stack_starts) > 1:
            reason = "knows nothing of several stacks, which are planned only by trace"
            raise ConfigError.for_key("plan.method", "ledger", reason, "set plan.method=trace")
        from scalewise.models.hf import fake_tensor_runs

        return fake_tensor_runs.fake_op_graphs(self, forward_spec)

    def tensor_parallel_styles(self) -> dict[str, TPStyle]:
        """Returns the linear layers of blocks as transformers plans them, and what is not of these.

        Where it has no plan, those are cut by their inputs that narrow to the stream.
        """
        plan = dict(self.info.hf_tp_plan)
        table: dict[str, TPStyle] = {}
        for weight in self.weight_census():
            if weight.layer in (None, *self.info.stack_starts):
                block = f"blocks.{weight.layer}."
                name = weight.name.rpartition(".")[0].replace(block, "blocks.*.", 1)
                table.setdefault(name, ENDS.get(weight.role, TPStyle.tokens))  # a bias comes later
        for name, (out, into) in self.info.linear_layers:
            by_shape = TPStyle.row if out == self.width != into else TPStyle.column
            table[f"blocks.*.{name}"] = SPLITS.get(plan.get(name, ""), by_shape)
        return table | ({self.info.tied_head: TPStyle.head} if self.info.tied_head else {})

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Returns heads, the features of what is cut by outputs, and the vocabulary."""
        plan = dict(self.info.hf_tp_plan)
        columns = {
            name: out for name, (out, _) in self.info.linear_layers if plan.get(name) == COLUMN
        }
        heads = {"heads": self.heads, "key_heads": self.key_heads}
        return heads | columns | {"vocabulary": self.vocabulary}

    def with_layers(self, layers: int) -> HuggingFaceConfig:
        """Returns the same model with as many layers."""
        return replace(self, depth=layers)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields a path that leads to no causal language model, or to one without weights."""
        if self.depth is not None and self.depth < 1:
            yield ConfigIssue("model.depth", self.depth, "must be positive", "set model.depth=null")
        elif not self.path:
            fix = "give model.path=FOLDER, or a name on the Hub"
            yield ConfigIssue("model.path", "''", "is empty", fix)
        else:
            yield from self._validate_readable()

    def _validate_readable(self) -> Iterator[ConfigIssue]:
        try:
            census, same = self.weight_census(), replace(self, depth=None).weight_census()
        except ConfigError as error:
            yield from error.issues
            return
        if self.init is InitKind.random:
            return
        if census != same:
            reason = "is not the depth of the weights that it begins with"
            yield ConfigIssue("model.depth", self.depth, reason, "set model.init=random")
        if Path(self.path).expanduser().is_dir():
            from scalewise.models.hf import weights

            yield from weights.weight_issues(self.path)

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what is written for the suite's own decoder alone."""
        yield from hf_issues(self, run)

    def build_meta(self, stage: StageSlice) -> CausalLMModule:
        """Returns the module, or the weights of a part of it, on the meta device."""
        from scalewise.models.hf import introspection

        return introspection.build_meta_module(self.path, self.depth, stage)

    def init_weights(self, module: ModelModule, seed: int) -> None:
        """Draws fresh weights, each from ``seed`` and its name, or reads those at the path.

        Raises ``CheckpointError`` where these do not fit.
        """
        from scalewise.models.hf import weights
        from scalewise.models.hf.causal_lm import CausalLMModule

        assert isinstance(module, CausalLMModule)
        if self.init is InitKind.random:
            weights.init_weights(module, self.weight_census(), seed)
        else:
            weights.load_into(module, self.path, self.depth)

    def export(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Writes a folder that transformers loads."""
        from scalewise.models.hf import weights

        weights.export_folder(state, self, folder)
