"""Hugging Face's families of decoders: the options, config keys and module names of each.

``hf_config_json.py`` and ``state_dict_adapter.py`` convert configs and weights by these tables, in
both directions. They need no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose, sqrt

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.models.decoder.architecture import DecoderArchitecture
from scalewise.typed_override import format_override

LLAMA_OPTIONS: dict[str, object] = {
    "position": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "qkv_bias": False,
    "qk_norm": "none",
    "experts": None,
    "shared_experts": 0,
    "router_score": "softmax",
    "norm_topk": True,
    "balance_rate": 0.0,
    "norm_placement": "pre",
    "window": None,
    "global_every": None,
    "rope_local_theta": None,
    "no_rope_every": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logit_divisor": 1.0,
}
"""Options of the decoder that not every family has, with their values in Llama."""
LLAMA_KEYS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "feedforward": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "norm_epsilon": "rms_norm_eps",
}
EXPERT_KEYS = {
    **{name: key for name, key in LLAMA_KEYS.items() if name != "feedforward"},
    "experts_per_token": "num_experts_per_tok",
}
NO_HEAD_WIDTH = {name: key for name, key in LLAMA_KEYS.items() if name != "head_width"}
GPT2_KEYS = {
    "vocabulary": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "feedforward": "n_inner",
    "heads": "n_head",
    "norm_epsilon": "layer_norm_epsilon",
    "context": "n_positions",
}
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Other names of GPT-2's keys (``GPT2Config.attribute_map``)."""
LLAMA_DEFAULTS = {"vocab_size": 32000, "num_hidden_layers": 32, "rms_norm_eps": 1e-6}
QWEN_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
}
SILU, TANH_GELU = ("silu", "swish"), ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
GRANITE_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "attention_multiplier",
    "logit_divisor": "logits_scaling",
}
NO_BIAS = dict.fromkeys(("attention_bias", "mlp_bias"), (False,))
LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}
MIXTRAL_NAMES = {
    **LLAMA_NAMES,
    "feedforward.router": "block_sparse_moe.gate",
    "feedforward.experts.gate": "block_sparse_moe.experts.{expert}.w1",
    "feedforward.experts.up": "block_sparse_moe.experts.{expert}.w3",
    "feedforward.experts.down": "block_sparse_moe.experts.{expert}.w2",
}
QWEN_MOE_NAMES = {
    **LLAMA_NAMES,
    "feedforward.router": "mlp.gate",
    **{
        f"feedforward.experts.{name}": f"mlp.experts.{{expert}}.{name}_proj"
        for name in ("gate", "up", "down")
    },
}
POST_NORM_NAMES = {
    **LLAMA_NAMES,
    "attention_post_norm": "post_attention_layernorm",
    "feedforward_norm": "pre_feedforward_layernorm",
    "feedforward_post_norm": "post_feedforward_layernorm",
}
GPT2_NAMES = {
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}


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
    has_conv1d: bool = False
    """Whether the weights of linear layers are stored transposed, as GPT-2's ``Conv1D``."""

    def required_options(self, spec: DecoderArchitecture) -> dict[str, object]:
        """Return the values of the options, and of head sizes that the family fixes."""
        implied = {
            "kv_heads": spec.heads,
            "head_width": spec.width // spec.heads,
            "attention_multiplier": 1 / sqrt(spec.head_size),
        }
        if self.model_type == "gemma3_text":
            implied["embedding_multiplier"] = sqrt(spec.width)
        required = {**LLAMA_OPTIONS, **self.options, **implied}
        return {name: value for name, value in required.items() if name not in self.keys}

    def issues(self, spec: DecoderArchitecture) -> Iterator[ConfigIssue]:
        """Yield the options of a decoder that the family does not have."""
        actual = spec.resolved_fields
        reason = f"is not supported by Hugging Face's {self.title} (model.position={spec.position})"
        for name, value in self.required_options(spec).items():
            if not is_equal(actual[name], value):
                fix = f"set {format_override(f'model.{name}', value)}"
                yield ConfigIssue(f"model.{name}", actual[name], reason, fix)
        if "experts" in self.keys and not spec.experts:
            yield ConfigIssue("model.experts", spec.experts, reason, "set model.experts=8")


