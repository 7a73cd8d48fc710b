"""What a model says of pictures, and how much of it is said as it was to be.

Shape suffixes: B rows, C colours, H and W pixels, T tokens of a caption.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor

from scalewise.data.base import Sequences
from scalewise.data.dataloader import Batch, BatchShare, ValidationLoader
from scalewise.evaluation import validation_metrics
from scalewise.evaluation.generation import sample_token
from scalewise.evaluation.validation_metrics import ValidationMetrics
from scalewise.models.base_module import ModelModule
from scalewise.models.hf.vision_language import VisionLanguageModule
from scalewise.objectives import IGNORED

TOLD = 3
"""Captions of the first rows that are shown."""


@dataclass(frozen=True)
class CaptionMetrics(ValidationMetrics):
    """The same, and the share of captions that are written right, to the end and no further.

    ``told`` are the tokens of the first ones: as they were to be, and as the model wrote them.
    """

    exact: float
    told: tuple[tuple[list[int], list[int]], ...]

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.exact:.1%} of captions are written right"


@torch.no_grad()
def measure_captions(
    module: ModelModule,
    dataset: Sequences,
    count: int,
    micro_batch: int,
    end_token_ids: Collection[int],
    on_progress: Callable[[int], None] = lambda done: None,
) -> CaptionMetrics:
    """Returns how a whole model does on the first ``count`` rows; ``on_progress`` hears of rows
    done.

    A caption is taken up to the first of ``end_token_ids``.
    """
    found = validation_metrics.measure_loss(module, dataset, count, micro_batch, on_progress)
    said: list[tuple[list[int], list[int]]] = []
    for batch in ValidationLoader(dataset, BatchShare(found.rows, min(micro_batch, found.rows))):
        said += _iter_captions(module, batch, end_token_ids)
    said = said[: found.rows]  # the others fill a micro batch up
    exact = sum(right == wrote for right, wrote in said) / len(said)
    return CaptionMetrics(**asdict(found), exact=exact, told=tuple(said[:TOLD]))


def _iter_captions(
    module: ModelModule, batch: Batch, end_token_ids: Collection[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields each caption of a batch as it was to be, and as it is written."""
    tokens = generate_captions(module, batch["inputs"], 0.0, 1)
    wrote_BT = torch.stack([next(tokens) for _ in range(batch["labels"].shape[1])], dim=1)
    for right_T, wrote_T in zip(batch["labels"], wrote_BT, strict=True):
        yield (
            truncate_at_end(right_T[right_T != IGNORED].tolist(), end_token_ids),
            truncate_at_end(wrote_T.tolist(), end_token_ids),
        )


def truncate_at_end(tokens: list[int], end_token_ids: Collection[int]) -> list[int]:
    """Returns the tokens before the first that ends a text."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in end_token_ids), None)]


@torch.no_grad()
def generate_captions(
    module: ModelModule, pixels_BCHW: Tensor, temperature: float, seed: int
) -> Iterator[Tensor]:
    """Yields ``tokens_B`` of captions, one after the other, for as long as it is asked.

    Each is read with all that came before. A ``temperature`` of 0 takes the likeliest; others draw
    from the softmax of the logits over it.
    """
    model = cast(VisionLanguageModule, module)
    generator = torch.Generator().manual_seed(seed)
    seen = model.encode_images(pixels_BCHW.to(next(model.parameters()).device))
    text_BT = torch.zeros((len(seen), 0), dtype=torch.long, device=seen.device)
    while True:
        read_BT = torch.nn.functional.pad(text_BT, (0, 1))  # the last is not read
        logits_BV = model.decode_text(seen, read_BT)[:, -1].float().cpu()
        tokens_B = torch.tensor([sample_token(each, temperature, generator) for each in logits_BV])
        yield tokens_B
        text_BT = torch.cat([text_BT, tokens_B[:, None].to(text_BT.device)], dim=1)
