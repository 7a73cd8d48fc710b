"""Sequence-to-sequence training of encoder-decoder models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import AutoCheckpointing
from scalewise.errors import ConfigIssue
from scalewise.objectives.causal_lm import CausalLM
from scalewise.registry import option_name, register_option
from scalewise.trainer_config import AUTO, SIZE

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


@register_option("objective", "seq2seq")
@dataclass(frozen=True)
class Seq2Seq(CausalLM):
    """Prediction of each answer token from the question: cross-entropy, in nats.

    The decoder input is the answer shifted right behind the model's start token, as in
    transformers' ``...ForConditionalGeneration``.
    """

    needs_encoder_decoder = True
    trace_only = True
    model_kind = "encoder-decoder models"

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range, and of a chunked loss."""
        yield from super().validate()
        if self.loss_chunk is not None:
            reason = f"is not supported for {self.model_kind}"
            fix = "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, fix)

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Issues of an incompatible model or data set, and of options that need a memory model."""
        yield from self.validate_kind(run)
        yield from self.validate_planning(run, self.model_kind)
        reason = f"requires the analytic memory model, which does not cover {self.model_kind}"
        if isinstance(run.memory, AutoCheckpointing):
            yield ConfigIssue("memory", "auto", reason, "set memory=checkpoint_full")
        if run.trainer.micro_batch == AUTO:
            yield ConfigIssue(SIZE, AUTO, reason, f"set {SIZE}=1")

    def validate_kind(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Issues of a model without encoder, and of a data set without encoder inputs."""
        if not run.model.is_encoder_decoder:
            chosen = run.choices.get("model", option_name(run.model))
            reason = "has no encoder"
            fix = "set model=hf model.path=FOLDER of a model such as T5, or objective=causal_lm"
            yield ConfigIssue("model", chosen, reason, fix)
        if not run.data.target_length:
            chosen = run.choices.get("data", option_name(run.data))
            reason = "contains no encoder inputs"
            fix = "set data=seq2seq 'data.paths=[my/*.jsonl]', or objective=causal_lm"
            yield ConfigIssue("data", chosen, reason, fix)
