"""Encoder-decoder models: FLOPs equal torch's counter, generation equals transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fixtures.hf_checkpoints import HFCheckpoints
from fixtures.multi_stack_models import MultiStackModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.prepare import prepare_splits
from scalewise.evaluation import validation_metrics
from scalewise.evaluation.generation import generate_answer
from scalewise.models.base import AttentionFlops
from scalewise.models.build import build_model
from scalewise.models.hf.config import HuggingFaceConfig

Stack = Callable[[str], MultiStackModel]


@pytest.mark.parametrize("sizes", [(24, 8), (64, 40)])
def test_seq2seq_flops_equal_torch_counter(
    sizes: tuple[int, int], hf_checkpoint: HFCheckpoints
) -> None:
    """torch counts no recomputed scores; half of the target's pairs are causal."""
    sequence, target = sizes
    spec = HuggingFaceConfig(path=str(hf_checkpoint("t5")))
    module = build_model(spec, 1)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        inputs = [torch.ones((1, n), dtype=torch.long) for n in (sequence - target, target)]
        module(*inputs).sum().backward()
    source, width = sequence - target, spec.query_width
    pairs = 2 * source**2 + 3 * (target**2 + target * source)
    kernel, palm, causal = (
        spec.flops(sequence, target, attention) * sequence
        for attention in (AttentionFlops.kernel, AttentionFlops.palm, AttentionFlops.causal)
    )
    assert counter.get_total_flops() == pytest.approx(palm, rel=1e-9)
    assert kernel - palm == pytest.approx(2 * pairs * width)
    assert palm - causal == pytest.approx(6 * 3 * target**2 * width)


def test_seq2seq_generation_equals_transformers(multi_stack_model: Stack) -> None:
    stack = multi_stack_model("t5_gated")
    run, peer = stack.compose(), stack.transformers_model()
    dataset = prepare_splits(run.data, 256, run.seed).validation
    assert dataset is not None
    module = build_model(HuggingFaceConfig(path=str(stack.folder)), 1)
    metrics = validation_metrics.measure_loss(module, dataset, 10, 4)
    (batch,) = TrainLoader(dataset, BatchShare(10, 10), seed=1, steps=1)
    with torch.no_grad():
        assert metrics.loss == pytest.approx(
            peer(**stack.transformers_inputs(batch)).loss.item(), rel=1e-5
        )
    assert metrics.labels == int((batch["labels"] != -100).sum())
    prompt_ids = [5, 9, 200, 31]
    answer_ids = generate_answer(module, prompt_ids, 0.0, 1)
    ids = [next(answer_ids) for _ in range(6)]
    input_ids = torch.tensor([prompt_ids])
    expected = peer.generate(input_ids, max_new_tokens=6, do_sample=False, use_cache=False)
    assert ids == expected[0, 1:].tolist()
