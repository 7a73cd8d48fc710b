"""Rules between ``optimizer.lr_transfer`` and the other parts of a run."""

from __future__ import annotations

from collections.abc import Iterator

from scalewise.adapters.config import NoAdapterConfig
from scalewise.errors import ConfigIssue
from scalewise.models.decoder.config import DecoderConfig
from scalewise.optimizers import OptimizerConfig
from scalewise.optimizers.config import AdafactorConfig, MuonConfig, ScheduleFreeConfig
from scalewise.optimizers.lr_transfer import LRTransfer
from scalewise.run_config import RunConfig

KEY = "optimizer.lr_transfer"
MISSING_RULES: dict[type[OptimizerConfig], str] = {
    AdafactorConfig: "its steps are relative to the size of a parameter and to 1 / sqrt(step)",
    MuonConfig: "the size of an orthogonalized update is that of the whole matrix",
    ScheduleFreeConfig: "its checkpoints store one largest learning rate for all parameters",
}
"""Reason why an optimizer has no rule."""


def lr_transfer_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of muP without a base model, and of a base model without muP.

    Also yields optimizers without a rule, and adapters.
    """
    model, optimizer = run.model, run.optimizer
    base_width = model.base_width if isinstance(model, DecoderConfig) else None
    if optimizer.lr_transfer is LRTransfer.none:
        if base_width is not None:
            reason = f"scales initial weights and logits for muP, which requires {KEY}=mup"
            fix = f"set {KEY}=mup, or model.base_width=null model.base_heads=null"
            yield ConfigIssue("model.base_width", base_width, reason, fix)
        return
    value, without = optimizer.lr_transfer.value, f"{KEY}=none"
    if not isinstance(model, DecoderConfig):
        reason = f"requires model.base_width, which model={run.option('model')} does not have"
        yield ConfigIssue(KEY, value, reason, f"set {without}, or model=decoder_nano")
    elif base_width is None:
        reason = "requires model.base_width, the width of the model whose optimizer.lr was tuned"
        sizes = f"model.base_width={model.width} model.base_heads={model.heads}"
        yield ConfigIssue(KEY, value, reason, f"set {sizes}, or {without}")
    if optimizer.update_scale is None:
        reason = f"has no rule for optimizer={run.option('optimizer')}"
        if type(optimizer) in MISSING_RULES:
            reason += f": {MISSING_RULES[type(optimizer)]}"
        yield ConfigIssue(KEY, value, reason, f"set optimizer=adamw, or {without}")
    if not isinstance(run.adapter, NoAdapterConfig):
        reason = f"has no rule for the weights of adapter={run.option('adapter')}"
        yield ConfigIssue(KEY, value, reason, f"set adapter=none, or {without}")
