"""Hugging Face's families of decoders: the options, config keys and module names of each.

``hf_config_json.py`` and ``state_dict_adapter.py`` convert configs and weights by these tables, in
both directions. They need no torch.
"""

from __future__ import annotations

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.models.decoder.architecture import DecoderArchitecture
from scalewise.models.decoder.hf_family import HFFamily
from scalewise.models.decoder.hf_names import (
    DEEPSEEK_KEYS,
    DEEPSEEK_NAMES,
    EXPERT_KEYS,
    GPT2_ALIASES,
    GPT2_KEYS,
    GPT2_NAMES,
    GPT_NEOX_KEYS,
    GPT_NEOX_NAMES,
    GRANITE_MULTIPLIERS,
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    MIXTRAL_NAMES,
    NO_BIAS,
    NO_HEAD_WIDTH,
    PHI_KEYS,
    PHI_NAMES,
    POST_NORM_NAMES,
    QWEN_DEFAULTS,
    QWEN_MOE_NAMES,
    SILU,
    TANH_GELU,
)

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
        "deepseek_v2",
        "DeepseekV2",
        {"norm_topk": False},
        DEEPSEEK_KEYS,
        {
            "vocab_size": 102400,
            "num_hidden_layers": 32,
            "intermediate_size": 11008,
            "rms_norm_eps": 1e-6,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
        },
        {"num_experts": "n_routed_experts"},
        {
            "hidden_act": SILU,
            **NO_BIAS,
            "topk_method": ("greedy",),
            "norm_topk_prob": (False,),
            **dict.fromkeys(("n_group", "topk_group"), (None, 1)),
        },
        DEEPSEEK_NAMES,
        interleaves_heads=True,
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
        "gemma2",
        "Gemma2",
        {
            "norm": "zero_centered_rmsnorm",
            "activation": "geglu",
            "norm_placement": "sandwich",
        },
        {
            **LLAMA_KEYS,
            "window": "sliding_window",
            "global_every": "layer_types",
            "attention_multiplier": "query_pre_attn_scalar",
            "attention_softcap": "attn_logit_softcapping",
            "logit_softcap": "final_logit_softcapping",
        },
        {
            "vocab_size": 256000,
            "num_hidden_layers": 26,
            "intermediate_size": 9216,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "layer_types": 2,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {"hidden_act": "hidden_activation"},
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "use_bidirectional_attention": (None, False),
        },
        names=POST_NORM_NAMES,
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
        "phi",
        "Phi",
        {
            "norm": "layernorm",
            "activation": "gelu",
            "bias": True,
            "residual": "parallel_one_norm",
            "head_bias": True,
        },
        PHI_KEYS,
        {
            "vocab_size": 51200,
            "num_hidden_layers": 24,
            "intermediate_size": 8192,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        fixed={"hidden_act": TANH_GELU, "qk_layernorm": (False,)},
        names=PHI_NAMES,
    ),
    HFFamily(
        "gpt_neox",
        "GPTNeoX",
        {"norm": "layernorm", "activation": "gelu_exact", "bias": True, "residual": "parallel"},
        GPT_NEOX_KEYS,
        {
            "vocab_size": 50432,
            "num_hidden_layers": 44,
            "intermediate_size": 24576,
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.25,
        },
        {"rotary_emb_base": "rope_theta"},
        {"hidden_act": ("gelu",), "attention_bias": (True,), "use_parallel_residual": (True,)},
        GPT_NEOX_NAMES,
        "gpt_neox.layers",
        "embed_out",
        interleaves_heads=True,
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
