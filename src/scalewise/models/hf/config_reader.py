"""Configurations of transformers: read, and refused where they are of something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
)

from scalewise.errors import ConfigError
from scalewise.models.hf import hub

KEY = "model.path"
NAMED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""What a plan has to know."""
LIKE = ", as Llama, GPT-2, OPT or Qwen2"
DECODERS = ("num_decoder_layers", "decoder_layers")
"""What configurations of an encoder with a decoder call the layers of the latter."""
IMAGE_TEXT = ("blip-2",)
"""Models that read pictures and are known here, as configurations call them."""
DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def read_config(path: str, depth: int | None) -> PretrainedConfig:
    """Returns a configuration; raises ``ConfigError`` where it is of no model of text."""
    folder = hub.model_folder(path, hub.CONFIGURATION)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        needs_code = "trust_remote_code" in str(error)
        reason = f"has no configuration that transformers reads ({first_line(error)})"
        if needs_code:
            reason = "needs code of its own, which is not run"
        raise ConfigError.for_key(
            KEY, path, reason, "choose a model that transformers has"
        ) from error
    text = config.get_text_config()
    unnamed = [name for name in NAMED if getattr(text, name, None) is None]
    if config.is_encoder_decoder:
        begins = ("decoder_start_token_id", "pad_token_id")
        unnamed += [name for name in begins if getattr(text, name, None) is None]
    if config.model_type in IMAGE_TEXT and getattr(text, "bos_token_id", None) is None:
        unnamed.append("bos_token_id")
    for reason, found in (
        *((reason, True) for reason in _vision_issues(config)),
        (
            f"is no causal language model ({config.model_type})",
            type(config) not in auto_class(config)._model_mapping,
        ),
        (f"has a configuration that names no {', '.join(unnamed)}", unnamed),
        ("leaves out layers at random (layerdrop)", any(getattr(text, key, 0) for key in DROPS)),
        ("holds packed weights", getattr(config, "quantization_config", None)),
    ):
        if found:
            tokens = found is unnamed and all(name.endswith("_token_id") for name in unnamed)
            fix = "write it into config.json" if tokens else f"choose a causal language model{LIKE}"
            raise ConfigError.for_key(KEY, path, reason, fix)
    if depth is not None:
        text.num_hidden_layers = depth
        for name in DECODERS:
            if config.is_encoder_decoder and hasattr(text, name):
                setattr(text, name, depth)
        if config.model_type in IMAGE_TEXT:
            config.vision_config.num_hidden_layers = depth
            config.qformer_config.num_hidden_layers = depth
        if kinds := getattr(text, "layer_types", None):
            text.layer_types = [kinds[layer % len(kinds)] for layer in range(depth)]
    return config


def _vision_issues(config: PretrainedConfig) -> Iterator[str]:
    """Yields what is not known of a model that reads pictures."""
    if not hasattr(config, "vision_config"):
        return
    if config.model_type not in IMAGE_TEXT:
        yield f"reads more than text ({config.model_type})"
        return
    if config.qformer_config.use_qformer_text_input:
        yield "asks a picture about a text (use_qformer_text_input)"
    sides = (config.vision_config.image_size, config.vision_config.patch_size)
    if not all(isinstance(side, int) for side in sides) or sides[0] % sides[1]:
        yield f"reads no squares of whole patches (image_size {sides[0]}, patch_size {sides[1]})"


def auto_class(config: PretrainedConfig) -> Any:
    """Returns the class of transformers that makes the model of a configuration."""
    if config.model_type in IMAGE_TEXT:
        return AutoModelForImageTextToText
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def first_line(error: Exception) -> str:
    """Returns what an error says, cut to a line."""
    return " ".join(str(error).split())[:120]
