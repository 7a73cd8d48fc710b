"""Image models: FLOPs equal torch's counter, captions equal transformers generation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures.hf_checkpoints import IMAGE_MODELS
from fixtures.multi_stack_models import NUM_QUERIES, MultiStackModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from scalewise import cli
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.prepare import prepare_splits
from scalewise.evaluation import generation, validation_metrics
from scalewise.hardware import DeviceKind
from scalewise.models.base import AttentionFlops
from scalewise.models.build import build_model
from scalewise.models.hf.config import HuggingFaceConfig, InitKind
from scalewise.models.hf.vision_language import VisionLanguageModule
from scalewise.strategies.single import SingleDevice


@pytest.fixture(params=IMAGE_MODELS)
def stack(
    request: pytest.FixtureRequest, multi_stack_model: Callable[[str], MultiStackModel]
) -> MultiStackModel:
    return multi_stack_model(request.param)


def test_captioning_flops_equal_torch_counter(stack: MultiStackModel) -> None:
    """torch counts 12 FLOPs for attention where flash attention's backward takes 14."""
    spec, sequence = HuggingFaceConfig(path=str(stack.folder)), 9
    module = build_model(spec, 1)
    pixels, labels = torch.zeros((1, 3, 32, 32), dtype=torch.uint8), torch.ones((1, sequence))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(pixels, labels.long()).sum().backward()
    assert spec.info.vision is not None
    encoded = NUM_QUERIES + 1
    num_attended = encoded**2 + 2 * sequence * (
        sequence + encoded
    )  # one encoder layer, two decoder layers
    if not stack.has_encoder:
        num_attended = 2 * (sequence + NUM_QUERIES) ** 2
    pairs = spec.info.vision.attention_pairs + num_attended * spec.query_width
    predicted_flops = spec.flops(sequence) * sequence
    assert counter.get_total_flops() == pytest.approx(predicted_flops - 2 * pairs, rel=1e-9)


def test_captioning_flops_omit_gradients_below_the_adapter(stack: MultiStackModel) -> None:
    run = stack.compose("adapter=lora", "model.init=random", "model.depth=8")
    module = SingleDevice(DeviceKind.cpu).build(run)
    pixels, labels = torch.zeros((1, 3, 32, 32), dtype=torch.uint8), torch.ones((1, 9))
    with FlopCounterMode(display=False) as counter:  # the counter omits attention on CPU
        module(pixels, labels.long()).sum().backward()
    assert isinstance(run.model, HuggingFaceConfig)
    assert run.model.info.vision is not None
    num_attended = (9 + NUM_QUERIES) ** 2
    if stack.has_encoder:
        num_attended = (NUM_QUERIES + 1) ** 2 + 9 * (9 + NUM_QUERIES + 1)
    expected_flops = 14.0 * 8 * num_attended * run.model.query_width
    attention = 4.0 * run.model.info.vision.attention_pairs + expected_flops
    # The inputs of the first block are frozen: its first adapted layers have no input gradient.
    counted_flops = counter.get_total_flops()
    assert 9 * run.count_flops(AttentionFlops.kernel) - attention == pytest.approx(
        counted_flops, rel=0.02
    )


def test_captioning_plan_has_memory_and_time_and_equals_its_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny = ("experiment=finetune/captioning_tiny", "hardware=h100", "tracking=none")
    assert cli.main(["plan", *tiny, "plan.method=trace"]) == 0
    stdout = capsys.readouterr().out
    assert "with 6 layers" in stdout
    assert re.search(r"predicted [0-9.]+ MiB, [+-]0.0% ", stdout)
    assert "\nStep time: " in stdout
    for entry_start in ("parameters ", "optimizer state ", "block activations ", "gradients "):
        assert f"\n{entry_start}" in stdout, entry_start


def test_captioning_plan_that_does_not_fit_has_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("experiment=finetune/captioning_tiny", "hardware=cpu", "tracking=none")
    memory_override = "hardware.memory_gib=0.012"
    assert cli.main(["plan", *tiny, memory_override]) == 3
    stdout = capsys.readouterr().out
    assert "Out of memory: " in stdout
    batch_overrides = "trainer.micro_batch=16 trainer.global_batch=64"
    assert f"Suggested fix: {batch_overrides}\n" in stdout
    assert cli.main(["plan", *tiny, memory_override, *batch_overrides.split()]) == 0


def test_captioning_query_tokens_are_initialized(stack: MultiStackModel) -> None:
    spec = HuggingFaceConfig(path=str(stack.folder), init=InitKind.random)
    query_tokens = dict(build_model(spec, 7).named_parameters())["head.query_tokens"]
    assert query_tokens.std().item() == pytest.approx(0.02, rel=0.2)


def test_captioning_generation_equals_transformers(stack: MultiStackModel) -> None:
    run, peer = stack.compose(), stack.transformers_model()
    dataset = prepare_splits(run.data, 32, run.seed).validation
    assert dataset is not None
    module = build_model(HuggingFaceConfig(path=str(stack.folder)), 1)
    assert isinstance(module, VisionLanguageModule)
    metrics = validation_metrics.measure_captions(module, dataset, 10, 4, {0})
    (batch,) = TrainLoader(dataset, BatchShare(10, 10), seed=None, steps=1)
    inputs = stack.transformers_inputs(batch)
    with torch.no_grad():
        assert metrics.loss == pytest.approx(peer(**inputs).loss.item(), rel=1e-5)
    assert metrics.labels == int((batch["labels"] != -100).sum())
    tokens = generation.generate_captions(module, batch["inputs"], 0.0, 1)
    ids_BT = torch.stack([next(tokens) for _ in range(9)], dim=1)
    generation_options: dict[str, Any] = {
        "max_new_tokens": 9,
        "do_sample": False,
        "use_cache": False,
    }
    expected_BT = peer.generate(inputs["pixel_values"], eos_token_id=None, **generation_options)
    assert torch.equal(ids_BT, expected_BT[:, -9:])
    assert metrics.told[0][1] == validation_metrics.truncate_at_end(ids_BT[0].tolist(), {0})
