"""Learnt vectors in the place of words before a text, as specs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scalewise.adapters.spec import Adapter
from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.models.base import Model, Weight

if TYPE_CHECKING:
    from scalewise.models.module import ModelModule
    from scalewise.run import Run

NAME = "prompt.weight"


@option("adapter", "prompt")
@dataclass(frozen=True)
class Prompt(Adapter):
    """Prompt tuning (Lester et al., 2021): vectors before the embedded tokens of every row.

    They have the first positions of the row, and no labels. As PEFT does, each number is drawn
    from a normal distribution of deviation 1.
    """

    tokens: int = 16
    """How many vectors, each in the place of a token."""
    resume: str | None = None
    """An adapter to begin with: a run's folder, a checkpoint, or a folder of PEFT's; None: anew."""

    merges = False

    @property
    def ahead(self) -> int:  # type: ignore[override]  # it is read alone
        """Returns the places before the tokens of a row."""
        return self.tokens

    def weights(self, model: Model) -> tuple[Weight, ...]:
        """Returns the model's own, frozen, and the vectors after them."""
        own = (replace(weight, trainable=False) for weight in model.census())
        return (*own, Weight(NAME, (self.tokens, model.width), "embedding"))

    def flops(self, model: Model, sequence: int) -> float:
        """Returns the flops of one forward and backward pass, per token of the text.

        Blocks compute the vectors too; the head, whose weight is frozen, the tokens alone.
        """
        places, head = sequence + self.tokens, model.outputs * model.width
        matrices = (w for w in model.census() if w.layer is not None and len(w.shape) > 1)
        frozen = sum(weight.count for weight in matrices)
        blocks = model.flops(places) - 6.0 * head - 2.0 * frozen
        return blocks * places / sequence + 4.0 * head

    def complaints(self) -> Iterator[Complaint]:
        """Yields figures out of range."""
        if self.tokens < 1:
            yield Complaint("adapter.tokens", self.tokens, "must be 1 or more", "set 16")

    def complaints_of(self, run: Run) -> Iterator[Complaint]:
        """Yields rows that leave no room, and what vectors cannot stand in or be left out of."""
        chosen = run.choices.get("adapter", "prompt")
        places, most = run.data.sequence + self.tokens, run.model.context
        if run.data.sequence <= most < places:
            reason = f"and data.sequence={run.data.sequence} are more than model.context={most}"
            cure = f"set data.sequence={max(1, most - self.tokens)}"
            yield Complaint("adapter.tokens", self.tokens, reason, cure)
        if run.data.packing:
            reason = "stands before a row, and data.packing=true lays several texts into one"
            yield Complaint("adapter", chosen, reason, "set data.packing=false")
        if run.objective.pairs or run.objective.reference is not None:
            objective = run.choices.get("objective", "")
            reason = f"cannot be turned off, as objective={objective} asks the model without it"
            yield Complaint("adapter", chosen, reason, "set adapter=lora")

    def apply(self, module: ModelModule, model: Model) -> None:
        """Freezes the model, and puts the vectors before what its first block reads."""
        module.requires_grad_(False)
        module.put_ahead(self.tokens)

    def fill(self, module: ModelModule, seed: int) -> None:
        """Draws the vectors."""
        from scalewise.models import initial

        for name, parameter in module.named_parameters():
            if name == NAME:
                initial.draw(name, parameter, seed, 1.0)
