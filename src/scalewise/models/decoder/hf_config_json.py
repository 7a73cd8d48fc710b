"""Hugging Face's config.json of a decoder, from and to the fields of its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt
from typing import Any

from scalewise.models.decoder.architecture import DecoderArchitecture
from scalewise.models.decoder.hf_family import HFFamily, score_factor
from scalewise.models.decoder.hf_names import LLAMA_OPTIONS

REQUIRED = object()
"""Mark of a key without default."""
ORIGINAL_CONTEXT = {"rope_original_context": ("original_max_position_embeddings", REQUIRED)}
ROPE_PARAMETERS: dict[str, dict[str, tuple[str, object]]] = {
    "llama3": {
        "rope_factor": ("factor", REQUIRED),
        "rope_low_frequency": ("low_freq_factor", REQUIRED),
        "rope_high_frequency": ("high_freq_factor", REQUIRED),
        **ORIGINAL_CONTEXT,
    },
    "linear": {"rope_factor": ("factor", REQUIRED)},
    "yarn": {
        "rope_factor": ("factor", REQUIRED),
        "rope_low_frequency": ("beta_slow", 1.0),
        "rope_high_frequency": ("beta_fast", 32.0),
        "rope_attention_factor": ("attention_factor", None),
        **ORIGINAL_CONTEXT,
    },
}
"""Keys and defaults of the parameters of each ``rope_type``, by field of the decoder."""


def rope_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a config.json; ``rope_scaling`` has precedence.

    Before transformers 5, ``rope_theta`` was a key of its own next to ``rope_scaling``. Gemma 3 has
    one table for each kind of layer; this is that of layers without a window.
    """
    table = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    is_nested = "full_attention" in table and config.get("model_type") == "gemma3_text"
    return dict(table["full_attention"] if is_nested else table)


def local_rope_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of Gemma 3's layers with a window."""
    return dict((config.get("rope_parameters") or {}).get("sliding_attention") or {})


def _interval(is_other: Sequence[object], key: str) -> int | None:
    """Return every how many layers one is of the other kind; None: no layer is."""
    interval = next((i for i, other in enumerate(is_other, start=1) if other), None)
    if interval and any(bool(it) == bool(i % interval) for i, it in enumerate(is_other, start=1)):
        raise ValueError(f"{key} is not periodic")
    return interval


