"""Replaced functions of ``torch.cuda``: those of a device on which nothing runs."""

import pytest
import torch

from scalewise.compat import torch_cuda
from scalewise.compat.torch import DevicelessFakeTensorMode, FakeTensor

DEVICE = torch_cuda.CudaDevice("test device", (9, 0), 1 << 30, processors=4, count=2)


def test_functions_describe_the_device_and_are_restored() -> None:
    assert not torch.cuda.is_available()
    with torch_cuda.replaced_cuda_functions(DEVICE, pytest.fail):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).total_memory == 1 << 30
        assert torch.cuda.mem_get_info() == (1 << 30, 1 << 30)
        torch.cuda.set_device(1)
        assert torch.cuda.current_device() == 1
    assert not torch.cuda.is_available()


def test_waits_of_the_host_are_reported() -> None:
    waits: list[str] = []
    with torch_cuda.replaced_cuda_functions(DEVICE, waits.append):
        event = torch.cuda.Event()
        event.record()
        assert event.query()
        torch.cuda.current_stream().wait_event(event)
        assert waits == []
        event.synchronize()
        torch.cuda.Stream().synchronize()
        torch.cuda.synchronize()
    assert waits == ["event.synchronize", "stream.synchronize", "cuda.synchronize"]


def test_fake_tensors_need_no_device() -> None:
    with torch_cuda.replaced_cuda_functions(DEVICE, pytest.fail), DevicelessFakeTensorMode():
        tensor = torch.tensor([1.0], device="cuda") * 2
    assert isinstance(tensor, FakeTensor)
    assert tensor.device.type == "cuda"
