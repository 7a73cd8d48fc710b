"""Coordinate check of muP: changes of activations during training do not grow with the width.

Also its parameter groups under every strategy, and a base model that trains as without muP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.job_runner import JobRunner
from fixtures.strategies import LLAMA, MUP, STRATEGIES, TINY_DECODER, marks
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.models.build import build_model
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import QKNorm
from scalewise.optimizers import AdamWConfig, OptimizerConfig, SGDConfig
from scalewise.optimizers.build import build_optimizer
from scalewise.optimizers.config import LionConfig
from scalewise.optimizers.lr_transfer import LRTransfer

WIDTHS = (32, 64, 128, 256)
"""Widths in features; the first is that of the base model."""
BASE_HEADS, STEPS, TOKENS, VOCABULARY = 4, 4, 16, 64
FLAT_EXPONENT = 0.15
"""Largest exponent, of either sign, of a size that does not depend on the width."""
GROWTH_EXPONENT = 0.4
"""Smallest exponent of a size that grows."""
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(lr=1e-2, weight_decay=0.1),
    "lion": LionConfig(lr=3e-3, weight_decay=0.1),
    "sgd": SGDConfig(lr=0.5, momentum=0.0, weight_decay=0.01),
}
HEADS: dict[str, Callable[[int], int]] = {
    "wider_heads": lambda width: BASE_HEADS,
    "more_heads": lambda width: BASE_HEADS * width // WIDTHS[0],
}
GROWING = ("block_0", "block_1", "logits")
"""Activations that grow with the width without muP."""


def decoder(width: int, heads: str, *, mup: bool, **options: object) -> DecoderConfig:
    spec = DecoderConfig(
        vocabulary=VOCABULARY,
        context=TOKENS,
        width=width,
        layers=2,
        heads=HEADS[heads](width),
        feedforward=4 * width,
        initial_std=0.1,
    )
    spec = replace(spec, **options)  # type: ignore[arg-type]  # fields by name
    return replace(spec, base_width=WIDTHS[0], base_heads=BASE_HEADS) if mup else spec


def observe(model: nn.Module, activations: dict[str, Tensor]) -> None:
    """Record the activations of each forward pass by name."""

    def scores(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        query_BTHD, key_BTHD = (tensor.detach() for tensor in inputs[:2])
        key_BTHD = key_BTHD.repeat_interleave(query_BTHD.shape[2] // key_BTHD.shape[2], 2)
        products = torch.einsum("bqhd,bkhd->bhqk", query_BTHD, key_BTHD)
        activations["scores"] = products / query_BTHD.shape[-1] ** 0.5

    def output(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: activations.update({name: output.detach()})

    for layer in range(2):
        model.get_submodule(f"blocks.{layer}").register_forward_hook(output(f"block_{layer}"))
    for name in ("query", "output"):
        model.get_submodule(f"blocks.1.attention.{name}").register_forward_hook(output(name))
    model.get_submodule("blocks.1.feedforward.down").register_forward_hook(output("down"))
    model.get_submodule("blocks.1.attention.mix").register_forward_pre_hook(scores)


def mean_changes(spec: DecoderConfig, optimizer_config: OptimizerConfig) -> dict[str, float]:
    """Mean absolute change of activations by name, after some steps on one batch.

    A head of its own starts at zero: the initial logits of muP vanish as the width grows. Of the
    logits, that of the label counts, relative to the mean over the vocabulary.
    """
    model = build_model(spec, seed=1)
    if not spec.tied:
        nn.init.zeros_(model.get_submodule("head").get_parameter("weight"))
    named_weights = zip(spec.weight_census(), model.parameters(), strict=True)
    optimizer = build_optimizer(optimizer_config, named_weights)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (8, TOKENS + 1), generator=generator)
    activations: dict[str, Tensor] = {}
    observe(model, activations)
    initial: dict[str, Tensor] = {}
    labels = tokens[:, 1:]
    for _ in range(STEPS + 1):
        logits = model(tokens[:, :-1])
        label_logits = logits.detach().gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        activations["logits"] = label_logits - logits.detach().mean(-1)
        initial = initial or dict(activations)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    return {name: float((activations[name] - initial[name]).abs().mean()) for name in initial}


def exponents(
    heads: str, optimizer: OptimizerConfig, *, mup: bool, **options: object
) -> dict[str, float]:
    """Exponent of the width in each mean change, by least squares of the logarithms."""
    specs = [decoder(width, heads, mup=mup, **options) for width in WIDTHS]
    changes = [mean_changes(spec, optimizer) for spec in specs]
    return {
        name: float(np.polyfit(np.log(WIDTHS), np.log([it[name] for it in changes]), 1)[0])
        for name in changes[0]
        if not (name == "logits" and specs[0].tied)
    }


def assert_flat(measured: dict[str, float], heads: str) -> None:
    """Assert that no change depends on the width.

    Scores of wider heads are products of queries and keys that are not yet aligned, which vanish.
    """
    for activation, exponent in measured.items():
        message = f"{activation}: width^{exponent:.2f}"
        assert exponent < FLAT_EXPONENT, message
        if not (activation == "scores" and heads == "wider_heads"):
            assert exponent > -FLAT_EXPONENT, message


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_activation_changes_do_not_depend_on_the_width_with_mup(name: str, heads: str) -> None:
    optimizer = replace(OPTIMIZERS[name], lr_transfer=LRTransfer.mup)
    assert_flat(exponents(heads, optimizer, mup=True), heads)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_activation_changes_grow_with_the_width_without_mup(name: str, heads: str) -> None:
    measured = exponents(heads, OPTIMIZERS[name], mup=False)
    for activation in GROWING:
        assert measured[activation] > GROWTH_EXPONENT, activation


def test_activation_changes_grow_if_only_the_model_has_mup() -> None:
    measured = exponents("wider_heads", OPTIMIZERS["adamw"], mup=True)
    for activation in ("block_0", "block_1"):
        assert measured[activation] > GROWTH_EXPONENT, activation


@pytest.mark.parametrize(
    "options", [{"tied": True}, {"qk_norm": QKNorm.head}, {"kv_heads": 2, "bias": True}]
)
def test_activation_changes_of_other_decoders_do_not_depend_on_the_width(
    options: dict[str, object],
) -> None:
    optimizer = replace(OPTIMIZERS["adamw"], lr_transfer=LRTransfer.mup)
    assert_flat(exponents("wider_heads", optimizer, mup=True, **options), "wider_heads")


ADAMW_STEPS = (
    *TINY_DECODER,
    *LLAMA,
    *("schedule=constant", "schedule.warmup_steps=0", "trainer.max_steps=4"),
    *("trainer.global_batch=8", "trainer.micro_batch=2", "trainer.log_every=1"),
    *("trainer.validate_every=2", "trainer.validation_rows=4", "optimizer.lr=3.0e-3"),
)
MUP_STRATEGIES = STRATEGIES | {
    "ddp_zero1": ("parallelism=ddp", "optimizer.shard=true"),
    "deepspeed_zero2_offload": ("parallelism=deepspeed_zero2_offload",),
}
EXHAUSTIVE = pytest.mark.exhaustive
CI_STRATEGIES = ("ddp_zero1", "fsdp", "pipeline_shard", "deepspeed_zero2")


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("mup"), shared_cache)


@pytest.fixture(scope="module")
def one_device(run_job: JobRunner) -> RunDir:
    return run_job.without_defaults(*ADAMW_STEPS, *MUP)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=(*marks(name), *((EXHAUSTIVE,) * (name not in CI_STRATEGIES))))
        for name in (
            *("ddp", "ddp_zero1", "fsdp", "fsdp_zero1", "fsdp_offload", "hsdp", "tensor"),
            *("shard_tensor", "context", "pipeline_one_f_one_b", "pipeline_shard"),
            *("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero2_offload"),
        )
    ],
)
def test_mup_with_adamw_under_each_strategy_equals_one_device(
    strategy: str, one_device: RunDir, run_job: JobRunner
) -> None:
    run = run_job.without_defaults(*ADAMW_STEPS, *MUP, *MUP_STRATEGIES[strategy])
    for key in ("train/loss", "val/loss"):
        assert run.column(key) == pytest.approx(one_device.column(key), rel=1e-5), key


def test_base_model_of_mup_trains_as_without_mup(run_job: JobRunner) -> None:
    base_model = (*MUP, "model.base_width=32", "model.base_heads=4")
    runs = [run_job.without_defaults(*ADAMW_STEPS, *options) for options in ((), base_model)]
    assert runs[0].column("train/loss") == runs[1].column("train/loss")
