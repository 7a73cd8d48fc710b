"""Private names of transformers, PEFT and datasets, which are imported when a name is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from scalewise.compat import PrivateNames

__all__ = [
    "PEFT_LOGGERS",
    "apply_expert_gate",
    "block_class_names",
    "causal_mask_check",
    "compile_template",
    "disable_lora",
    "has_model_class",
    "is_split_by_node",
    "replaced_mask_checks",
    "unexpected_key_patterns",
]

private = PrivateNames("transformers")
peft = PrivateNames("peft")

PEFT_LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""Loggers of libraries that PEFT imports; their warnings have no switch."""
MASK_CHECKS = {
    "ignore_causal": "_ignore_causal_mask_sdpa",
    "ignore_bidirectional": "_ignore_bidirectional_mask_sdpa",
    "find_packed": "find_packed_sequence_indices",
}


def compile_template(template: str) -> Any:
    """Compile a chat template; the public methods also render a conversation."""
    return private.get("transformers.utils.chat_template_utils:_compile_jinja_template")(template)


@private.reads("_model_mapping")
def has_model_class(auto_class: type, config: object) -> bool:
    """Whether an auto class has a model for a config; the public methods build the model."""
    return type(config) in auto_class._model_mapping  # type: ignore[attr-defined]  # of auto classes


@private.reads("_apply_gate")
def apply_expert_gate(experts: Any, hidden: Any) -> Any:
    """Apply the gated activation of experts; no public method has the clamps of some models."""
    return experts._apply_gate(hidden)


@private.reads("_no_split_modules")
def block_class_names(model: Any) -> set[str]:
    """Names of the classes of a model's blocks; the public API does not tell blocks apart."""
    return set(model._no_split_modules or ())


@private.reads("_keys_to_ignore_on_load_unexpected")
def unexpected_key_patterns(model: Any) -> set[str]:
    """Patterns of stored names that a model does not load; no public attribute has them."""
    return set(model._keys_to_ignore_on_load_unexpected or ())


def causal_mask_check() -> Callable[..., bool]:
    """Check whether attention needs a mask besides the causal one; no option disables it."""
    check: Callable[..., bool] = private.get("transformers.masking_utils:_ignore_causal_mask_sdpa")
    return check


@contextmanager
def replaced_mask_checks(**checks: Callable[..., Any]) -> Iterator[None]:
    """Context with other checks of masks; those of transformers synchronize with the device.

    Args:
        checks: Functions by name: ``ignore_causal``, ``ignore_bidirectional`` and ``find_packed``.
    """
    with ExitStack() as replacements:
        for name, check in checks.items():
            path = f"transformers.masking_utils:{MASK_CHECKS[name]}"
            replacements.enter_context(private.replaced(path, check))
        yield


def disable_lora(layer: Any, disabled: bool) -> None:
    """Leave out the products of a LoRA layer; PEFT's switch also changes what is trained."""
    peft.replace_attribute(layer, "_disable_adapters", disabled)


def is_split_by_node(dataset: object) -> bool:
    """Whether ``datasets.split_dataset_by_node`` has made a dataset; it has no public mark."""
    return getattr(dataset, "_distributed", None) is not None
