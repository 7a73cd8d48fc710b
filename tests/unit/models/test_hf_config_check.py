"""config.json next to weights: a decoder that computes something else is rejected."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.activations import ACT2FN

from scalewise.models.build import build_model
from scalewise.models.decoder import hf_config_check as beside_of
from scalewise.models.decoder.config import ActivationKind, DecoderConfig, NormKind, PositionKind
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
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
OTHER_BASE = {"rope_type": "default", "rope_theta": 5e5}
OF_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
OLD = {"model_type": "llama", **SIZES}
"""As transformers wrote it before its version 5."""
EIGHT = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4}
ELSEWHERE = "set model=hf model.path="
AGAIN = "download config.json again"


def beside(folder: Path, config: PreTrainedConfig | dict[str, Any] | str) -> str:
    """Write a config.json and returns its folder."""
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
        (LLAMA, OLD, []),
        (GPT2, GPT2Config(**OF_GPT2), []),
        (LLAMA, LlamaConfig(**EIGHT), ["heads=8", "kv_heads=4", "head_width=4"]),
        (LLAMA, LlamaConfig(**SIZES | {"rms_norm_eps": 1e-6}), ["norm_epsilon=1e-06"]),
        (LLAMA, LlamaConfig(**SIZES, rope_parameters=OTHER_BASE), ["rope_theta=500000.0"]),
        (LLAMA, OLD | {"rope_theta": 5e5, "rope_scaling": None}, ["rope_theta=500000.0"]),
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
        (LLAMA, LlamaConfig(**SIZES, rope_parameters=YARN), [ELSEWHERE]),
        (LLAMA, MistralConfig(**SIZES, sliding_window=16), ["context=16"]),
        (LLAMA, Qwen2Config(**SIZES), [ELSEWHERE]),
        (LLAMA, GPT2Config(**OF_GPT2), [ELSEWHERE]),
        (GPT2, LlamaConfig(**SIZES), [ELSEWHERE]),
        (GPT2, GPT2Config(**OF_GPT2 | {"n_head": 8}), ["heads=8"]),
        (LLAMA, "{", [AGAIN]),
        (LLAMA, "[1]", [AGAIN]),
        (LLAMA, OLD | {"rope_theta": "10000"}, [AGAIN]),
        (LLAMA, OLD | {"rope_parameters": OTHER_BASE | {"rope_theta": "5e5"}}, [AGAIN]),
        (LLAMA, OLD | {"rms_norm_eps": "1e-5"}, [AGAIN]),
        (LLAMA, OLD | {"vocab_size": "64"}, [AGAIN]),
        (LLAMA, {"model_type": "llama"}, [AGAIN]),
    ],
)
def test_decoder_is_compared_with_config_json(
    spec: DecoderConfig,
    config: PreTrainedConfig | dict[str, Any] | str,
    fixes: list[str],
    tmp_path: Path,
) -> None:
    begun = dataclasses.replace(spec, weights=beside(tmp_path, config))
    found = [issue.fix for issue in begun.validate()]
    assert len(found) == len(fixes)
    assert all(fix in said for fix, said in zip(fixes, found, strict=True)), found


@pytest.mark.parametrize("spec", [LLAMA, GPT2, dataclasses.replace(LLAMA, rope_scaling=True)])
def test_decoder_loads_its_own_exports(spec: DecoderConfig, tmp_path: Path) -> None:
    _, config = to_hf_state_dict(build_model(spec, seed=1).state_dict(), spec)
    begun = dataclasses.replace(spec, weights=beside(tmp_path, config))
    assert list(begun.validate()) == []


def test_weight_file_uses_the_config_of_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    begun = dataclasses.replace(LLAMA, weights=str(file))
    assert list(begun.validate()) == []
    beside(tmp_path, LlamaConfig(**EIGHT))
    assert "model.heads" in [issue.key for issue in begun.validate()]


CLASSES = {"llama": LlamaConfig, "mistral": MistralConfig, "gpt2": GPT2Config}


@pytest.mark.parametrize("kind", CLASSES)
def test_config_keys_are_all_classified(kind: str) -> None:
    """Fails where transformers adds a key: decide then what it changes."""
    keys = CLASSES[kind]().to_dict().keys() | CLASSES[kind].attribute_map
    fixed = beside_of.FIXED_VALUES[kind] | beside_of.FIXED_FOR_ALL
    known = beside_of.IGNORED_KEYS | fixed.keys() | {*beside_of.COMPARED_KEYS[kind]}
    assert keys - known - beside_of.GPT2_ALIASES.keys() == set()
    assert not beside_of.IGNORED_KEYS & {*fixed, *beside_of.COMPARED_KEYS[kind]}
    defaults = CLASSES[kind]().to_dict()
    for key, values in beside_of.FIXED_VALUES[kind].items():
        assert defaults.get(key, False) == values[0], key
    assert CLASSES["gpt2"].attribute_map == beside_of.GPT2_ALIASES


@pytest.mark.parametrize("kind", CLASSES)
def test_absent_config_keys_have_transformers_defaults(kind: str) -> None:
    config = CLASSES[kind]()
    needed = {"hidden_size", "num_attention_heads"}
    read = beside_of._gpt2_fields if kind == "gpt2" else beside_of._llama_fields
    given = {key: getattr(config, key) for key in needed} | {"model_type": kind}
    assert read(given) == read(config.to_dict())


def test_accepted_activations_equal_the_decoder() -> None:
    x = torch.linspace(-6, 6, 1001)
    for name in beside_of.TANH_GELU:
        expected = torch.nn.functional.gelu(x, approximate="tanh")
        torch.testing.assert_close(ACT2FN[name](x), expected, rtol=1e-5, atol=1e-6)
    for name in beside_of.SILU:
        torch.testing.assert_close(ACT2FN[name](x), torch.nn.functional.silu(x))


SAME: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"hidden_act": "swish"}),
    ("llama", {"head_dim": 16}),
    ("llama", {"rms_norm_eps": 1e-2}),
    ("llama", {"rope_theta": 100.0}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("llama", {"rope_scaling": {**ROTATION, "rope_theta": 100.0}, "rope_parameters": OTHER_BASE}),
    ("llama", {"rope_scaling": {**ROTATION, "original_max_position_embeddings": 8}}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"pretraining_tp": 2}),
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"attention_bias": False, "mlp_bias": False}),
    ("gpt2", {}),
    ("gpt2", {"activation_function": "gelu_fast"}),
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("gpt2", {"layer_norm_epsilon": 1e-2}),
    ("gpt2", {"n_inner": 64}),
    ("gpt2", {"tie_word_embeddings": False}),
]
OTHER: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ("llama", {"rope_scaling": {**ROTATION, "partial_rotary_factor": 0.5}}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"logits_scaling": 8.0}),
    ("llama", {"residual_multiplier": 0.2}),
    ("llama", {"final_logit_softcapping": 1.0}),
    ("llama", {"is_causal": False}),
    ("mistral", {"hidden_act": "relu"}),
    ("gpt2", {"activation_function": "relu"}),
    ("gpt2", {"activation_function": "gelu"}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
]


@pytest.mark.parametrize(
    ("kind", "more"), [*SAME, *OTHER], ids=[f"{kind}-{it}" for kind, it in [*SAME, *OTHER]]
)
def test_config_is_rejected_or_gives_equal_logits(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Suggested values of the decoder's own options are taken until nothing is left."""
    sizes = OF_GPT2 if kind == "gpt2" else SIZES
    config = AutoConfig.for_model(kind, **sizes | more, bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        reference = AutoModelForCausalLM.from_config(config).eval()
        for parameter in reference.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text("utf-8"))
    if "rope_scaling" in more:  # as files of transformers 4 have it
        text.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(text | more), "utf-8")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tied = bool(config.tie_word_embeddings)
    begun = dataclasses.replace(GPT2 if kind == "gpt2" else LLAMA, weights=str(tmp_path), tied=tied)
    while found := list(begun.validate()):
        assert all(issue.fix for issue in found)
        if (kind, more) in OTHER:
            assert "model.weights" in [issue.key for issue in found]
            return
        values = {}
        for issue in found:
            key, _, value = issue.fix.removeprefix("set model.").partition("=")
            values[key] = json.loads(value)
        begun = dataclasses.replace(begun, **values)
    tokens = torch.arange(2 * 24).reshape(2, 24)[:, : begun.context]
    with torch.no_grad():
        actual, expected = build_model(begun, 1).eval()(tokens), reference(tokens).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_unknown_config_key_is_named_with_a_fix(tmp_path: Path) -> None:
    config = {**OLD, "residual_multiplier": 0.2, "note": None}
    begun = dataclasses.replace(LLAMA, weights=beside(tmp_path, config))
    (issue,) = begun.validate()
    assert "residual_multiplier=0.2" in issue.reason
    assert "model=hf" in issue.fix
    assert "remove residual_multiplier" in issue.fix
