"""Measured bytes by phase equal the bytes counted by hand for a small network."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType

from scalewise.compat.torch import FakeTensorMode
from scalewise.measure import allocated_bytes
from scalewise.measure.allocated_bytes import LiveBytes, ProfiledAllocations, storage_bytes
from scalewise.measure.memory import MemoryProbe, StrategyBuffers, host_peak_bytes

BATCH_SIZE, INPUT_WIDTH, HIDDEN_WIDTH, OUTPUT_WIDTH = 16, 64, 128, 32
PARAMETERS = 4 * (
    INPUT_WIDTH * HIDDEN_WIDTH + HIDDEN_WIDTH + HIDDEN_WIDTH * OUTPUT_WIDTH + OUTPUT_WIDTH
)
NUM_PARAMETERS = 4
ACTIVATIONS = 4 * (BATCH_SIZE * HIDDEN_WIDTH + BATCH_SIZE * OUTPUT_WIDTH + 1)
"""Bytes saved for backward: output of the ReLU and input of the square; and the loss."""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(INPUT_WIDTH, HIDDEN_WIDTH), nn.ReLU(), nn.Linear(HIDDEN_WIDTH, OUTPUT_WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def measure_training(optimizer_of: type, *, steps: int, **arguments: object) -> dict[str, int]:
    """Memory metrics of the last of ``steps`` steps, by short name."""
    torch.manual_seed(0)
    network, x = Network(), torch.randn(BATCH_SIZE, INPUT_WIDTH)
    optimizer = optimizer_of(network.parameters(), lr=0.1, **arguments)
    for step in range(steps):
        probe = MemoryProbe(network, optimizer, torch.device("cpu"))
        if step == steps - 1:
            probe.start()
        loss = network(x)
        optimizer.zero_grad()
        if step == steps - 1:
            probe.before_backward()
        loss.backward()
        if step == steps - 1:
            probe.before_optimizer()
        optimizer.step()
    phase_bytes = probe.finish()
    return {key.removeprefix("memory/").removesuffix("_bytes"): n for key, n in phase_bytes.items()}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_memory_of_adamw_by_phase(steps: int) -> None:
    phase_bytes = measure_training(torch.optim.AdamW, steps=steps, fused=True)
    assert phase_bytes["parameters"] == PARAMETERS
    assert phase_bytes["gradients"] == PARAMETERS
    assert (
        phase_bytes["optimizer"] == 2 * PARAMETERS + 4 * NUM_PARAMETERS
    )  # and a step count for each tensor
    assert phase_bytes["activations"] == ACTIVATIONS


def test_memory_counts_a_parameter_that_the_step_allocates_again_once() -> None:
    network = Network()
    weight = network.layers[0].weight

    class Buffers(StrategyBuffers):
        def reallocated(self) -> list[torch.Tensor]:
            return [weight]

    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    probe = MemoryProbe(network, optimizer, torch.device("cpu"), Buffers())
    probe.start()
    weight.data = torch.empty(0)
    weight.data = torch.zeros(HIDDEN_WIDTH, INPUT_WIDTH)
    assert probe.finish()["memory/peak_bytes"] == PARAMETERS


@pytest.mark.parametrize(("momentum", "copies"), [(0.9, 1), (0.0, 0)])
def test_memory_of_sgd_by_phase(momentum: float, copies: int) -> None:
    phase_bytes = measure_training(torch.optim.SGD, steps=2, momentum=momentum)
    assert phase_bytes["optimizer"] == copies * PARAMETERS
    assert phase_bytes["activations"] == ACTIVATIONS


def test_memory_peak_is_between_its_bounds() -> None:
    phase_bytes = measure_training(torch.optim.AdamW, steps=2, fused=True)
    persistent_bytes = phase_bytes["parameters"] + phase_bytes["optimizer"]
    assert phase_bytes["peak"] >= persistent_bytes + phase_bytes["gradients"]
    largest = 4 * BATCH_SIZE * HIDDEN_WIDTH
    assert (
        phase_bytes["peak"]
        <= persistent_bytes + phase_bytes["gradients"] + ACTIVATIONS + 3 * largest
    )


def test_memory_is_halved_by_half_precision() -> None:
    network = Network().bfloat16()
    assert storage_bytes(network.parameters()) == PARAMETERS // 2


def test_memory_of_activations_excludes_gradients() -> None:
    network, chunks = Network(), [torch.randn(BATCH_SIZE, INPUT_WIDTH) for _ in range(2)]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    probe = MemoryProbe(network, optimizer, torch.device("cpu"))
    probe.start()
    losses = [network(x) for x in chunks]
    while losses:
        probe.before_backward()
        losses.pop().backward()
    probe.before_backward()
    assert probe.finish()["memory/activations_bytes"] == 2 * ACTIVATIONS


for_each_counter = pytest.mark.parametrize("counter", [LiveBytes, ProfiledAllocations])


def test_memory_probe_records_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operator recording in compiled code crashes at random."""
    dispatched_ops = []

    def of_tree(events: Iterable[Any]) -> Iterator[Any]:
        dispatched_ops.extend(event.tag for event in events)
        yield from ()

    monkeypatch.setattr(allocated_bytes, "iter_allocations", of_tree)
    with ProfiledAllocations():
        network = Network()
        network(torch.ones(BATCH_SIZE, INPUT_WIDTH)).backward()
        torch.optim.AdamW(network.parameters()).step()
    assert {*dispatched_ops} == {_EventType.Allocation}


