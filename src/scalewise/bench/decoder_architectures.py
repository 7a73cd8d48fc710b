"""Overrides that give a small decoder the architecture of a published one."""

QWEN = ("model.qk_norm=head", "model.qkv_bias=true", "model.head_width=64")
_MULTIPLIERS = (
    *("model.embedding_multiplier=2.0", "model.residual_multiplier=0.5"),
    *("model.attention_multiplier=0.3", "model.logit_divisor=2.0"),
)
OLMO2 = ("model.qk_norm=projection", "model.norm_placement=post", *_MULTIPLIERS)
GEMMA3 = (
    *("model.norm=zero_centered_rmsnorm", "model.norm_placement=sandwich"),
    *("model.activation=geglu", "model.qk_norm=head", "model.window=32", "model.global_every=2"),
    *("model.rope_local_theta=100.0", "model.embedding_multiplier=8.0"),
)
GEMMA2 = (
    *("model.norm=zero_centered_rmsnorm", "model.norm_placement=sandwich", "model.kv_heads=2"),
    *("model.activation=geglu", "model.window=32", "model.global_every=2"),
    *("model.attention_softcap=50.0", "model.logit_softcap=30.0"),
)
PHI = (
    *("model.norm=layernorm", "model.activation=gelu", "model.bias=true", "model.tied=false"),
    *("model.residual=parallel_one_norm", "model.rotary_fraction=0.5", "model.head_bias=true"),
)
GPT_NEOX = (*PHI, "model.residual=parallel", "model.head_bias=false")
MLA = (
    *("model.kv_latent_dim=48", "model.query_latent_dim=64", "model.head_width=48"),
    *("model.kv_heads=null", "model.rope_head_dim=16", "model.experts=4", "model.expert_dim=64"),
    *("model.shared_experts=1", "model.dense_layers=1", "model.norm_topk=false"),
)
