"""What the config.json beside weights says: a decoder that computes something else is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from scalewise.models.decoder.spec import Activation, Decoder, Norm, Position
from scalewise.models.decoder.weights import to_hugging_face

LLAMA = Decoder(64, 32, 32, 2, 4, 48, kv_heads=2)
GPT2 = dataclasses.replace(
    LLAMA,
    kv_heads=None,
    position=Position.learned,
    norm=Norm.layernorm,
    activation=Activation.gelu,
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
AGAIN = "fetch it again"


def beside(folder: Path, config: PreTrainedConfig | dict[str, Any] | str) -> str:
    """Writes a config.json and returns its folder."""
    if isinstance(config, PreTrainedConfig):
        config.save_pretrained(folder)
    else:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("spec", "config", "cures"),
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
        (LLAMA, {"model_type": "llama"}, [AGAIN]),
    ],
)
def test_a_decoder_computes_what_its_weights_were_trained_for(
    spec: Decoder,
    config: PreTrainedConfig | dict[str, Any] | str,
    cures: list[str],
    tmp_path: Path,
) -> None:
    begun = dataclasses.replace(spec, weights=beside(tmp_path, config))
    found = [complaint.cure for complaint in begun.complaints()]
    assert len(found) == len(cures)
    assert all(cure in said for cure, said in zip(cures, found, strict=True)), found


@pytest.mark.parametrize("spec", [LLAMA, GPT2, dataclasses.replace(LLAMA, rope_scaling=True)])
def test_the_suite_s_own_exports_are_begun_with(spec: Decoder, tmp_path: Path) -> None:
    _, config = to_hugging_face(spec.build(seed=1).state_dict(), spec)
    begun = dataclasses.replace(spec, weights=beside(tmp_path, config))
    assert list(begun.complaints()) == []


def test_a_file_has_the_configuration_of_its_folder_if_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    begun = dataclasses.replace(LLAMA, weights=str(file))
    assert list(begun.complaints()) == []
    beside(tmp_path, LlamaConfig(**EIGHT))
    assert "model.heads" in [complaint.key for complaint in begun.complaints()]
