"""What the config.json beside weights says of them that the shapes of their tensors do not tell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalewise.errors import Complaint

if TYPE_CHECKING:
    from scalewise.models.decoder.spec import Decoder

LLAMAS = ("llama", "mistral")
"""Architectures of Llama's shape in every operator; others have its names and other operators."""
KEY = "model.weights"


def complaints_of_config(spec: Decoder, weights: str) -> Iterator[Complaint]:
    """Yields where a decoder would compute something else than its weights were trained for.

    Nothing where there is no config.json beside them. A key that it lacks has the value that
    transformers gives it.
    """
    path = Path(weights)
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config.get("model_type", "")
        told = _of_gpt2(config) if kind == "gpt2" else _of_llama(config)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        reason = f"has a config.json that cannot be read ({type(error).__name__}: {error})"
        yield Complaint(KEY, weights, reason, "fetch it again")
        return
    elsewhere = f"set model=hf model.path={file.parent}"
    if kind not in (LLAMAS if spec.position == "rope" else ("gpt2",)):
        reason = f"is of {kind or 'no known kind'} by its config.json, "
        reason += f"and a decoder with model.position={spec.position} is not"
        yield Complaint(KEY, weights, reason, f"{elsewhere}, or choose a model of its kind")
        return
    stretch = told.pop("stretch", "default")
    if stretch not in ("default", "llama3"):
        reason = f"stretches rotary wavelengths by {stretch}, which the decoder does not"
        yield Complaint(KEY, weights, reason, elsewhere)
    window = told.pop("window", None)
    if window is not None and window < spec.context:
        reason = f"attends to {window} tokens at most, by the config.json of {weights}"
        yield Complaint("model.context", spec.context, reason, f"set model.context={window}")
    for name, value in told.items():
        own = {"kv_heads": spec.key_heads, "head_width": spec.head_size}
        has = own.get(name, getattr(spec, name))
        if has != value:
            text = str(value).lower() if isinstance(value, bool) else value
            reason = f"is {text} in the config.json of {weights}"
            yield Complaint(f"model.{name}", has, reason, f"set model.{name}={text}")


def _of_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "heads": config.get("n_head", 12),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
    }


def _of_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``Decoder``, ``stretch`` (a kind of rope scaling) and ``window``."""
    heads = config["num_attention_heads"]
    # One table since transformers 5, before it the base stood beside a table of the scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    stretch = rope.get("rope_type", rope.get("type", "default"))
    told = {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_width": config.get("head_dim") or config["hidden_size"] // heads,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "rope_scaling": stretch == "llama3",
        "stretch": stretch,
        "window": config.get("sliding_window"),
    }
    if stretch == "llama3":
        told |= {
            "rope_factor": rope["factor"],
            "rope_low_frequency": rope["low_freq_factor"],
            "rope_high_frequency": rope["high_freq_factor"],
            "rope_original_context": rope["original_max_position_embeddings"],
        }
    return told