LLAMA = HFFamily(
    "llama",
    "Llama",
    defaults={**LLAMA_DEFAULTS, "intermediate_size": 11008},
    fixed={"hidden_act": SILU, **NO_BIAS},
)
FAMILIES = (
    LLAMA,
    HFFamily(
        "mistral",
        "Mistral",
        keys={**LLAMA_KEYS, "window": "sliding_window"},
        defaults={
            **LLAMA_DEFAULTS,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        fixed={"hidden_act": SILU, **NO_BIAS},
    ),
    HFFamily(
        "qwen2",
        "Qwen2",
        {"qkv_bias": True},
        NO_HEAD_WIDTH,
        QWEN_DEFAULTS,
        fixed={"hidden_act": SILU, "use_sliding_window": (False,)},
    ),
    HFFamily(
        "qwen3",
        "Qwen3",
        {"qk_norm": "head"},
        defaults={**QWEN_DEFAULTS, "head_dim": 128},
        fixed={"hidden_act": SILU, "attention_bias": (False,), "use_sliding_window": (False,)},
    ),
    HFFamily(
        "mixtral",
        "Mixtral",
        keys={
            **EXPERT_KEYS,
            "expert_dim": "intermediate_size",
            "experts": "num_local_experts",
            "window": "sliding_window",
        },
        defaults={
            **LLAMA_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        aliases={"num_experts": "num_local_experts"},
        fixed={"hidden_act": SILU, "router_jitter_noise": (0.0,)},
        names=MIXTRAL_NAMES,
    ),
    HFFamily(
        "qwen3_moe",
        "Qwen3Moe",
        {"qk_norm": "head"},
        {
            **EXPERT_KEYS,
            "expert_dim": "moe_intermediate_size",
            "experts": "num_experts",
            "norm_topk": "norm_topk_prob",
        },
        {
            **QWEN_DEFAULTS,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        {"num_local_experts": "num_experts"},
        {
            "hidden_act": SILU,
            "attention_bias": (False,),
            "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
        QWEN_MOE_NAMES,
    ),
    HFFamily(
        "olmo2",
        "Olmo2",
        {"qk_norm": "projection", "norm_placement": "post"},
        NO_HEAD_WIDTH,
        {**LLAMA_DEFAULTS, "vocab_size": 50304, "intermediate_size": 11008, "rms_norm_eps": 1e-5},
        fixed={"hidden_act": SILU, "attention_bias": (False,)},
        names=POST_NORM_NAMES,
    ),
    HFFamily(
        "granite",
        "Granite",
        keys={**NO_HEAD_WIDTH, **GRANITE_MULTIPLIERS},
        defaults={
            **LLAMA_DEFAULTS,
            "intermediate_size": 11008,
            **dict.fromkeys(GRANITE_MULTIPLIERS.values(), 1.0),
        },
        fixed={"hidden_act": SILU, **NO_BIAS},
    ),
    HFFamily(
        "smollm3",
        "SmolLM3",
        keys={**NO_HEAD_WIDTH, "no_rope_every": "no_rope_layer_interval"},
        defaults={
            "vocab_size": 128256,
            "num_hidden_layers": 36,
            "intermediate_size": 11008,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
        },
        fixed={"hidden_act": SILU, **NO_BIAS, "use_sliding_window": (False,)},
    ),
    HFFamily(
        "gemma3_text",
        "Gemma3",
        {
            "norm": "zero_centered_rmsnorm",
            "activation": "geglu",
            "qk_norm": "head",
            "norm_placement": "sandwich",
        },
        {
            **LLAMA_KEYS,
            "window": "sliding_window",
            "global_every": "sliding_window_pattern",
            "rope_local_theta": "rope_local_base_freq",
            "attention_multiplier": "query_pre_attn_scalar",
        },
        {
            "vocab_size": 262208,
            "num_hidden_layers": 26,
            "intermediate_size": 9216,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "final_logit_softcapping": (None,),
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (False,),
        },
        names=POST_NORM_NAMES,
    ),
    HFFamily(
        "gpt2",
        "GPT-2",
        {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
        GPT2_KEYS,
        {"vocab_size": 50257, "n_layer": 12, "layer_norm_epsilon": 1e-5, "n_positions": 1024},
        GPT2_ALIASES,
        {
            "activation_function": TANH_GELU,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        GPT2_NAMES,
        "transformer.h",
        has_conv1d=True,
    ),
)
"""Families in the order in which exports choose one."""
FAMILY_BY_TYPE = {family.model_type: family for family in FAMILIES}


def find_family(spec: DecoderArchitecture) -> HFFamily:
    """Return the first family with the architecture of a decoder.

    Raises:
        ConfigError: There is none. The issues name the options that differ from the most similar
            family with the same position encoding.
    """
    closest: list[ConfigIssue] | None = None
    for family in FAMILIES:
        issues = list(family.issues(spec))
        if not issues:
            return family
        has_position = family.required_options(spec)["position"] == spec.position
        if has_position and (closest is None or len(issues) < len(closest)):
            closest = issues
    assert closest
    raise ConfigError(closest)


def is_equal(actual: object, expected: object) -> bool:
    """Whether two values of an option are equal, apart from the rounding of a float."""
    if isinstance(actual, float) and isinstance(expected, float):
        return isclose(actual, expected, rel_tol=1e-12)
    return actual == expected
