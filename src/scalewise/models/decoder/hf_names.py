"""Names in Hugging Face's decoders: keys of config.json with their defaults, and torch modules."""

from __future__ import annotations

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
    "residual": "sequential",
    "head_bias": False,
    "rotary_fraction": 1.0,
    "kv_latent_dim": None,
    "query_latent_dim": None,
    "rope_head_dim": None,
    "value_head_dim": None,
    "dense_layers": 0,
    "routed_scaling": 1.0,
    "window": None,
    "global_every": None,
    "rope_local_theta": None,
    "no_rope_every": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logit_divisor": 1.0,
    "attention_softcap": None,
    "logit_softcap": None,
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
DEEPSEEK_KEYS = {
    **LLAMA_KEYS,
    "head_width": "qk_nope_head_dim",
    "kv_latent_dim": "kv_lora_rank",
    "query_latent_dim": "q_lora_rank",
    "rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "routed_scaling": "routed_scaling_factor",
}
"""Keys of DeepSeek; ``qk_nope_head_dim`` is ``head_width`` without ``rope_head_dim``."""
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
DEEPSEEK_NAMES = {
    **QWEN_MOE_NAMES,
    "attention.query_latent": "self_attn.q_a_proj",
    "attention.query_latent_norm": "self_attn.q_a_layernorm",
    **dict.fromkeys(("attention.query", "attention.query_rope"), "self_attn.q_b_proj"),
    **dict.fromkeys(("attention.kv_latent", "attention.key_rope"), "self_attn.kv_a_proj_with_mqa"),
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("attention.key", "attention.value"), "self_attn.kv_b_proj"),
    **{
        f"feedforward.shared.{name}": f"mlp.shared_experts.{name}_proj"
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
GPT_NEOX_KEYS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "feedforward": "intermediate_size",
    "heads": "num_attention_heads",
    "norm_epsilon": "layer_norm_eps",
    "rotary_fraction": "rotary_pct",
}
PHI_KEYS = {
    **GPT_NEOX_KEYS,
    "kv_heads": "num_key_value_heads",
    "rotary_fraction": "partial_rotary_factor",
}
GPT_NEOX_NAMES = {
    "embedding": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "attention_norm": "input_layernorm",
    **dict.fromkeys(
        ("attention.query", "attention.key", "attention.value"), "attention.query_key_value"
    ),
    "attention.output": "attention.dense",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward.up": "mlp.dense_h_to_4h",
    "feedforward.down": "mlp.dense_4h_to_h",
}
PHI_NAMES = {
    **{name: hf_name for name, hf_name in LLAMA_NAMES.items() if name.startswith("attention.")},
    "embedding": "model.embed_tokens",
    "norm": "model.final_layernorm",
    "attention_norm": "input_layernorm",
    "attention.output": "self_attn.dense",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
}
