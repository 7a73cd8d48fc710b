"""Check that tests of CUDA run on a CUDA device: a run on the CPU would pass most of them."""

import pytest
import torch

import scalewise
from scalewise.hardware import DeviceKind


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore deprecations in torch.compile of torch 2.11 and in torchao 0.18."""
    for message in ("The .grad attribute of a Tensor that is not", "torch.get_autocast_gpu_dtype"):
        item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


@pytest.fixture(autouse=True)
def _runs_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.fail("tests marked gpu require a CUDA device, and torch finds none")
    run = scalewise.compose(["experiment=smoke", "hardware=auto"])
    assert run.hardware.device is DeviceKind.cuda, "hardware=auto did not detect the CUDA device"
