"""Rules between the fields of a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scalewise.errors import ConfigIssue
from scalewise.models.decoder.architecture import DecoderArchitecture
from scalewise.models.decoder.hf_config_check import config_issues
from scalewise.models.decoder.kinds import ActivationKind, NormPlacement, PositionKind, Residual
from scalewise.typed_override import format_override

NO_BASE_MODEL = "set model.base_width=null model.base_heads=null optimizer.lr_transfer=none"


def decoder_issues(spec: DecoderArchitecture) -> Iterator[ConfigIssue]:
    """Yield config issues of the architecture, and of pretrained weights that do not exist."""
    positive = ["vocabulary", "context", "width", "layers", "heads", "feedforward"]
    positive += [
        "classes",
        "kv_heads",
        "head_width",
        "rope_theta",
        "rope_factor",
        "rope_low_frequency",
        "rope_high_frequency",
        "rope_original_context",
        "norm_epsilon",
        "initial_std",
        "rope_attention_factor",
        "rope_local_theta",
        "no_rope_every",
        "window",
        "global_every",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logit_divisor",
        "attention_softcap",
        "logit_softcap",
        "rotary_fraction",
        "kv_latent_dim",
        "query_latent_dim",
        "rope_head_dim",
        "value_head_dim",
        "base_width",
        "base_heads",
    ]
    values = {name: getattr(spec, name) for name in positive}
    invalid = [name for name, value in values.items() if value is not None and value <= 0]
    for name in invalid:
        # A field without a default is not an attribute of the class.
        default = getattr(type(spec), name, 1)
        fix = f"set {format_override(f'model.{name}', default)}"
        yield _issue(spec, name, "must be positive", fix)
    if not invalid:
        yield from _shape_issues(spec)
        yield from _latent_attention_issues(spec)
        yield from _base_model_issues(spec)
        yield from spec.validate_experts()
    if not 0 <= spec.dropout < 1:
        yield _issue(spec, "dropout", "is not in [0, 1)", "set model.dropout=0")
    elif spec.dropout and spec.attention_softcap is not None:
        reason = "is not supported with model.attention_softcap, whose weights have no dropout"
        yield _issue(spec, "dropout", reason, "set model.dropout=0")
    is_ordered = 0 < spec.rope_low_frequency < spec.rope_high_frequency
    if spec.rope_scaling and not (
        is_ordered and min(spec.rope_factor, spec.rope_original_context) >= 1
    ):
        reason = (
            "requires rope_factor >= 1, rope_original_context >= 1 "
            "and 0 < rope_low_frequency < rope_high_frequency"
        )
        yield _issue(spec, "rope_scaling", reason, "set model.rope_scaling=false")
    if spec.weights is not None and not Path(spec.weights).exists():
        fix = "set model.weights=PATH of a folder with safetensors files, or model.weights=null"
        yield _issue(spec, "weights", "does not exist", fix)
    elif spec.weights is not None and not invalid:
        yield from config_issues(spec.resolved_fields, spec.context, spec.weights)


def _shape_issues(spec: DecoderArchitecture) -> Iterator[ConfigIssue]:
    if spec.classes is not None and spec.tied:
        reason = "requires model.classes=null: a tied head has one output per token id"
        yield _issue(spec, "tied", reason, "set model.tied=false")
    if spec.head_width is None and spec.width % spec.heads:
        fix = f"set model.width={spec.heads * (spec.width // spec.heads + 1)}"
        yield _issue(spec, "width", f"is not divisible by model.heads={spec.heads}", fix)
    if spec.heads % spec.key_heads:
        reason = f"does not divide model.heads={spec.heads}"
        yield _issue(spec, "kv_heads", reason, "set model.kv_heads=null")
    for name in ("global_every", "rope_local_theta"):
        if getattr(spec, name) is not None and spec.window is None:
            reason = "requires model.window, the window of the other layers"
            yield _issue(spec, name, reason, f"set model.{name}=null")
    if spec.rotary_fraction > 1:
        yield _issue(spec, "rotary_fraction", "is not in (0, 1]", "set model.rotary_fraction=1.0")
    elif spec.rotary_fraction < 1 and (spec.rotary_size < 2 or spec.rotary_size % 2):
        reason = f"has to give an even number of features, not {spec.rotary_size}"
        fraction = 2 * max(1, spec.rotary_size // 2) / spec.head_size
        fix = f"set model.rotary_fraction={fraction}"
        yield _issue(spec, "rotary_fraction", reason, fix)
    is_parallel = spec.residual is not Residual.sequential
    if is_parallel and spec.norm_placement is not NormPlacement.pre:
        reason = "requires model.norm_placement=pre, a norm before the sublayers"
        yield _issue(spec, "residual", reason, "set model.residual=sequential")
    if spec.head_bias and (spec.tied or spec.classes is not None):
        reason = "requires a head of its own (model.tied=false model.classes=null)"
        yield _issue(spec, "head_bias", reason, "set model.head_bias=false")
    if spec.position is PositionKind.rope and spec.head_size % 2:
        reason = f"rotary position embedding requires an even head width, not {spec.head_size}"
        fix = f"set model.head_width={spec.head_size + 1}"
        yield _issue(spec, "head_width", reason, fix)

    if spec.experts and spec.dense_layers >= spec.layers:
        reason = f"leaves no block with experts of model.layers={spec.layers}"
        yield _issue(spec, "dense_layers", reason, f"set model.dense_layers={spec.layers - 1}")
    for name, value in {"activation": ActivationKind.swiglu, "bias": False}.items():
        if spec.experts is not None and getattr(spec, name) != value:
            reason = "is not supported with model.experts, which are SwiGLU without biases"
            fix = f"set {format_override(f'model.{name}', value)}"
            yield _issue(spec, name, reason, fix)


def _latent_attention_issues(spec: DecoderArchitecture) -> Iterator[ConfigIssue]:
    """Yield issues of the fields of latent attention, whose values are positive."""
    if not spec.has_latent_attention:
        for name in ("query_latent_dim", "rope_head_dim", "value_head_dim"):
            if getattr(spec, name) is not None:
                reason = "requires model.kv_latent_dim, latent attention"
                yield _issue(spec, name, reason, _override(name, None))
        return
    usual = {"position": "rope", "qk_norm": "none", "bias": False, "qkv_bias": False}
    for name, value in {**usual, "rotary_fraction": 1.0}.items():
        if getattr(spec, name) != value:
            reason = "is not supported with model.kv_latent_dim"
            yield _issue(spec, name, reason, _override(name, value))
    if spec.key_heads != spec.heads:
        reason = "is not supported with model.kv_latent_dim: each query head has a key"
        yield _issue(spec, "kv_heads", reason, _override("kv_heads", None))
    rope = spec.rope_head_dim
    if rope is None or rope % 2 or rope >= spec.head_size:
        reason = f"has to be even and less than the width of a head, {spec.head_size}"
        fix = max(2, spec.head_size // 3 // 2 * 2)
        yield _issue(spec, "rope_head_dim", reason, _override("rope_head_dim", fix))
    elif spec.value_size > spec.head_size:
        reason = f"exceeds the width of a head of queries and keys, {spec.head_size}"
        yield _issue(spec, "value_head_dim", reason, _override("value_head_dim", None))


def _base_model_issues(spec: DecoderArchitecture) -> Iterator[ConfigIssue]:
    """Yield issues of the base model of muP, whose sizes are positive."""
    width, heads = spec.base_width, spec.base_heads
    if width is None and heads is None:
        return
    if width is None:
        reason = "requires model.base_width, the width of the base model"
        fix = f"{_override('base_width', spec.width)}, or model.base_heads=null"
        yield _issue(spec, "base_heads", reason, fix)
        return
    if heads is None:
        reason = "requires model.base_heads, the number of query heads of the base model"
        yield _issue(spec, "base_width", reason, _override("base_heads", spec.heads))
    elif spec.head_width is None and width % heads:
        reason = f"is not divisible by model.base_heads={heads}"
        fix = _override("base_width", heads * (width // heads + 1))
        yield _issue(spec, "base_width", reason, fix)
    if spec.experts:
        reason = "is not supported with model.experts, for which muP has no rule here"
        yield _issue(spec, "base_width", reason, NO_BASE_MODEL)
    if spec.has_latent_attention:
        reason = "is not supported with model.kv_latent_dim, a width that does not follow the model"
        yield _issue(spec, "base_width", reason, NO_BASE_MODEL)
    if spec.weights is not None:
        reason = "scales initial weights and logits, which model.weights has already"
        yield _issue(spec, "base_width", reason, NO_BASE_MODEL)


def _issue(spec: DecoderArchitecture, field: str, reason: str, fix: str) -> ConfigIssue:
    return ConfigIssue(f"model.{field}", getattr(spec, field), reason, fix)


def _override(field: str, value: object) -> str:
    return f"set {format_override(f'model.{field}', value)}"
