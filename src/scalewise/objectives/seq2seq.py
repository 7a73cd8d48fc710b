"""Answers that a decoder writes to what an encoder has read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.memory import Auto
from scalewise.objectives.causal_lm import CausalLM
from scalewise.trainer import AUTO, SIZE

if TYPE_CHECKING:
    from scalewise.run import Run


@option("objective", "seq2seq")
@dataclass(frozen=True)
class Seq2Seq(CausalLM):
    """Predict each token of an answer from the question and what is before it: cross-entropy, nats.

    The decoder reads the answer one place on, behind the token that the model begins with, as in
    transformers' ``...ForConditionalGeneration``.
    """

    encodes = True
    by_trace = True
    known = "an encoder with a decoder"

    def complaints(self) -> Iterator[Complaint]:
        """Yields figures out of range, and a loss in pieces."""
        yield from super().complaints()
        if self.loss_chunk is not None:
            reason, cure = f"is not taken of {self.known}", "set objective.loss_chunk=null"
            yield Complaint("objective.loss_chunk", self.loss_chunk, reason, cure)

    def complaints_with(self, run: Run) -> Iterator[Complaint]:
        """Yields a model and data of another kind, and what asks the ledger."""
        yield from self.of_another_kind(run)
        yield from self.of_ledger(run, self.known)
        reason = f"asks the ledger, and {self.known} is known only by trace"
        if isinstance(run.memory, Auto):
            yield Complaint("memory", "auto", reason, "set memory=checkpoint_full")
        if run.trainer.micro_batch == AUTO:
            yield Complaint(SIZE, AUTO, reason, f"set {SIZE}=1")

    def of_another_kind(self, run: Run) -> Iterator[Complaint]:
        """Yields a model of one stack, and data without answers apart."""
        if not run.model.encodes:
            chosen = run.choices.get("model", type(run.model).__name__)
            reason = "has no encoder to read questions"
            cure = "set model=hf model.path=FOLDER of a model as T5, or objective=causal_lm"
            yield Complaint("model", chosen, reason, cure)
        if not run.data.target_length:
            chosen = run.choices.get("data", type(run.data).__name__)
            reason = "has no answers apart from what an encoder reads"
            cure = "set data=seq2seq 'data.paths=[my/*.jsonl]', or objective=causal_lm"
            yield Complaint("data", chosen, reason, cure)
