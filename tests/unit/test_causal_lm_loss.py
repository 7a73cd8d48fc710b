"""Causal language modeling loss: chunks, ignored labels and label smoothing."""

import math

import pytest
import torch
from torch import Tensor

from scalewise.objectives import IGNORED, CausalLM
from scalewise.objectives.losses import sum_over_tokens


class TestCausalLM:
    def test_causal_lm_loss_of_uniform_logits_is_log_vocabulary(self) -> None:
        loss = sum_over_tokens(
            CausalLM(), torch.zeros(2, 3, 11), torch.zeros(2, 3, dtype=torch.long)
        )
        assert loss.item() == pytest.approx(6 * math.log(11))

    def test_causal_lm_loss_is_the_sum_over_chunks(self) -> None:
        logits = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(24).reshape(4, 6) % 5
        labels[1, 2:] = IGNORED
        smoothed_loss = CausalLM(label_smoothing=0.1)
        sum_of_samples = sum(
            sum_over_tokens(smoothed_loss, logits[i : i + 1], labels[i : i + 1]) for i in range(4)
        )
        torch.testing.assert_close(sum_of_samples, sum_over_tokens(smoothed_loss, logits, labels))

    def test_causal_lm_loss_without_labels_is_zero(self) -> None:
        logits = torch.randn(1, 3, 5).requires_grad_()
        loss = sum_over_tokens(CausalLM(label_smoothing=0.1), logits, torch.full((1, 3), IGNORED))
        loss.backward()
        assert loss.item() == 0
        assert logits.grad is not None
        assert not logits.grad.any()

    def test_causal_lm_loss_omits_ignored_labels(self) -> None:
        logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
        labels = torch.tensor([[1, IGNORED, 2, IGNORED]])
        expected = sum_over_tokens(CausalLM(), logits[:, ::2], labels[:, ::2])
        torch.testing.assert_close(sum_over_tokens(CausalLM(), logits, labels), expected)

    def test_causal_lm_loss_sums_in_fp32(self) -> None:
        logits = torch.zeros(1, 2, 3, dtype=torch.bfloat16)
        assert (
            sum_over_tokens(CausalLM(), logits, torch.zeros(1, 2, dtype=torch.long)).dtype
            is torch.float32
        )

    def test_causal_lm_smoothing_equals_torch(self) -> None:
        logits = torch.tensor([[[2.0, 0.0, 0.0]]])
        labels = torch.zeros(1, 1, dtype=torch.long)
        smoothed_loss = sum_over_tokens(CausalLM(label_smoothing=0.3), logits, labels)
        log = torch.log_softmax(logits[0, 0], 0)
        expected = -(0.7 * log[0] + 0.3 * log.mean())
        torch.testing.assert_close(smoothed_loss, expected)


def log_normalizer_loss(logits: Tensor, labels: Tensor, z_loss: float, smoothing: float) -> Tensor:
    """Loss of one position after the other, by its definition."""
    total = torch.zeros((), dtype=torch.float64)
    for logits_V, label in zip(logits.flatten(0, 1).double(), labels.flatten(), strict=True):
        if label == IGNORED:
            continue
        log_z = logits_V.exp().sum().log()
        nll_V = log_z - logits_V
        cross_entropy = (1 - smoothing) * nll_V[label] + smoothing * nll_V.mean()
        total = total + cross_entropy + z_loss * log_z**2
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [1e-4, 0.5])
def test_z_loss_equals_its_definition(z_loss: float, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 5, 7, generator=generator) + 2
    labels = torch.randint(7, (2, 5), generator=generator)
    labels[0, 1:3] = IGNORED
    results = []
    for function in (log_normalizer_loss, None):
        leaf = logits.clone().requires_grad_()
        if function:
            loss = function(leaf, labels, z_loss, smoothing)
        else:
            objective = CausalLM(z_loss=z_loss, label_smoothing=smoothing)
            loss = sum_over_tokens(objective, leaf, labels)
        loss.backward()
        results.append((loss.detach().float(), leaf.grad))
    torch.testing.assert_close(results[1], results[0])
    without = sum_over_tokens(CausalLM(label_smoothing=smoothing), logits, labels)
    assert results[1][0] > without * 1.0001


def test_z_loss_is_not_part_of_validation() -> None:
    assert CausalLM(24, z_loss=0.5, label_smoothing=0.1).unregularized == CausalLM(24)
