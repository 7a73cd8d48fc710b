"""One family of Hugging Face's decoders: its options, config keys and module names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose, log, sqrt

from scalewise.errors import ConfigIssue
from scalewise.models.decoder.architecture import DecoderArchitecture
from scalewise.models.decoder.hf_names import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_NAMES,
    LLAMA_OPTIONS,
)
from scalewise.models.decoder.kinds import RopeScaling
from scalewise.typed_override import format_override

MUP_MULTIPLIERS = ("attention_multiplier", "logit_divisor")
"""Options whose values ``base_width`` changes."""


@dataclass(frozen=True)
class HFFamily:
    """One ``model_type`` of transformers."""

    model_type: str
    """Value of ``model_type`` in config.json."""
    title: str
    """Prefix of the names of transformers' classes."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Values of ``LLAMA_OPTIONS`` that differ from those of Llama."""
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    """Keys of config.json by field of the decoder.

    Without a key, ``kv_heads`` is ``heads`` and ``head_width`` is ``width / heads``.
    """
    defaults: Mapping[str, object] = field(default_factory=lambda: LLAMA_DEFAULTS)
    """transformers' values of missing keys."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys (``attribute_map`` of transformers)."""
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values of further keys that the decoder implements; the first one is the default."""
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    """Names of transformers' modules; those within a block start there, and ``{expert}`` is the
    index of an expert."""
    blocks: str = "model.layers"
    """Name of the list of blocks."""
    head: str = "lm_head"
    """Name of the head of a language model in files; in memory it may be ``lm_head``."""
    interleaves_heads: bool = False
    """Whether projections are joined in one matrix with the rows of each head together."""
    has_conv1d: bool = False
    """Whether the weights of linear layers are stored transposed, as GPT-2's ``Conv1D``."""

    @property
    def is_gemma(self) -> bool:
        """Whether embeddings are multiplied by the root of the width, and layers alternate."""
        return self.model_type.startswith("gemma")

    @property
    def has_latent_attention(self) -> bool:
        """Whether keys and values are projections of a latent (DeepSeek)."""
        return "kv_latent_dim" in self.keys

    def module_names(self, spec: DecoderArchitecture) -> Mapping[str, str]:
        """Return ``names``; DeepSeek's queries have another name without a latent."""
        if spec.query_latent_dim is not None or not self.has_latent_attention:
            return self.names
        queries = dict.fromkeys(("attention.query", "attention.query_rope"), "self_attn.q_proj")
        return {**self.names, **queries}

    def required_options(self, spec: DecoderArchitecture) -> dict[str, object]:
        """Return the values of the options, and of head sizes that the family fixes."""
        implied = {
            "kv_heads": spec.heads,
            "head_width": spec.width // spec.heads,
            "attention_multiplier": 1 / sqrt(spec.head_size),
        }
        if self.is_gemma:
            implied["embedding_multiplier"] = sqrt(spec.width)
        if self.has_latent_attention and score_factor(spec) is not None:
            del implied["attention_multiplier"]
        required = {**LLAMA_OPTIONS, **self.options, **implied}
        if spec.classes:  # a new head
            required["head_bias"] = False
        return {name: value for name, value in required.items() if name not in self.keys}

    def issues(self, spec: DecoderArchitecture) -> Iterator[ConfigIssue]:
        """Yield the options of a decoder that the family does not have."""
        actual = spec.resolved_fields
        reason = f"is not supported by Hugging Face's {self.title} (model.position={spec.position})"
        for name, value in self.required_options(spec).items():
            if not is_equal(actual[name], value):
                if spec.base_width is not None and name in MUP_MULTIPLIERS:
                    yield self._base_model_issue(spec, name, actual[name])
                    continue
                fix = f"set {format_override(f'model.{name}', value)}"
                yield ConfigIssue(f"model.{name}", actual[name], reason, fix)
        if "experts" in self.keys and not spec.experts:
            yield ConfigIssue("model.experts", spec.experts, reason, "set model.experts=8")
        if self.has_latent_attention and not spec.has_latent_attention:
            fix = "set model.kv_latent_dim=512 model.rope_head_dim=64"
            yield ConfigIssue("model.kv_latent_dim", None, reason, fix)

    def _base_model_issue(self, spec: DecoderArchitecture, name: str, value: object) -> ConfigIssue:
        """Issue of a multiplier of muP that ``config.json`` of the family has no key for."""
        reason = f"results in {name}={value:.6g}, which is not supported by Hugging Face's "
        reason += f"{self.title}; Granite's config.json has keys for it"
        fix = "train with the options of Granite: model.norm=rmsnorm model.position=rope "
        fix += "model.activation=swiglu model.bias=false"
        return ConfigIssue("model.base_width", spec.base_width, reason, fix)


def score_factor(spec: DecoderArchitecture) -> float | None:
    """Return ``mscale_all_dim`` of a decoder with YaRN: 0.1 a ln(factor) + 1, squared, multiplies
    the attention scores; None: no value a >= 0 does.

    Source: ``yarn_apply_mscale`` of transformers' ``modeling_deepseek_v2.py``.
    """
    root = sqrt(spec.attention_scale * sqrt(spec.head_size))
    is_yarn = spec.rope_scaling and spec.rope_method is RopeScaling.yarn and spec.rope_factor > 1
    return None if not is_yarn or root < 1 else (root - 1) / (0.1 * log(spec.rope_factor))


def is_equal(actual: object, expected: object) -> bool:
    """Whether two values of an option are equal, apart from the rounding of a float."""
    if isinstance(actual, float) and isinstance(expected, float):
        return isclose(actual, expected, rel_tol=1e-12)
    return actual == expected