def read_fields(family: HFFamily, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``DecoderConfig`` that a config.json determines.

    Further entry: ``rope_type``.
    """
    config = {family.aliases.get(key, key): value for key, value in config.items()}
    values = {**family.defaults, **config}
    fields = {name: values.get(key) for name, key in family.keys.items()}
    heads, width = values[family.keys["heads"]], values[family.keys["width"]]
    implied = {"kv_heads": heads, "head_width": width // heads}
    fields |= {name: fields[name] or implied[name] for name in fields.keys() & implied}
    options = {**LLAMA_OPTIONS, **family.options}
    if family.is_gemma:
        options["embedding_multiplier"] = sqrt(width)
        fields["attention_multiplier"] = 1 / sqrt(values["query_pre_attn_scalar"])
        if local_rope := local_rope_table(config):
            fields["rope_local_theta"] = local_rope.get("rope_theta", 1e4)
        if config.get("layer_types"):
            is_global = [kind != "sliding_attention" for kind in config["layer_types"]]
            fields["global_every"] = _interval(is_global, "layer_types")
        if fields["global_every"] == 1 and "rope_local_theta" not in family.keys:
            fields |= {"window": None, "global_every": None}
    if family.has_latent_attention:
        head_size = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        fields |= {"head_width": head_size, "attention_multiplier": 1 / sqrt(head_size)}
    if config.get("no_rope_layers"):
        skips = [not has_rope for has_rope in config["no_rope_layers"]]
        fields["no_rope_every"] = _interval(skips, "no_rope_layers")
    if family.has_conv1d:
        return {**options, **fields, "feedforward": fields["feedforward"] or 4 * width}
    rope = rope_table(config)
    theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    fields.setdefault("kv_heads", heads)
    if "rotary_fraction" in family.keys and "partial_rotary_factor" in rope:
        fields["rotary_fraction"] = rope["partial_rotary_factor"]
    fields |= {
        "rope_theta": float(theta) if isinstance(theta, int) else theta,
        "rope_scaling": rope_type in ROPE_PARAMETERS,
        "rope_type": rope_type,
    }
    if rope_type in ROPE_PARAMETERS:
        fields["rope_method"] = rope_type
        original, maximum = "original_max_position_embeddings", "max_position_embeddings"
        given = {original: config.get(maximum), **rope}
        given |= {original: config[original]} if original in config else {}
        for name, (key, default) in ROPE_PARAMETERS[rope_type].items():
            fields[name] = given[key] if default is REQUIRED else given.get(key, default)
        if family.has_latent_attention and rope_type == "yarn":
            scales = [_score_scale(rope, key) for key in ("mscale", "mscale_all_dim")]
            fields["attention_multiplier"] = (scales[1] or 1.0) ** 2 / sqrt(
                values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
            )
            if fields["rope_attention_factor"] is None and scales[0] and scales[1]:
                fields["rope_attention_factor"] = scales[0] / scales[1]
    return {**options, **fields}


def _score_scale(rope: Mapping[str, Any], key: str) -> float | None:
    """Return the factor of DeepSeek's YaRN with a key; None: the file does not have it."""
    return 0.1 * rope[key] * log(rope["factor"]) + 1 if rope.get(key) else None


def write_config(family: HFFamily, spec: DecoderArchitecture) -> dict[str, Any]:
    """Return the ``config.json`` of a decoder."""
    fields = spec.resolved_fields
    prefix = family.title.replace("-", "")
    language_model = "GPT2LMHeadModel" if family.has_conv1d else f"{prefix}ForCausalLM"
    config = {
        "architectures": [f"{prefix}ForSequenceClassification" if spec.classes else language_model],
        **_labels(spec),
        "model_type": family.model_type,
        **{key: fields[name] for name, key in family.keys.items()},
        **{key: values[0] for key, values in family.fixed.items()},
        "initializer_range": spec.initial_std,
        "tie_word_embeddings": spec.tied,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if family.has_conv1d:
        return config | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), spec.dropout)
    if family.is_gemma:
        config |= {"query_pre_attn_scalar": round(spec.attention_scale**-2)}
        windows = [fields["window"] and spec.layer_window(layer) for layer in range(spec.layers)]
        config |= {
            "layer_types": ["sliding_attention" if it else "full_attention" for it in windows]
        }
    if family.has_latent_attention:
        config |= {"qk_nope_head_dim": spec.head_size - spec.rotary_size}
    if "no_rope_every" in family.keys:
        config |= {"no_rope_layers": [int(spec.has_rope(layer)) for layer in range(spec.layers)]}
    if "rotary_emb_base" in family.aliases:
        config |= {"rotary_emb_base": spec.rope_theta}
    parameters = ROPE_PARAMETERS[spec.rope_method.value].items()
    scaling = {"rope_type": spec.rope_method.value} | {
        key: fields[name] for name, (key, _) in parameters if fields[name] is not None
    }
    if family.has_latent_attention and (factor := score_factor(spec)):
        scaling |= {"mscale_all_dim": factor}
    return config | {
        "max_position_embeddings": spec.context,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling if spec.rope_scaling else None,
        "attention_dropout": spec.dropout,
    }


def _labels(spec: DecoderArchitecture) -> dict[str, Any]:
    """Return transformers' label names of a classification head."""
    names = {str(index): f"LABEL_{index}" for index in range(spec.classes or 0)}
    return {"id2label": names, "label2id": {n: int(i) for i, n in names.items()}} if names else {}
