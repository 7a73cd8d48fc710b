"""The gradient norm for clipping is exact under every sharding."""

import pytest
import torch

from scalewise.strategies import grad_norm


@pytest.mark.parametrize("numbers", [1, 1023, 1024, 1025, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_norm_equals_double_precision(numbers: int, dtype: torch.dtype) -> None:
    whole = torch.randn(numbers, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = float(whole.double().norm())
    assert float(grad_norm.tensors_norm([whole])) == pytest.approx(exact, rel=1e-6)
    assert float(grad_norm.tensors_norm(list(whole.chunk(3)))) == pytest.approx(exact, rel=1e-6)


def test_grad_norm_of_no_gradients_is_zero() -> None:
    assert float(grad_norm.tensors_norm([])) == 0
    assert float(grad_norm.tensors_norm([torch.zeros(0), torch.zeros(2, 0)])) == 0
