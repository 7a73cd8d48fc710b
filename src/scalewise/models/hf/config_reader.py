"""Reading of Hugging Face configurations, with errors for unsupported models."""

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

from scalewise.compat.hugging_face import has_model_class
from scalewise.errors import ConfigError
from scalewise.models.hf import hub

KEY = "model.path"
REQUIRED_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Keys that the planner requires."""
LIKE = ", such as Llama, GPT-2, OPT or Qwen2"
DECODER_DEPTH_KEYS = ("num_decoder_layers", "decoder_layers")
"""Keys for the number of decoder layers of encoder-decoder models."""
IMAGE_TEXT = ("blip-2",)
"""Supported models that read images, by ``model_type``."""
LAYERDROP_KEYS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def read_config(path: str, depth: int | None) -> PretrainedConfig:
    """Return a configuration, with ``depth`` layers if set.

    Raises:
        ConfigError: The configuration cannot be read, or the model is not supported.
    """
    folder = hub.model_folder(path, hub.CONFIG_FILES)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        needs_code = "trust_remote_code" in str(error)
        reason = f"has no config.json that transformers can read ({first_line(error)})"
        if needs_code:
            reason = "requires custom code, which is not executed"
        fix = "choose a model that transformers includes"
        raise ConfigError.for_key(KEY, path, reason, fix) from error
    text = config.get_text_config()
    missing = [name for name in REQUIRED_KEYS if getattr(text, name, None) is None]
    if config.is_encoder_decoder:
        token_keys = ("decoder_start_token_id", "pad_token_id")
        missing += [name for name in token_keys if getattr(text, name, None) is None]
    if config.model_type in IMAGE_TEXT and getattr(text, "bos_token_id", None) is None:
        missing.append("bos_token_id")
    uses_layerdrop = any(getattr(text, key, 0) for key in LAYERDROP_KEYS)
    for reason, applies in (
        *((reason, True) for reason in _vision_issues(config)),
        (
            f"is not a supported language model ({config.model_type})",
            not has_model_class(auto_class(config), config),
        ),
        (f"has a config.json that does not set {', '.join(missing)}", missing),
        ("uses layerdrop, which is not supported", uses_layerdrop),
        ("has quantized weights", getattr(config, "quantization_config", None)),
        (
            "adds a loss of the router (output_router_logits=true), which is not computed",
            getattr(text, "output_router_logits", False),
        ),
    ):
        if applies:
            tokens = applies is missing and all(name.endswith("_token_id") for name in missing)
            fix = "add it to config.json" if tokens else f"choose a causal language model{LIKE}"
            if "output_router_logits" in reason:
                fix = "change output_router_logits to false in its config.json"
            raise ConfigError.for_key(KEY, path, reason, fix)
    if depth is not None:
        text.num_hidden_layers = depth
        for name in DECODER_DEPTH_KEYS:
            if config.is_encoder_decoder and hasattr(text, name):
                setattr(text, name, depth)
        if config.model_type in IMAGE_TEXT:
            config.vision_config.num_hidden_layers = depth
            config.qformer_config.num_hidden_layers = depth
        if kinds := getattr(text, "layer_types", None):
            text.layer_types = [kinds[layer % len(kinds)] for layer in range(depth)]
    return config


def _vision_issues(config: PretrainedConfig) -> Iterator[str]:
    """Yield unsupported properties of a model that reads images."""
    if not hasattr(config, "vision_config"):
        return
    if config.model_type not in IMAGE_TEXT:
        if not reads_images_and_text(config):
            yield f"reads other inputs than text ({config.model_type})"
        return
    if config.qformer_config.use_qformer_text_input:
        yield "has a Q-Former that reads text (use_qformer_text_input), which is not supported"
    sides = (config.vision_config.image_size, config.vision_config.patch_size)
    if not all(isinstance(side, int) for side in sides) or sides[0] % sides[1]:
        size, patch = sides
        yield f"requires square images of full patches (image_size {size}, patch_size {patch})"


def reads_images_and_text(config: PretrainedConfig) -> bool:
    """Return whether a model is a decoder-only language model with a vision tower."""
    has_text = hasattr(config, "vision_config") and config.get_text_config() is not config
    is_decoder = not getattr(config, "is_encoder_decoder", False)
    return has_text and is_decoder and has_model_class(AutoModelForImageTextToText, config)


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' Auto class for the model of a configuration."""
    if config.model_type in IMAGE_TEXT or reads_images_and_text(config):
        return AutoModelForImageTextToText
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def first_line(error: Exception) -> str:
    """Return the message of an error in one line of at most 120 characters."""
    return " ".join(str(error).split())[:120]


def rope_type(config: Any) -> str | None:
    """Return the ``rope_type`` of a transformers configuration."""
    table = getattr(config, "rope_parameters", None) or {}
    return table.get("rope_type") if isinstance(table, dict) else None


def dropout_probabilities(config: PretrainedConfig) -> Iterator[float]:
    """Yield every dropout probability of a configuration, except those of unused heads."""
    for key, value in config.to_dict().items():
        is_unused_head = key.startswith(("summary", "classifier"))
        if (
            key.endswith(("dropout", "pdrop", "dropout_rate", "dropout_prob"))
            and isinstance(value, float)
            and not is_unused_head
        ):
            yield value
