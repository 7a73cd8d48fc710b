"""Stochastic rounding of bf16 parameters: expectation, small updates, equality of chunks."""

from __future__ import annotations

from math import sqrt
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from scalewise.models.base import Weight
from scalewise.optimizers import AdamWConfig, OptimizerConfig, SGDConfig
from scalewise.optimizers import stochastic_rounding as rounding
from scalewise.optimizers.build import build_optimizer
from scalewise.optimizers.config import AdafactorConfig, LionConfig
from scalewise.optimizers.stochastic_rounding import (
    StochasticRoundingOptimizer,
    round_to_bf16,
    shard_index,
)

SAMPLES = 4096
SIGMAS = 6
"""Tolerated distance from an expectation, in standard deviations of the mean."""
OPTIMIZERS: tuple[OptimizerConfig, ...] = (
    AdamWConfig(lr=1e-2),
    AdamWConfig(lr=1e-2, fused=False),
    SGDConfig(lr=1e-2),
    SGDConfig(lr=1e-2, weight_decay=0.1, nesterov=True),
    LionConfig(lr=1e-2),
    AdafactorConfig(),
)


def rounded(values: Tensor, seed: int = 1) -> Tensor:
    result = values.clone()
    round_to_bf16(result, torch.Generator().manual_seed(seed))
    return result


def wrap(
    config: OptimizerConfig, parameters: dict[str, nn.Parameter], seed: int = 1
) -> StochasticRoundingOptimizer:
    weights = [(Weight(name, tuple(p.shape), "attention"), p) for name, p in parameters.items()]
    names = {parameter: name for name, parameter in parameters.items()}
    return StochasticRoundingOptimizer(
        build_optimizer(config, weights), names, seed, elementwise=config.elementwise
    )


class TestRounding:
    def test_rounding_is_unbiased(self) -> None:
        """The mean of a two-point distribution with spacing u has a deviation <= u / 2 sqrt(n)."""
        torch.manual_seed(0)
        values = torch.randn(256) * 10.0 ** torch.randint(-30, 30, (256,))
        samples = rounded(values.repeat(SAMPLES, 1)).double()
        below = (values.view(torch.int32) & -65536).view(torch.float32).double()
        above = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32).double()
        spacing = (above - below).abs()
        assert (((samples == below) | (samples == above)).all(0)).all()
        error = (samples.mean(0) - values.double()).abs()
        probability = ((values.double() - below) / (above - below)).clamp(0, 1)
        deviation = spacing * (probability * (1 - probability) / SAMPLES).sqrt()
        assert (error <= SIGMAS * deviation + 1e-9 * spacing).all()
        # Rounding to nearest has errors that no number of samples reduces.
        nearest_error = (values.bfloat16().double() - values.double()).abs()
        assert (nearest_error > SIGMAS * deviation).float().mean() > 0.8

    def test_values_of_bf16_stay(self) -> None:
        torch.manual_seed(0)
        special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, 3.3895e38])
        values = torch.cat([torch.randn(1000), special]).bfloat16().float()
        assert torch.equal(rounded(values), values)
        assert torch.equal(rounded(values).signbit(), values.signbit())

    def test_every_nan_stays_a_nan(self) -> None:
        """CUDA's NaN has all bits set: a carry would make it zero."""
        bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, -(1 << 22)], dtype=torch.int32)
        values = bits.repeat(SAMPLES).view(torch.float32)
        assert rounded(values).isnan().all()

    def test_equal_seeds_round_equally(self) -> None:
        values = torch.randn(1000)
        assert torch.equal(rounded(values), rounded(values))
        assert not torch.equal(rounded(values), rounded(values, seed=2))


class TestSmallUpdates:
    def test_updates_below_half_a_bit_are_kept_on_average(self) -> None:
        """100 updates of 1/1024 of 1, where the next bf16 values are 1/256 and 1/128 away."""
        steps, update = 100, 2.0**-10
        parameters = {
            kind: nn.Parameter(torch.ones(SAMPLES, dtype=torch.bfloat16))
            for kind in ("stochastic", "nearest")
        }
        config = SGDConfig(lr=update, momentum=0.0)
        stochastic = wrap(config, {"w": parameters["stochastic"]})
        nearest = torch.optim.SGD([parameters["nearest"]], lr=update)
        for _ in range(steps):
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            stochastic.step()
            nearest.step()
        assert torch.equal(parameters["nearest"].detach().float(), torch.ones(SAMPLES))
        mean = parameters["stochastic"].detach().double().mean().item()
        # Each rounding has a variance of at most (spacing / 2) ** 2, and the spacing is <= 1/256.
        deviation = sqrt(steps) * (1 / 256 / 2) / sqrt(SAMPLES)
        assert mean == pytest.approx(1 - steps * update, abs=SIGMAS * deviation)


