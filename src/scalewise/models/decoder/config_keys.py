"""Keys of a Hugging Face ``config.json``: compared with the decoder, fixed by it, or ignored."""

from __future__ import annotations

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
