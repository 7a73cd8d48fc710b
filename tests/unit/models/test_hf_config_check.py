"""``config.json`` next to weights: a decoder that computes other outputs is rejected."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.decoder_configs import ENUMS
from fixtures.deepseek_configs import DEEPSEEK_SIZES, DEEPSEEK_YARN
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.activations import ACT2FN

from scalewise.models.build import build_model
from scalewise.models.decoder import hf_config_check
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.hf_config_json import read_fields
from scalewise.models.decoder.hf_families import FAMILY_BY_TYPE
from scalewise.models.decoder.hf_names import GPT2_ALIASES, SILU, TANH_GELU
from scalewise.models.decoder.kinds import ActivationKind, NormKind, PositionKind
from scalewise.models.decoder.state_dict_adapter import to_hf_state_dict

LLAMA = DecoderConfig(64, 32, 32, 2, 4, 48, kv_heads=2)
GPT2 = dataclasses.replace(
    LLAMA,
    kv_heads=None,
    position=PositionKind.learned,
    norm=NormKind.layernorm,
    activation=ActivationKind.gelu,
    bias=True,
    tied=True,
    feedforward=128,
)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
ROTATION = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
OTHER_ROPE_THETA = {"rope_type": "default", "rope_theta": 5e5}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
NEOX_SIZES = {
    key: size for key, size in SIZES.items() if key not in ("num_key_value_heads", "rms_norm_eps")
}
ALTERNATING = ["sliding_attention", "full_attention"]
LOCAL_LINEAR = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
}
CONFIG_OF_OLD_VERSION = {"model_type": "llama", **SIZES}
"""Format of transformers before version 5."""
EIGHT_HEADS = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4}
USE_HF_MODEL = "set model=hf model.path="
DOWNLOAD_AGAIN = "download config.json again"


def write_config(folder: Path, config: PreTrainedConfig | dict[str, Any] | str) -> str:
    """Write ``config.json`` and return its folder."""
    if isinstance(config, PreTrainedConfig):
        config.save_pretrained(folder)
    else:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("spec", "config", "fixes"),
    [
        (LLAMA, LlamaConfig(**SIZES), []),
        (LLAMA, MistralConfig(**SIZES, sliding_window=32), []),
        (LLAMA, CONFIG_OF_OLD_VERSION, []),
        (GPT2, GPT2Config(**GPT2_SIZES), []),
        (LLAMA, LlamaConfig(**SIZES, tie_word_embeddings=True), []),
        (dataclasses.replace(LLAMA, tied=True), LlamaConfig(**SIZES), ["tied=false"]),
        (LLAMA, LlamaConfig(**EIGHT_HEADS), ["heads=8", "kv_heads=4", "head_width=4"]),
        (LLAMA, LlamaConfig(**SIZES | {"rms_norm_eps": 1e-6}), ["norm_epsilon=1e-06"]),
        (LLAMA, LlamaConfig(**SIZES, rope_parameters=OTHER_ROPE_THETA), ["rope_theta=500000.0"]),
        (
            LLAMA,
            CONFIG_OF_OLD_VERSION | {"rope_theta": 5e5, "rope_scaling": None},
            ["rope_theta=500000.0"],
        ),
        (
            LLAMA,
            LlamaConfig(**SIZES, rope_parameters=ROTATION),
            ["rope_scaling=true", "rope_original_context=16"],
        ),
        (
            dataclasses.replace(LLAMA, rope_scaling=True),
            LlamaConfig(**SIZES),
            ["rope_scaling=false"],
        ),
        (
            LLAMA,
            LlamaConfig(**SIZES, rope_parameters=YARN),
            [
                *("rope_scaling=true", "rope_method=yarn", "rope_factor=2.0"),
                *("rope_high_frequency=32.0", "rope_original_context=32"),
            ],
        ),
        (LLAMA, LlamaConfig(**SIZES, rope_parameters=DYNAMIC), [USE_HF_MODEL]),
        (LLAMA, MistralConfig(**SIZES, sliding_window=16), ["window=16"]),
        (LLAMA, Olmo2Config(**SIZES), ["qk_norm=projection", "norm_placement=post"]),
        (
            dataclasses.replace(LLAMA, window=16, attention_softcap=50.0),
            Gemma2Config(**SIZES, head_dim=8, sliding_window=16),
            [
                *("norm=zero_centered_rmsnorm", "activation=geglu", "norm_placement=sandwich"),
                *("global_every=2", "embedding_multiplier=5.656854249492381"),
                *("logit_softcap=30.0", "attention_multiplier=0.0625"),
            ],
        ),
        (LLAMA, GraniteConfig(**SIZES), ["attention_multiplier=1.0"]),
        (LLAMA, SmolLM3Config(**SIZES), ["rope_theta=2000000.0"]),
        (
            dataclasses.replace(LLAMA, layers=4),
            SmolLM3Config(**SIZES | {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
            ["no_rope_every=2", "rope_theta=2000000.0"],
        ),
        (LLAMA, Qwen2Config(**SIZES), ["qkv_bias=true"]),
        (LLAMA, Qwen3Config(**SIZES, head_dim=8), ["qk_norm=head"]),
        (LLAMA, OPTConfig(), [USE_HF_MODEL]),
        (LLAMA, GPT2Config(**GPT2_SIZES), [USE_HF_MODEL]),
        (GPT2, LlamaConfig(**SIZES), [USE_HF_MODEL]),
        (GPT2, GPT2Config(**GPT2_SIZES | {"n_head": 8}), ["heads=8"]),
        (LLAMA, "{", [DOWNLOAD_AGAIN]),
        (LLAMA, "[1]", [DOWNLOAD_AGAIN]),
        (LLAMA, CONFIG_OF_OLD_VERSION | {"rope_theta": "10000"}, [DOWNLOAD_AGAIN]),
        (
            LLAMA,
            CONFIG_OF_OLD_VERSION | {"rope_parameters": OTHER_ROPE_THETA | {"rope_theta": "5e5"}},
            [DOWNLOAD_AGAIN],
        ),
        (LLAMA, CONFIG_OF_OLD_VERSION | {"rms_norm_eps": "1e-5"}, [DOWNLOAD_AGAIN]),
        (LLAMA, CONFIG_OF_OLD_VERSION | {"vocab_size": "64"}, [DOWNLOAD_AGAIN]),
        (LLAMA, {"model_type": "llama"}, [DOWNLOAD_AGAIN]),
    ],
)
def test_decoder_is_compared_with_config_json(
    spec: DecoderConfig,
    config: PreTrainedConfig | dict[str, Any] | str,
    fixes: list[str],
    tmp_path: Path,
) -> None:
    pretrained = dataclasses.replace(spec, weights=write_config(tmp_path, config))
    actual_fixes = [issue.fix for issue in pretrained.validate()]
    assert len(actual_fixes) == len(fixes)
    assert all(fix in actual_fix for fix, actual_fix in zip(fixes, actual_fixes, strict=True)), (
        actual_fixes
    )


@pytest.mark.parametrize("spec", [LLAMA, GPT2, dataclasses.replace(LLAMA, rope_scaling=True)])
def test_decoder_loads_its_own_exports(spec: DecoderConfig, tmp_path: Path) -> None:
    _, config = to_hf_state_dict(build_model(spec, seed=1).state_dict(), spec)
    pretrained = dataclasses.replace(spec, weights=write_config(tmp_path, config))
    assert list(pretrained.validate()) == []


def test_weight_file_uses_the_config_of_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    pretrained = dataclasses.replace(LLAMA, weights=str(file))
    assert list(pretrained.validate()) == []
    write_config(tmp_path, LlamaConfig(**EIGHT_HEADS))
    assert "model.heads" in [issue.key for issue in pretrained.validate()]


CLASSES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "deepseek_v2": DeepseekV2Config,
    "olmo2": Olmo2Config,
    "granite": GraniteConfig,
    "smollm3": SmolLM3Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "gpt_neox": GPTNeoXConfig,
    "phi": PhiConfig,
    "gpt2": GPT2Config,
}


@pytest.mark.parametrize("kind", CLASSES)
def test_config_keys_are_all_classified(kind: str) -> None:
    """Fails when transformers adds a key, which must then be classified."""
    family = FAMILY_BY_TYPE[kind]
    keys = CLASSES[kind]().to_dict().keys() | CLASSES[kind].attribute_map
    fixed = {**family.fixed, **hf_config_check.FIXED_FOR_ALL}
    compared_keys = {*family.keys.values(), *hf_config_check.compared_keys(family)}
    assert keys - hf_config_check.IGNORED_KEYS - fixed.keys() - compared_keys == set()
    assert not hf_config_check.IGNORED_KEYS & (fixed.keys() | compared_keys - family.aliases.keys())
    defaults = CLASSES[kind]().to_dict()
    for key, values in family.fixed.items():
        assert defaults.get(key, False) == values[0], key
    assert CLASSES["gpt2"].attribute_map == GPT2_ALIASES


def test_config_classes_are_those_of_all_families() -> None:
    assert CLASSES.keys() == FAMILY_BY_TYPE.keys()


@pytest.mark.parametrize("kind", CLASSES)
def test_absent_config_keys_have_transformers_defaults(kind: str) -> None:
    config, family = CLASSES[kind](), FAMILY_BY_TYPE[kind]
    required_keys = {"hidden_size", "num_attention_heads"}
    config_values = {key: getattr(config, key) for key in required_keys} | {"model_type": kind}
    assert read_fields(family, config_values) == read_fields(family, config.to_dict())


def test_accepted_activations_equal_the_decoder() -> None:
    x = torch.linspace(-6, 6, 1001)
    for name in TANH_GELU:
        expected = torch.nn.functional.gelu(x, approximate="tanh")
        torch.testing.assert_close(ACT2FN[name](x), expected, rtol=1e-5, atol=1e-6)
    for name in SILU:
        torch.testing.assert_close(ACT2FN[name](x), torch.nn.functional.silu(x))


EQUAL_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"hidden_act": "swish"}),
    ("llama", {"head_dim": 16}),
    ("llama", {"rms_norm_eps": 1e-2}),
    ("llama", {"rope_theta": 100.0}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    (
        "llama",
        {"rope_scaling": {**ROTATION, "rope_theta": 100.0}, "rope_parameters": OTHER_ROPE_THETA},
    ),
    ("llama", {"rope_scaling": {**ROTATION, "original_max_position_embeddings": 8}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}}),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 8.0}}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"pretraining_tp": 2}),
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"attention_bias": False, "mlp_bias": False}),
    ("qwen2", {}),
    ("qwen2", {"sliding_window": 4, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
    ("olmo2", {"pad_token_id": None}),
    ("granite", {"attention_multiplier": 0.3, "logits_scaling": 8.0}),
    ("smollm3", {"pad_token_id": None, "no_rope_layers": [1, 0]}),
    ("gemma3_text", {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2}),
    ("gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 16}),
    ("gemma2", {"head_dim": 8, "sliding_window": 4}),
    ("gemma2", {"head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 16}),
    ("gemma2", {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
    ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gpt_neox", {}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 50.0, "layer_norm_eps": 1e-2}),
    ("gpt_neox", {"tie_word_embeddings": True}),
    ("phi", {}),
    ("phi", {"partial_rotary_factor": 1.0, "rope_theta": 50.0}),
    ("phi", {"rope_scaling": {"type": "linear", "factor": 4.0}, "partial_rotary_factor": 0.25}),
    ("deepseek_v2", DEEPSEEK_SIZES),
    ("deepseek_v2", {**DEEPSEEK_SIZES, "q_lora_rank": None, "routed_scaling_factor": 2.0}),
    ("deepseek_v2", {**DEEPSEEK_SIZES, "first_k_dense_replace": 0, "norm_topk_prob": False}),
    ("deepseek_v2", {**DEEPSEEK_SIZES, "rope_scaling": DEEPSEEK_YARN, "n_group": 1}),
    (
        "deepseek_v2",
        {**DEEPSEEK_SIZES, "rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "beta_fast": 8.0}},
    ),
    ("gpt2", {}),
    ("gpt2", {"activation_function": "gelu_fast"}),
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("gpt2", {"layer_norm_epsilon": 1e-2}),
    ("gpt2", {"n_inner": 64}),
    ("gpt2", {"tie_word_embeddings": False}),
]
DIFFERENT_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ("llama", {"rope_scaling": {**ROTATION, "partial_rotary_factor": 0.5}}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"logits_scaling": 8.0}),
    ("llama", {"residual_multiplier": 0.2}),
    ("llama", {"final_logit_softcapping": 1.0}),
    ("llama", {"is_causal": False}),
    ("mistral", {"hidden_act": "relu"}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ("qwen3", {"attention_bias": True}),
    ("smollm3", {"pad_token_id": None, "no_rope_layers": [0, 1]}),
    ("gemma3_text", {"head_dim": 8, "final_logit_softcapping": 30.0}),
    ("gemma2", {"head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]}),
    ("gemma3_text", {"head_dim": 8, "layer_types": ALTERNATING, "rope_parameters": LOCAL_LINEAR}),
    ("llama", {"rope_parameters": {"full_attention": {**OTHER_ROPE_THETA}}}),
    ("mistral", {"sliding_window": 4, "layer_types": ALTERNATING}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"attention_bias": False}),
    ("gpt_neox", {"hidden_act": "gelu_new"}),
    ("phi", {"qk_layernorm": True}),
    ("phi", {"hidden_act": "gelu"}),
    ("deepseek_v2", {**DEEPSEEK_SIZES, "attention_bias": True}),
    (
        "deepseek_v2",
        {**DEEPSEEK_SIZES, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    ),
    ("gpt2", {"activation_function": "relu"}),
    ("gpt2", {"activation_function": "gelu"}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
]


@pytest.mark.parametrize(
    ("kind", "more"),
    [*EQUAL_CONFIGS, *DIFFERENT_CONFIGS],
    ids=[f"{kind}-{it}" for kind, it in [*EQUAL_CONFIGS, *DIFFERENT_CONFIGS]],
)
def test_config_is_rejected_or_gives_equal_logits(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Applies suggested values of decoder options until none remains."""
    sizes = {"gpt2": GPT2_SIZES, "gpt_neox": NEOX_SIZES, "phi": NEOX_SIZES}.get(kind, SIZES)
    config = AutoConfig.for_model(kind, **sizes | more, bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        reference = AutoModelForCausalLM.from_config(config).eval()
        for parameter in reference.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text("utf-8"))
    if "rope_scaling" in more:  # as in files of transformers 4
        text.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(text | more), "utf-8")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tied = bool(config.tie_word_embeddings)
    pretrained = dataclasses.replace(
        GPT2 if kind == "gpt2" else LLAMA, weights=str(tmp_path), tied=tied
    )
    while issues := list(pretrained.validate()):
        assert all(issue.fix for issue in issues)
        if (kind, more) in DIFFERENT_CONFIGS:
            assert "model.weights" in [issue.key for issue in issues]
            return
        values = {}
        for issue in issues:
            key, _, value = issue.fix.removeprefix("set model.").partition("=")
            values[key] = ENUMS[key](value) if key in ENUMS else json.loads(value)
        pretrained = dataclasses.replace(pretrained, **values)
    tokens = torch.arange(2 * 24).reshape(2, 24)[:, : pretrained.context]
    with torch.no_grad():
        actual, expected = build_model(pretrained, 1).eval()(tokens), reference(tokens).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_unknown_config_key_is_named_with_a_fix(tmp_path: Path) -> None:
    config = {**CONFIG_OF_OLD_VERSION, "residual_multiplier": 0.2, "note": None}
    pretrained = dataclasses.replace(LLAMA, weights=write_config(tmp_path, config))
    (issue,) = pretrained.validate()
    assert "residual_multiplier=0.2" in issue.reason
    assert "model=hf" in issue.fix
    assert "remove residual_multiplier" in issue.fix
