"""What the config.json beside weights says of them that the shapes of their tensors do not tell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalewise import regular_files
from scalewise.errors import ConfigIssue, format_value
from scalewise.models.decoder.config_keys import (
    ALIASES,
    COMPARED,
    FIXED,
    FIXED_FOR_ALL,
    HARMLESS,
    LLAMAS,
    ROTATION,
)
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    from scalewise.models.decoder.config import DecoderConfig

KEY = "model.weights"
SHORT = 40
"""Characters of a value in a message."""


def config_issues(spec: DecoderConfig, weights: str) -> Iterator[ConfigIssue]:
    """Yields where a decoder would compute something else than its weights were trained for.

    Nothing where there is no config.json beside them. A key that it lacks has the value that
    transformers gives it.
    """
    path = Path(weights)
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return
    elsewhere = f"set model=hf {format_override('model.path', file.parent)}"
    try:
        config = json.loads(regular_files.read_text(file))
        kind = config.get("model_type", "")
        alike = kind in (LLAMAS if spec.position == "rope" else ("gpt2",))
        read = _from_gpt2 if kind == "gpt2" else _from_llama
        told = read(config) if alike else {}
        texts = [name for name, value in told.items() if isinstance(value, str)]
        if wrong := [name for name in texts if name != "stretch"]:
            raise TypeError(f"{wrong[0]} is a text, {told[wrong[0]]!r}")
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        reason = f"has a config.json that cannot be read ({type(error).__name__}: {error})"
        yield ConfigIssue(KEY, weights, reason, "fetch it again")
        return
    if not alike:
        reason = f"is of {kind or 'no known kind'} by its config.json, "
        reason += f"and a decoder with model.position={spec.position} is not"
        yield ConfigIssue(KEY, weights, reason, f"{elsewhere}, or choose a model of its kind")
        return
    yield from _other_operator_issues(config, kind, weights, elsewhere)
    stretch = told.pop("stretch", "default")
    if stretch not in ("default", "llama3"):
        reason = f"stretches rotary wavelengths by {stretch}, which the decoder does not"
        yield ConfigIssue(KEY, weights, reason, elsewhere)
    window = told.pop("window", None)
    if window is not None and window < spec.context:
        reason = f"attends to {window} tokens at most, by the config.json of {weights}"
        yield ConfigIssue("model.context", spec.context, reason, f"set model.context={window}")
    for name, value in told.items():
        own = {"kv_heads": spec.key_heads, "head_width": spec.head_size}
        has = own[name] if name in own else getattr(spec, name)
        if has != value:
            key, reason = (
                f"model.{name}",
                f"is {format_value(value)} in the config.json of {weights}",
            )
            yield ConfigIssue(key, has, reason, f"set {format_override(key, value)}")


def _other_operator_issues(
    config: Mapping[str, Any], kind: str, weights: str, elsewhere: str
) -> Iterator[ConfigIssue]:
    """Yields keys with which transformers would compute what the decoder does not.

    A key that is not known here may be one.
    """
    fixed = FIXED[kind] | FIXED_FOR_ALL
    known = HARMLESS | {*COMPARED[kind], *(ALIASES if kind == "gpt2" else ())}
    rotation = _rope_table(config) if kind in LLAMAS else {}
    for table, others in ((config, known), (rotation, ROTATION)):
        for key, value in table.items():
            said = f"{key}={str(value)[:SHORT]} in its config.json"
            if value in (None, {}, []):  # not set
                continue
            if key in fixed and value not in fixed[key]:
                reason = f"has {said}, and the decoder computes with {fixed[key][0]}"
                yield ConfigIssue(KEY, weights, reason, elsewhere)
            elif key not in fixed and key not in others:
                reason = f"has {said}, which may change what the weights compute"
                yield ConfigIssue(KEY, weights, reason, f"{elsewhere}, or remove {key} there")


def _rope_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table of rotary wavelengths: of two, transformers takes ``rope_scaling``.

    Before transformers 5 the base stood beside a table of the scaling.
    """
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def _from_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``Decoder``."""
    config = {**config, **{ALIASES[key]: config[key] for key in config.keys() & ALIASES}}
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


def _from_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``Decoder``, ``stretch`` (a kind of rope scaling) and ``window``."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    mistral = config.get("model_type") == "mistral"
    rope = _rope_table(config)
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    stretch = rope.get("rope_type", rope.get("type", "default"))
    told = {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", 8 if mistral else None) or heads,
        "head_width": config.get("head_dim") or width // heads,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "vocabulary": config.get("vocab_size", 32000),
        "width": width,
        "layers": config.get("num_hidden_layers", 32),
        "feedforward": config.get("intermediate_size", 14336 if mistral else 11008),
        "rope_theta": float(theta) if isinstance(theta, int) else theta,
        "rope_scaling": stretch == "llama3",
        "stretch": stretch,
        "window": config.get("sliding_window", 4096) if mistral else None,
    }
    if stretch == "llama3":
        own = rope.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        told |= {
            "rope_factor": rope["factor"],
            "rope_low_frequency": rope["low_freq_factor"],
            "rope_high_frequency": rope["high_freq_factor"],
            "rope_original_context": config.get("original_max_position_embeddings", own),
        }
    return told
