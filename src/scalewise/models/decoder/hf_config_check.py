"""Checks of the ``config.json`` next to pretrained weights against the fields of the decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalewise import regular_files
from scalewise.errors import ConfigIssue, format_value
from scalewise.models.decoder.hf_config_json import (
    ROPE_PARAMETERS,
    local_rope_table,
    read_fields,
    rope_table,
)
from scalewise.models.decoder.hf_families import FAMILY_BY_TYPE
from scalewise.models.decoder.hf_family import HFFamily, is_equal
from scalewise.models.decoder.hf_names import LLAMA_OPTIONS
from scalewise.typed_override import format_override

KEY = "model.weights"
MAX_SHOWN = 40
"""Longest value in a message, in characters."""
FIXED_FOR_ALL: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "partial_rotary_factor": (1.0,),
}
"""Values that the decoder implements, for keys of every ``model_type``."""
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
IGNORED_KEYS = frozenset(
    (
        # Metadata of the file.
        *("model_type", "architectures", "transformers_version", "_name_or_path", "name_or_path"),
        *("auto_map", "dtype", "torch_dtype", "_attn_implementation"),
        *("_attn_implementation_autoset", "attn_implementation", "_commit_hash"),
        *("unsloth_version", "unsloth_fixed", "tokenizer_class"),
        # Initialization and regularization, which the run configures.
        *("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop"),
        *("router_aux_loss_coef", "output_router_logits"),
        *("aux_loss_alpha", "seq_aux", "ep_size"),
        *("scoring_func", "moe_layer_freq"),  # which transformers does not read
        *("embd_pdrop", "attn_pdrop", "classifier_dropout", "summary_type", "summary_use_proj"),
        *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("tie_word_embeddings", "tie_encoder_decoder"),
        # Outputs and memory of a call.
        *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "torchscript"),
        *("tf_legacy_loss", "chunk_size_feed_forward", "gradient_checkpointing", "use_bfloat16"),
        *("is_decoder", "pretraining_tp", "reorder_and_upcast_attn"),
        *("keys_to_ignore_at_inference", "cache_implementation"),
        # Sequence lengths and heads of other tasks.
        *("n_ctx", "max_position_embeddings", "model_max_length", "max_sequence_length"),
        *("max_window_layers",),  # without effect if use_sliding_window is false
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
        *("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
        "partial_rotary_factor",
    )
)
"""Keys of the rotary table that are compared."""


def config_issues(fields: Mapping[str, Any], context: int, weights: str) -> Iterator[ConfigIssue]:
    """Yield the settings with which the decoder computes something else than the pretrained model.

    Without a ``config.json`` there are no issues. A missing key has transformers' default value.

    Args:
        fields: Resolved fields of the decoder, by name.
        context: Context of the decoder, in tokens.
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
        family = FAMILY_BY_TYPE.get(model_type)
        expected = read_fields(family, config) if family else {}
        is_supported = family is not None and expected["position"] == fields["position"]
        numbers = {**expected, **dict.fromkeys((*LLAMA_OPTIONS, "rope_type", "rope_method"))}
        if invalid := [name for name, value in numbers.items() if isinstance(value, str)]:
            raise TypeError(f"{invalid[0]} is a string, {expected[invalid[0]]!r}")
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        reason = f"has a config.json that cannot be read ({type(error).__name__}: {error})"
        yield ConfigIssue(KEY, weights, reason, "download config.json again")
        return
    if family is None or not is_supported:
        reason = f"has model_type={model_type or 'null'} in its config.json, "
        reason += f"which model=decoder with model.position={fields['position']} does not support"
        yield ConfigIssue(KEY, weights, reason, f"{use_hf}, or choose a model of this type")
        return
    yield from _other_operator_issues(config, family, weights, use_hf)
    if fields["tied"] and declares_own_head(path):
        reason = f"is false in the config.json of {weights} (tie_word_embeddings)"
        yield ConfigIssue("model.tied", True, reason, "set model.tied=false")
    if fields["classes"]:
        expected["head_bias"] = False  # of a new head
    rope_type = expected.pop("rope_type", "default")
    if rope_type not in ("default", *ROPE_PARAMETERS):
        reason = f"has rope_type={rope_type} in its config.json, "
        reason += "which model=decoder does not support"
        yield ConfigIssue(KEY, weights, reason, use_hf)
    window, has_local_rope = expected.get("window"), expected.get("rope_local_theta") is not None
    if window is not None and window >= context and not has_local_rope:
        expected |= dict.fromkeys(expected.keys() & {"window", "global_every"})  # without effect
    for name, value in expected.items():
        if not is_equal(actual := fields[name], value):
            key, reason = (
                f"model.{name}",
                f"is {format_value(value)} in the config.json of {weights}",
            )
            yield ConfigIssue(key, actual, reason, f"set {format_override(key, value)}")


def declares_own_head(weights: Path) -> bool:
    """Whether the ``config.json`` of weights says that their head is not the embedding."""
    file = (weights if weights.is_dir() else weights.parent) / "config.json"
    config = json.loads(regular_files.read_text(file)) if file.is_file() else {}
    return config.get("tie_word_embeddings") is False


def _other_operator_issues(
    config: Mapping[str, Any], family: HFFamily, weights: str, use_hf: str
) -> Iterator[ConfigIssue]:
    """Yield keys with which transformers computes something else; unknown keys may be such keys."""
    fixed, rope = {**family.fixed, **FIXED_FOR_ALL}, rope_table(config)
    if "rotary_fraction" in family.keys:
        del fixed["partial_rotary_factor"]
    config_keys = IGNORED_KEYS.union(family.keys.values(), compared_keys(family))
    rope_keys = ROPE_TABLE_KEYS
    if family.has_latent_attention:
        rope_keys |= {"mscale", "mscale_all_dim"}
    for table, compared in ((config, config_keys), (rope, rope_keys)):
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
    local_rope = local_rope_table(config) if "rope_local_theta" in family.keys else {}
    for key, value in local_rope.items():
        if key != "rope_theta" and (key, value) != ("rope_type", "default"):
            setting = f"{key}={str(value)[:MAX_SHOWN]} for sliding_attention in its config.json"
            reason = f"has {setting}, which model=decoder does not implement"
            yield ConfigIssue(KEY, weights, reason, use_hf)
    has_window = "window" in family.keys and config.get("sliding_window", 0) is not None
    implemented = "sliding_attention" if has_window else "full_attention"
    kinds = () if family.is_gemma else config.get("layer_types") or ()
    if other := next((kind for kind in kinds if kind != implemented), None):
        reason = f"has {other} in layer_types of its config.json, and model=decoder "
        reason += f"supports only {implemented}"
        yield ConfigIssue(KEY, weights, reason, use_hf)


def compared_keys(family: HFFamily) -> tuple[str, ...]:
    """Return the keys of a config.json that are compared, without ``HFFamily.keys``.

    ``intermediate_size`` may be that of dense blocks, which a decoder of experts does not have.
    """
    if family.has_conv1d:
        return (*family.aliases,)
    keys = (*family.aliases, *ROPE_KEYS, "intermediate_size", "layer_types")
    if family.has_latent_attention:  # derived from the widths of both parts of a head
        return (*keys, "head_dim", "qk_head_dim")
    if "use_sliding_window" in family.fixed:
        return (*keys, "sliding_window", "no_rope_layers")
    return (*keys, "_sliding_window_pattern")
