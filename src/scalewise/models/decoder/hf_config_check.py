"""Checks of the ``config.json`` next to pretrained weights against the fields of the decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalewise import regular_files
from scalewise.errors import ConfigIssue, format_value
from scalewise.typed_override import format_override

KEY = "model.weights"
MAX_SHOWN = 40
"""Longest value in a message, in characters."""
LLAMA_TYPES = ("llama", "mistral")
"""Values of ``model_type`` whose operators are all those of Llama; other models share key names
with Llama but not its operators."""
SILU, TANH_GELU = ("silu", "swish"), ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
FIXED_VALUES: dict[str, dict[str, tuple[object, ...]]] = {
    "llama": {"hidden_act": SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    "mistral": {"hidden_act": SILU, **dict.fromkeys(("attention_bias", "mlp_bias"), (False,))},
    "gpt2": {
        "activation_function": TANH_GELU,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}
"""Values that the decoder implements, by ``model_type``; the first one is the default."""
FIXED_FOR_ALL: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "partial_rotary_factor": (1.0,),
}
"""Values that the decoder implements, for keys of every ``model_type``."""
SHAPE_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
LLAMA = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
GPT2 = ("vocab_size", "n_embd", "n_layer", "n_inner", "n_head", "n_positions")
COMPARED_KEYS: dict[str, tuple[str, ...]] = {
    "llama": (*SHAPE_KEYS, *LLAMA, *ROPE),
    "mistral": (*SHAPE_KEYS, *LLAMA, *ROPE, "sliding_window"),
    "gpt2": (*GPT2, "layer_norm_epsilon"),
}
"""Keys whose values are compared with the decoder's fields, by ``model_type``."""
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Other names of GPT-2's keys (``GPT2Config.attribute_map``)."""
IGNORED_KEYS = frozenset(
    (
        # Metadata of the file.
        *("model_type", "architectures", "transformers_version", "_name_or_path", "name_or_path"),
        *("auto_map", "dtype", "torch_dtype", "_attn_implementation"),
        *("_attn_implementation_autoset", "attn_implementation", "_commit_hash"),
        *("unsloth_version", "unsloth_fixed", "tokenizer_class"),
        # Initialization and regularization, which the run configures.
        *("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop"),
        *("embd_pdrop", "attn_pdrop", "classifier_dropout", "summary_type", "summary_use_proj"),
        *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("tie_word_embeddings", "tie_encoder_decoder"),
        # Outputs and memory of a call.
        *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "torchscript"),
        *("tf_legacy_loss", "chunk_size_feed_forward", "gradient_checkpointing", "use_bfloat16"),
        *("is_decoder", "pretraining_tp", "reorder_and_upcast_attn"),
        *("keys_to_ignore_at_inference",),
        # Sequence lengths and heads of other tasks.
        *("n_ctx", "max_position_embeddings", "model_max_length", "max_sequence_length"),
        *("num_labels", "id2label", "label2id", "problem_type", "finetuning_task"),
        *("task_specific_params", "cross_attention_hidden_size"),
        # Tokens and generation.
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("decoder_start_token_id", "max_length", "min_length", "do_sample", "early_stopping"),
        *("num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p"),
        *("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("output_scores", "return_dict_in_generate", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
        *("suppress_tokens", "begin_suppress_tokens", "prefix"),
    )
)
"""Keys that do not change what the weights compute."""
ROPE_TABLE_KEYS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position_embeddings",),
    )
)
"""Keys of the rotary table that are compared."""


