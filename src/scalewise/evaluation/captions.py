"""Generation of image captions, and their exact match with the references.

Shape suffixes: B samples, C channels, H and W pixels, T tokens of a caption.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor

from scalewise.data.dataloader import Batch, BatchShare, ValidationLoader
from scalewise.data.prepare import TokenDataset
from scalewise.evaluation import validation_metrics
from scalewise.evaluation.generation import sample_token
from scalewise.evaluation.validation_metrics import ValidationMetrics
from scalewise.models.base_module import ModelModule
from scalewise.models.hf.vision_language import VisionLanguageModule
from scalewise.objectives import IGNORED

MAX_SHOWN = 3
"""Number of captions that are shown."""


@dataclass(frozen=True)
class CaptionMetrics(ValidationMetrics):
    """Validation metrics of image captioning."""

    exact: float
    """Fraction of the generated captions that equal their reference."""
    told: tuple[tuple[list[int], list[int]], ...]
    """Tokens of the first captions, as pairs of reference and generated caption."""

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.exact:.1%} of captions match exactly"


@torch.no_grad()
def measure_captions(
    module: ModelModule,
    dataset: TokenDataset,
    count: int,
    micro_batch: int,
    end_token_ids: Collection[int],
    on_progress: Callable[[int], None] = lambda done: None,
) -> CaptionMetrics:
    """Evaluate an unsharded model on the first ``count`` samples of a dataset.

    Args:
        module: Model.
        dataset: Validation samples.
        count: Number of samples.
        micro_batch: Micro-batch size.
        end_token_ids: Tokens that end a caption.
        on_progress: Function that is called with the number of evaluated samples.
    """
    metrics = validation_metrics.measure_loss(module, dataset, count, micro_batch, on_progress)
    captions: list[tuple[list[int], list[int]]] = []
    batch_share = BatchShare(metrics.rows, min(micro_batch, metrics.rows))
    for batch in ValidationLoader(dataset, batch_share):
        captions += _iter_captions(module, batch, end_token_ids)
    captions = captions[: metrics.rows]  # without the padding of the last micro-batch
    exact = sum(reference == generated for reference, generated in captions) / len(captions)
    return CaptionMetrics(**asdict(metrics), exact=exact, told=tuple(captions[:MAX_SHOWN]))


def _iter_captions(
    module: ModelModule, batch: Batch, end_token_ids: Collection[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Reference and generated caption of each sample of a batch."""
    tokens = generate_captions(module, batch["inputs"], 0.0, 1)
    generated_BT = torch.stack([next(tokens) for _ in range(batch["labels"].shape[1])], dim=1)
    for label_T, generated_T in zip(batch["labels"], generated_BT, strict=True):
        yield (
            truncate_at_end(label_T[label_T != IGNORED].tolist(), end_token_ids),
            truncate_at_end(generated_T.tolist(), end_token_ids),
        )


def truncate_at_end(tokens: list[int], end_token_ids: Collection[int]) -> list[int]:
    """Tokens before the first end token."""
    ends = (index for index, token in enumerate(tokens) if token in end_token_ids)
    return tokens[: next(ends, None)]


@torch.no_grad()
def generate_captions(
    module: ModelModule, pixels_BCHW: Tensor, temperature: float, seed: int
) -> Iterator[Tensor]:
    """Generate the next token of each caption, ``tokens_B``, without end.

    Args:
        module: Vision-language model.
        pixels_BCHW: Images.
        temperature: Temperature of the softmax from which tokens are sampled; 0: greedy decoding.
        seed: Seed of the random generator.
    """
    model = cast(VisionLanguageModule, module)
    generator = torch.Generator().manual_seed(seed)
    image_features = model.encode_images(pixels_BCHW.to(next(model.parameters()).device))
    text_BT = torch.zeros((len(image_features), 0), dtype=torch.long, device=image_features.device)
    while True:
        padded_BT = torch.nn.functional.pad(text_BT, (0, 1))  # the last position is not read
        logits_BV = model.decode_text(image_features, padded_BT)[:, -1].float().cpu()
        tokens_B = torch.tensor([sample_token(each, temperature, generator) for each in logits_BV])
        yield tokens_B
        text_BT = torch.cat([text_BT, tokens_B[:, None].to(text_BT.device)], dim=1)
