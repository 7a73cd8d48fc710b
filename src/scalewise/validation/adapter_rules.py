"""Rules between the adapter and the other parts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import ClassVar

from scalewise.adapters.config import AdapterConfig
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_config import LoRAAdapterConfig
from scalewise.adapters.prompt_config import PromptAdapterConfig, VirtualTokenAdapterConfig
from scalewise.adapters.target_modules import (
    AUTO,
    TARGETS_KEY,
    TRAINED_KEY,
    linear_layers,
    match_modules,
    match_targets,
)
from scalewise.errors import ConfigIssue, did_you_mean
from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.models.base import ModelConfig
from scalewise.run_config import RunConfig


@singledispatch
def adapter_issues(adapter: AdapterConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of the adapter with other parts of the run: none."""
    yield from ()


@adapter_issues.register(LoRAAdapterConfig)
def _lora_issues(adapter: LoRAAdapterConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    adapted_layers = adapter.adapted_layers(run.model)
    yield from _pattern_issues(adapter, adapted_layers, run.model)
    experts = [name for name in adapted_layers if name in run.model.expert_layers]
    if experts and adapter.dropout:
        reason = f"is not supported for experts, of which {TARGETS_KEY} matches {experts[0]}"
        fix = "set adapter.dropout=0"
        yield ConfigIssue("adapter.dropout", adapter.dropout, reason, fix)


@adapter_issues.register(IA3AdapterConfig)
def _ia3_issues(adapter: IA3AdapterConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    scaled_layers = adapter.scaled_layers(run.model)
    yield from _pattern_issues(adapter, scaled_layers, run.model)


@adapter_issues.register(VirtualTokenAdapterConfig)
def _virtual_token_issues(
    adapter: VirtualTokenAdapterConfig, run: RunConfig
) -> Iterator[ConfigIssue]:
    """Yield issues for too long sequences, and for objectives that disable the adapter."""
    positions, context = run.data.sequence + adapter.tokens, run.model.context
    if run.data.sequence <= context < positions:
        reason = f"plus data.sequence={run.data.sequence} exceeds model.context={context}"
        fix = f"set data.sequence={context - adapter.tokens}"
        if context <= adapter.tokens:
            tokens = min(adapter.tokens, context) // 2
            fix = f"set adapter.tokens={tokens} data.sequence={min(positions, context) - tokens}"
        yield ConfigIssue("adapter.tokens", adapter.tokens, reason, fix)
    if run.objective.pairs or run.objective.reference_objective is not None:
        option = run.option("adapter")
        objective = run.option("objective")
        reason = f"cannot be disabled, which objective={objective} requires"
        yield ConfigIssue("adapter", option, reason, "set adapter=lora")


@adapter_issues.register(PromptAdapterConfig)
def _prompt_issues(adapter: PromptAdapterConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for the sequence length, the objective and packing."""
    yield from _virtual_token_issues(adapter, run)
    if run.data.packing:
        reason = (
            "is not supported with data.packing=true, which joins several texts in one sequence"
        )
        option = run.option("adapter")
        yield ConfigIssue("adapter", option, reason, "set data.packing=false")


def _pattern_issues(
    adapter: AdapterConfig, adapted_layers: tuple[str, ...], model: ModelConfig
) -> Iterator[ConfigIssue]:
    """Yield an issue for each pattern that matches no layer or module of the model.

    Also for modules that are trained in full and that the adapter adapts (``adapted_layers``).
    """
    with_experts = adapter.adapts_experts
    for target in adapter.targets:
        if target == AUTO or match_targets((target,), model, with_experts=with_experts):
            continue
        reason = "matches no linear layer of the model's blocks"
        layers = (*linear_layers(model), *(model.expert_layers if with_experts else ()))
        fix = did_you_mean(target, layers)
        if match_targets((target,), model, with_experts=True):
            reason = "matches matrices of routed experts, which this adapter does not support"
            fix = "set adapter=lora"
        yield ConfigIssue(TARGETS_KEY, target, reason, fix)
    for pattern in adapter.trained:
        modules = match_modules((pattern,), model)
        if not modules:
            reason = "matches no module with weights"
            yield ConfigIssue(
                TRAINED_KEY, pattern, reason, did_you_mean(pattern, match_modules((".*",), model))
            )
        elif conflicting := [name for name in modules if name in adapted_layers]:
            reason = f"matches {conflicting[0]}, which {TARGETS_KEY} matches too"
            yield ConfigIssue(TRAINED_KEY, pattern, reason, "remove it from one of them")


@dataclass(frozen=True)
class TrainedAdapter:
    """Trained adapter from which a run starts."""

    path: str
    """Folder of a run, a checkpoint or a PEFT folder."""

    implementation: ClassVar[str] = "scalewise.validation.adapter_resume_rules"


@lazy_dispatch
def resume_issues(trained_adapter: TrainedAdapter, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield each reason why a run cannot start from a trained adapter.

    The files of the adapter are read with torch. ``run`` is valid otherwise.
    """
    raise not_registered(resume_issues, trained_adapter)