@pytest.mark.parametrize("config", OPTIMIZERS, ids=repr)
class TestUpdates:
    def test_update_is_that_of_fp32_up_to_one_bit(self, config: OptimizerConfig) -> None:
        torch.manual_seed(0)
        start, gradient = torch.randn(32, 48).bfloat16(), torch.randn(32, 48).bfloat16()
        exact, parameter = nn.Parameter(start.float()), nn.Parameter(start.clone())
        exact.grad, parameter.grad = gradient.float(), gradient.clone()
        build_optimizer(config, [(Weight("w", (32, 48), "attention"), exact)]).step()
        wrap(config, {"w": parameter}).step()
        assert parameter.dtype is torch.bfloat16
        below = (exact.detach().view(torch.int32) & -65536).view(torch.float32)
        above = ((exact.detach().view(torch.int32) & -65536) + 65536).view(torch.float32)
        actual = parameter.detach().float()
        assert ((actual == below) | (actual == above)).all()
        assert not torch.equal(actual, exact.detach().bfloat16().float())

    def test_state_has_the_bytes_of_the_plan(self, config: OptimizerConfig) -> None:
        parameter = nn.Parameter(torch.randn(32, 48).bfloat16())
        optimizer = wrap(config, {"w": parameter})
        for _ in range(2):
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        tensors = [value for value in optimizer.state[parameter].values() if value.ndim]
        assert {value.dtype for value in tensors} <= {torch.bfloat16}
        expected = config.state_bytes(Weight("w", (32, 48), "attention"), 1, 2)
        assert sum(value.nbytes for value in tensors) == expected

    def test_chunks_equal_the_whole_update(self, config: OptimizerConfig) -> None:
        """Only random bits may differ; with states of several steps."""
        torch.manual_seed(0)
        start = torch.randn(32, 48).bfloat16()
        whole, chunked = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        optimizers = [wrap(config, {"w": parameter}) for parameter in (whole, chunked)]
        with mock.patch.object(rounding, "round_to_bf16"):
            for _ in range(3):
                whole.grad = torch.randn_like(whole)
                chunked.grad = whole.grad.clone()
                optimizers[0].step()
                with mock.patch.object(rounding, "ROUNDED_ELEMENTS", 500):
                    optimizers[1].step()
        assert torch.equal(whole, chunked)
        states = [dict(o.state[p]) for o, p in zip(optimizers, (whole, chunked), strict=True)]
        assert states[0].keys() == states[1].keys()
        for slot, value in states[0].items():
            assert torch.equal(value, states[1][slot]), slot

    def test_random_bits_depend_on_seed_step_and_name(self, config: OptimizerConfig) -> None:
        torch.manual_seed(0)
        start, gradient = torch.randn(32, 48).bfloat16(), torch.randn(32, 48).bfloat16()

        def step(name: str, seed: int, counter: int) -> Tensor:
            parameter = nn.Parameter(start.clone())
            parameter.grad = gradient.clone()
            optimizer = wrap(config, {name: parameter}, seed)
            optimizer.param_groups[0][rounding.COUNTER] = counter
            torch.manual_seed(counter + seed)  # the global generator has no effect
            optimizer.step()
            assert optimizer.param_groups[0][rounding.COUNTER] == counter + 1
            return parameter.detach()

        reference = step("w", 1, 0)
        assert torch.equal(step("w", 1, 0), reference)
        for others in (("v", 1, 0), ("w", 2, 0), ("w", 1, 1)):
            assert not torch.equal(step(*others), reference), others


def test_fp32_parameters_are_not_rounded() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(100))
    exact = nn.Parameter(parameter.detach().clone())
    parameter.grad = torch.randn(100)
    exact.grad = parameter.grad.clone()
    wrap(AdamWConfig(), {"w": parameter}).step()
    build_optimizer(AdamWConfig(), [(Weight("w", (100,), "attention"), exact)]).step()
    assert torch.equal(parameter, exact)


def test_unsharded_parameters_have_no_shard_index() -> None:
    assert shard_index(torch.zeros(3)) == ()
