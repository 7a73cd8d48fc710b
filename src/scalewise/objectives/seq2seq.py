"""Answers that a decoder writes to what an encoder has read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import AutoCheckpointing
from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue
from scalewise.objectives.causal_lm import CausalLM
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

    encodes = True
    by_trace = True
    known = "an encoder with a decoder"

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields figures out of range, and a loss in pieces."""
        yield from super().complaints()
        if self.loss_chunk is not None:
            reason, cure = f"is not taken of {self.known}", "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, cure)

    def complaints_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields a model and data of another kind, and what asks the ledger."""
        yield from self.of_another_kind(run)
        yield from self.of_ledger(run, self.known)
        reason = f"asks the ledger, and {self.known} is known only by trace"
        if isinstance(run.memory, AutoCheckpointing):
            yield ConfigIssue("memory", "auto", reason, "set memory=checkpoint_full")
        if run.trainer.micro_batch == AUTO:
            yield ConfigIssue(SIZE, AUTO, reason, f"set {SIZE}=1")

    def of_another_kind(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields a model of one stack, and data without answers apart."""
        if not run.model.encodes:
            chosen = run.choices.get("model", type(run.model).__name__)
            reason = "has no encoder to read questions"
            cure = "set model=hf model.path=FOLDER of a model as T5, or objective=causal_lm"
            yield ConfigIssue("model", chosen, reason, cure)
        if not run.data.target_length:
            chosen = run.choices.get("data", type(run.data).__name__)
            reason = "has no answers apart from what an encoder reads"
            cure = "set data=seq2seq 'data.paths=[my/*.jsonl]', or objective=causal_lm"
            yield ConfigIssue("data", chosen, reason, cure)
