"""Packed texts give the same results as separate texts."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from fixtures.decoder_configs import (
    EXACT_TOLERANCE,
    HF_DECODERS,
    LLAMA,
    for_each_decoder,
    for_each_hf_decoder,
    hf_model,
)
from fixtures.hf_checkpoints import MORE_ARCHITECTURES, RARE_ARCHITECTURES, HFCheckpoints
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    ReferenceRun,
    assert_same_training,
    assert_tensors_close,
    train_strategy,
)
from fixtures.strategies import STRATEGIES, marks
from numpy.typing import NDArray
from torch import Tensor

from scalewise.data.dataloader import Batch, as_batch
from scalewise.data.datasets import PackedTextDataset
from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_model
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.state_dict_adapter import from_hf_state_dict
from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.objectives import IGNORED, CausalLM
from scalewise.strategies.base import ScaledLoss

LENGTHS = (11, 7, 20, 3, 13, 16)
SEQUENCE = 32
PACKING_OVERRIDES = ("data.packing=true",)
CI_STRATEGIES = {"accumulated": (), "combined": ("context", "pipeline_gpipe")}
CASES = [
    pytest.param(
        batch, strategy, marks=() if runs_in_ci else (*marks(strategy), pytest.mark.exhaustive)
    )
    for batch in CI_STRATEGIES
    for strategy in STRATEGIES
    for runs_in_ci in [strategy in CI_STRATEGIES[batch]]
]


def texts(spec: DecoderConfig) -> list[NDArray[np.int32]]:
    """Token ids of texts; first tokens and the first third of each text are not labels."""
    rng = np.random.default_rng(5)
    token_ids = [rng.integers(0, spec.vocabulary, length, dtype=np.int32) for length in LENGTHS]
    return [np.where(np.arange(len(ids)) < len(ids) // 3, ~ids, ids) for ids in token_ids]


def packed(spec: DecoderConfig) -> Batch:
    """Batch of all texts in as few sequences as possible."""
    ids_N = np.concatenate(texts(spec))
    dataset = PackedTextDataset(
        ids_N, np.cumsum([0, *LENGTHS]), np.arange(len(LENGTHS)), SEQUENCE, end_token=0
    )
    assert len(dataset) < len(LENGTHS)
    return as_batch(dataset.gather(range(len(dataset))), False, masked=True, packing=True)


def single_batch(ids_S: NDArray[np.int32]) -> Batch:
    """Batch with one text as its only sequence."""
    return as_batch(ids_S[None].astype(np.int64), False, masked=True)


def text_slice_of(batch: Batch, ids_S: NDArray[np.int32]) -> tuple[int, slice]:
    """Sequence of a text in a batch, and its positions without the last token."""
    expected = torch.from_numpy(np.where(ids_S < 0, ~ids_S, ids_S)[:-1].astype(np.int64))
    for index, first in (batch["positions"] == 0).nonzero().tolist():
        text_slice = slice(first, first + len(expected))
        if torch.equal(batch["inputs"][index, text_slice], expected):
            return index, text_slice
    raise AssertionError("a text is in no row")


def assert_packed_equals_separate(module: ModelModule, spec: DecoderConfig) -> None:
    """Compare logits and gradients of packed texts with those of one text at a time."""
    batch = packed(spec)
    logits_BTV = module(batch["inputs"], None, batch["positions"])
    ScaledLoss(CausalLM()).compute(module, batch).backward()
    gradients = _gradients(module)
    module.zero_grad()
    for ids_S in texts(spec):
        single_text_batch = single_batch(ids_S)
        torch.testing.assert_close(
            logits_BTV[text_slice_of(batch, ids_S)],
            module(single_text_batch["inputs"])[0],
            **EXACT_TOLERANCE,
        )
        ScaledLoss(CausalLM()).compute(module, single_text_batch).backward()
    assert_tensors_close(gradients, _gradients(module), "gradients")
    labels = sum(int((ids_S[1:] >= 0).sum()) for ids_S in texts(spec))
    assert int((batch["labels"] != IGNORED).sum()) == labels


@for_each_decoder
def test_packed_texts_equal_separate_texts(spec: DecoderConfig) -> None:
    assert_packed_equals_separate(build_model(spec, 3), spec)


def _gradients(module: ModelModule) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@for_each_hf_decoder
def test_packed_logits_equal_transformers_position_ids(spec: DecoderConfig) -> None:
    expected, batch = hf_model(spec), packed(spec)
    actual = build_model(spec, 0)
    actual.load_state_dict(from_hf_state_dict(expected.state_dict(), spec))
    with torch.no_grad():
        expected_logits = expected(
            batch["inputs"], position_ids=batch["positions"], use_cache=False
        ).logits
        actual_logits = actual(batch["inputs"], None, batch["positions"])
    torch.testing.assert_close(actual_logits, expected_logits, **EXACT_TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_packed_texts_equal_separate_texts_in_transformers_models(
    family: str, hf_checkpoint: HFCheckpoints
) -> None:
    spec = HuggingFaceConfig(path=str(hf_checkpoint(family)))
    assert_packed_equals_separate(build_model(spec, 3).eval(), LLAMA)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [*MORE_ARCHITECTURES, *RARE_ARCHITECTURES])
@torch.no_grad()
def test_packed_logits_equal_separate_texts_in_more_architectures(
    family: str, hf_checkpoint: HFCheckpoints
) -> None:
    spec = HuggingFaceConfig(path=str(hf_checkpoint(family)))
    assert spec.info.packs_texts == (family != "xglm")
    if not spec.info.packs_texts:
        return
    module, batch = build_model(spec, 3).eval(), packed(LLAMA)
    logits_BTV = module(batch["inputs"], None, batch["positions"])
    for ids_S in texts(LLAMA):
        torch.testing.assert_close(
            logits_BTV[text_slice_of(batch, ids_S)],
            module(single_batch(ids_S)["inputs"])[0],
            **EXACT_TOLERANCE,
        )


def test_packed_single_text_equals_unpacked() -> None:
    spec = HF_DECODERS["llama-gqa"]
    module, ids_S = build_model(spec, 3), texts(spec)[2]
    single_text_batch = single_batch(ids_S)
    position_ids = torch.arange(single_text_batch["inputs"].shape[1])[None]
    torch.testing.assert_close(
        module(single_text_batch["inputs"], None, position_ids),
        module(single_text_batch["inputs"]),
        **EXACT_TOLERANCE,
    )


@pytest.mark.exhaustive
def test_packing_costs_at_most_15_percent_more_than_whole_sequences() -> None:
    """Median of paired ratios of CPU times, with texts of 64 tokens and of 1,024 on average."""
    sequence = 2048
    spec = replace(LLAMA, context=sequence, width=128, kv_heads=2, feedforward=256)
    module, inputs = build_model(spec, 0), torch.zeros(1, sequence, dtype=torch.long)

    def step(positions: Tensor | None) -> float:
        begin = time.process_time()
        module(inputs, None, positions).float().logsumexp(-1).sum().backward()
        return time.process_time() - begin

    for mean in (64, 1024):
        is_first = torch.rand(sequence, generator=torch.Generator().manual_seed(4)) < 1 / mean
        index_T = torch.arange(sequence)
        positions = index_T - torch.where(is_first, index_T, 0).cummax(0).values
        ratios = [step(positions[None]) / step(None) for _ in range(9)][2:]
        print(f"texts of {mean} tokens: {median(ratios):.2f}")
        assert median(ratios) < 1.15


@pytest.mark.parametrize("scope", ["block", "whole"])
@pytest.mark.exhaustive
def test_packed_compiled_equals_eager(
    scope: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    compiled = (*PACKING_OVERRIDES, f"compile.scope={scope}", "compile.backend=aot_eager")
    run = train_strategy((), "accumulated", JobRunner(tmp_path, shared_cache), *compiled)
    assert_same_training(run, reference_run("accumulated", *PACKING_OVERRIDES))


@pytest.mark.parametrize(("batch", "strategy"), CASES)
def test_packed_training_under_each_strategy_equals_one_device(
    batch: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(
        STRATEGIES[strategy], batch, JobRunner(tmp_path, shared_cache), *PACKING_OVERRIDES
    )
    assert_same_training(run, reference_run(batch, *PACKING_OVERRIDES))