def config_issues(fields: Mapping[str, Any], weights: str) -> Iterator[ConfigIssue]:
    """Yield the settings with which the decoder computes something else than the pretrained model.

    Without a ``config.json`` there are no issues. A missing key has transformers' default value.

    Args:
        fields: Resolved fields of the decoder, by name.
        weights: Folder or file of the pretrained weights.
    """
    path = Path(weights)
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return
    use_hf = f"set model=hf {format_override('model.path', file.parent)}"
    try:
        config = json.loads(regular_files.read_text(file))
        model_type = config.get("model_type", "")
        is_supported = model_type in (LLAMA_TYPES if fields["position"] == "rope" else ("gpt2",))
        read_fields = _gpt2_fields if model_type == "gpt2" else _llama_fields
        expected = read_fields(config) if is_supported else {}
        strings = [name for name, value in expected.items() if isinstance(value, str)]
        if invalid := [name for name in strings if name != "rope_type"]:
            raise TypeError(f"{invalid[0]} is a string, {expected[invalid[0]]!r}")
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        reason = f"has a config.json that cannot be read ({type(error).__name__}: {error})"
        yield ConfigIssue(KEY, weights, reason, "download config.json again")
        return
    if not is_supported:
        reason = f"has model_type={model_type or 'null'} in its config.json, "
        reason += f"which model=decoder with model.position={fields['position']} does not support"
        yield ConfigIssue(KEY, weights, reason, f"{use_hf}, or choose a model of this type")
        return
    yield from _other_operator_issues(config, model_type, weights, use_hf)
    rope_type = expected.pop("rope_type", "default")
    if rope_type not in ("default", "llama3"):
        reason = f"has rope_type={rope_type} in its config.json, "
        reason += "which model=decoder does not support"
        yield ConfigIssue(KEY, weights, reason, use_hf)
    window = expected.pop("sliding_window", None)
    if window is not None and window < fields["context"]:
        reason = f"exceeds sliding_window={window} in the config.json of {weights}"
        yield ConfigIssue("model.context", fields["context"], reason, f"set model.context={window}")
    for name, value in expected.items():
        if (actual := fields[name]) != value:
            key, reason = (
                f"model.{name}",
                f"is {format_value(value)} in the config.json of {weights}",
            )
            yield ConfigIssue(key, actual, reason, f"set {format_override(key, value)}")


def _other_operator_issues(
    config: Mapping[str, Any], model_type: str, weights: str, use_hf: str
) -> Iterator[ConfigIssue]:
    """Yield keys with which transformers computes something else; unknown keys may be such keys."""
    fixed = FIXED_VALUES[model_type] | FIXED_FOR_ALL
    aliases = GPT2_ALIASES if model_type == "gpt2" else ()
    config_keys = IGNORED_KEYS | {*COMPARED_KEYS[model_type], *aliases}
    rope_table = _rope_table(config) if model_type in LLAMA_TYPES else {}
    for table, compared in ((config, config_keys), (rope_table, ROPE_TABLE_KEYS)):
        for key, value in table.items():
            setting = f"{key}={str(value)[:MAX_SHOWN]} in its config.json"
            if value in (None, {}, []):  # not set
                continue
            if key in fixed and value not in fixed[key]:
                reason = f"has {setting}, and model=decoder supports only {fixed[key][0]}"
                yield ConfigIssue(KEY, weights, reason, use_hf)
            elif key not in fixed and key not in compared:
                reason = f"has {setting}, which model=decoder does not implement"
                yield ConfigIssue(KEY, weights, reason, f"{use_hf}, or remove {key} from the file")


def _rope_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters; ``rope_scaling`` has precedence, as in transformers.

    Before transformers 5, ``rope_theta`` was a key of its own next to ``rope_scaling``.
    """
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def _gpt2_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``DecoderConfig``."""
    config = {**config, **{GPT2_ALIASES[key]: config[key] for key in config.keys() & GPT2_ALIASES}}
    width = config.get("n_embd", 768)
    return {
        "heads": config.get("n_head", 12),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "vocabulary": config.get("vocab_size", 50257),
        "width": width,
        "layers": config.get("n_layer", 12),
        "feedforward": config.get("n_inner") or 4 * width,
        "context": config.get("n_positions", 1024),
    }


def _llama_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``DecoderConfig``, with ``rope_type`` and ``sliding_window``."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    mistral = config.get("model_type") == "mistral"
    rope = _rope_table(config)
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    fields = {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", 8 if mistral else None) or heads,
        "head_width": config.get("head_dim") or width // heads,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "vocabulary": config.get("vocab_size", 32000),
        "width": width,
        "layers": config.get("num_hidden_layers", 32),
        "feedforward": config.get("intermediate_size", 14336 if mistral else 11008),
        "rope_theta": float(theta) if isinstance(theta, int) else theta,
        "rope_scaling": rope_type == "llama3",
        "rope_type": rope_type,
        "sliding_window": config.get("sliding_window", 4096) if mistral else None,
    }
    if rope_type == "llama3":
        context = rope.get(
            "original_max_position_embeddings", config.get("max_position_embeddings")
        )
        fields |= {
            "rope_factor": rope["factor"],
            "rope_low_frequency": rope["low_freq_factor"],
            "rope_high_frequency": rope["high_freq_factor"],
            "rope_original_context": config.get("original_max_position_embeddings", context),
        }
    return fields
