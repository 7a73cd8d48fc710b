"""The gradient norm for clipping is exact under every sharding."""

import pytest
import torch

from scalewise.strategies import grad_norm


@pytest.mark.parametrize("num_elements", [1, 1023, 1024, 1025, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_norm_equals_double_precision(num_elements: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(num_elements, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact_norm = float(tensor.double().norm())
    assert float(grad_norm.tensors_norm([tensor])) == pytest.approx(exact_norm, rel=1e-6)
    assert float(grad_norm.tensors_norm(list(tensor.chunk(3)))) == pytest.approx(
        exact_norm, rel=1e-6
    )


def test_grad_norm_of_no_gradients_is_zero() -> None:
    assert float(grad_norm.tensors_norm([])) == 0
    assert float(grad_norm.tensors_norm([torch.zeros(0), torch.zeros(2, 0)])) == 0