@for_each_counter
def test_live_bytes_follow_allocation_and_release(counter: type) -> None:
    live_bytes = counter()
    with live_bytes:
        a = torch.zeros(256)
        assert live_bytes.current_bytes == 1024
        b = a + 1
        assert live_bytes.current_bytes == 2048
        view = b.view(16, 16).t()
        a += 1
        assert live_bytes.current_bytes == 2048
        del b
        assert live_bytes.current_bytes == 2048
        del view
        gc.collect()
        assert live_bytes.current_bytes == 1024
        assert live_bytes.take_peak() == pytest.approx(2048, abs=64)  # and one temporary element
        assert live_bytes.take_peak() == 1024
        assert live_bytes.tracked_bytes([a, a[:3]]) == 1024
    torch.zeros(999)
    assert live_bytes.current_bytes == 1024


@for_each_counter
def test_memory_probe_excludes_earlier_allocations(counter: type) -> None:
    earlier_tensor = torch.zeros(1000)
    with counter() as live_bytes:
        earlier_tensor.view(10, 100).t()
        earlier_tensor.add_(1)
        assert live_bytes.current_bytes == 0


def test_storage_bytes_are_counted_once() -> None:
    base_tensor = torch.zeros(100)
    assert storage_bytes([base_tensor, base_tensor[:10], base_tensor.view(10, 10)]) == 400
    assert storage_bytes([]) == 0


def test_memory_probe_stops_when_abandoned() -> None:
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    probe = MemoryProbe(network, optimizer, torch.device("cpu"))
    probe.start()
    probe.abandon()
    before = probe._live.current_bytes
    tensor = torch.zeros(1000)
    assert probe._live.current_bytes == before
    assert tensor.numel() == 1000


def test_host_peak_includes_this_process() -> None:
    assert 10 * 1024**2 < host_peak_bytes() < 1024**4


@for_each_counter
def test_memory_probe_follows_earlier_storages(counter: type) -> None:
    earlier_tensor, resized_tensor = torch.zeros(1000), torch.zeros(500)
    live_bytes = counter([resized_tensor])
    live_bytes.track([earlier_tensor])
    with live_bytes:
        assert (live_bytes.current_bytes, live_bytes.resizable_bytes) == (6000, 2000)
        assert live_bytes.tracked_bytes([earlier_tensor]) == 4000
        resized_tensor.untyped_storage().resize_(0)
        del earlier_tensor
        assert (live_bytes.current_bytes, live_bytes.resizable_bytes) == (0, 0)
        assert live_bytes.take_peak() == 6000


def test_memory_probe_counts_tensors_of_compiled_code() -> None:
    """The compiler saves inputs of matmuls; here only a square reads the output of the ReLU."""
    torch.manual_seed(0)
    network, x = Network(), torch.randn(BATCH_SIZE, INPUT_WIDTH)
    network.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(x).backward()
    probe = MemoryProbe(network, optimizer, torch.device("cpu"), compiled=True)
    probe.start()
    loss = network(x)
    optimizer.zero_grad()
    probe.before_backward()
    loss.backward()
    probe.before_optimizer()
    optimizer.step()
    phase_bytes = probe.finish()
    assert phase_bytes["memory/gradients_bytes"] == PARAMETERS
    assert phase_bytes["memory/activations_bytes"] >= ACTIVATIONS - 4 * BATCH_SIZE * OUTPUT_WIDTH
    assert phase_bytes["memory/peak_bytes"] >= PARAMETERS + ACTIVATIONS


def test_replaced_receive_buffer_does_not_stay_alive() -> None:
    """A pipeline passes a tensor between two of its stages in place of the buffer."""
    buffers = [torch.empty(1024)]
    with LiveBytes(resizable=buffers) as live_bytes:
        assert live_bytes.current_bytes == 4 * 1024
        buffers[0] = torch.empty(1024)
        assert live_bytes.current_bytes == 4 * 1024


def test_memory_peak_excludes_late_gloo_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gloo thread may briefly keep a reference to sent tensors."""
    with LiveBytes() as live_bytes:
        thread = [torch.zeros(256)]
        monkeypatch.setattr(allocated_bytes.time, "sleep", lambda _: thread.clear())
        torch.ops._c10d_functional.wait_tensor(thread[0])
        after = torch.zeros(256)
        assert live_bytes.take_peak() == after.nbytes


def test_memory_peak_does_not_wait_for_collectives_of_fake_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_calls: list[float] = []
    monkeypatch.setattr(allocated_bytes.time, "sleep", wait_calls.append)
    with FakeTensorMode(), LiveBytes() as live_bytes:
        sent_tensor = torch.zeros(256)
        torch.ops._c10d_functional.wait_tensor(sent_tensor)
        received = torch.zeros(256)
        assert live_bytes.take_peak() == sent_tensor.nbytes + received.nbytes
    assert wait_calls == []


def test_abandoned_measurement_may_not_have_started() -> None:
    """An error before forward is not replaced by one of the measurement."""
    network = Network()
    probe = MemoryProbe(network, torch.optim.SGD(network.parameters(), lr=0.1), torch.device("cpu"))
    probe.abandon()
    probe.start()
    probe.abandon()
    probe.abandon()
