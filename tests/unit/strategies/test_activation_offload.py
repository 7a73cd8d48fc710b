"""Offload of saved tensors to pinned memory, on a simulated device whose side stream is slow."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.compat.torch import TorchDispatchMode
from scalewise.hardware import DeviceKind
from scalewise.models.op_graph import Recompute
from scalewise.strategies.activation_checkpointing import checkpoint_block
from scalewise.strategies.activation_offload import TensorsOnDisk, offload_blocks
from scalewise.strategies.pinned_memory import PinnedMemory

WIDTH, TOKENS, LAYERS = 32, 64, 4


class SideStream(TorchDispatchMode):
    """Stream whose copies run only when another stream waits for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
        self.pending: list[tuple[weakref.ref[Any], ...]] = []
        self.regions: list[tuple[tuple[int, int], ...]] = []
        self.follows_current = False
        self.copies_in = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        assert self.follows_current, "copies start before the tensors are computed"
        self.pending.append(tuple(weakref.ref(it.untyped_storage()) for it in args[:2]))
        self.regions.append(tuple((it.storage_offset(), it.numel()) for it in args[:2]))
        return args[0]

    def wait_stream(self, _: Any) -> None:
        """Follow the current stream."""
        self.follows_current = True

    def record_event(self) -> int:
        """Return the number of copies so far."""
        self.follows_current = False
        return len(self.pending)

    def run_until(self, event: int) -> None:
        """Run the copies before an event."""
        for index, references in enumerate(self.pending[:event]):
            if references:
                storages = [reference() for reference in references]
                assert None not in storages, "memory is freed before it is copied"
                target, source = (
                    torch.empty(0, dtype=torch.uint8).set_(storage, offset, (numel,))  # type: ignore[call-overload]
                    for storage, (offset, numel) in zip(storages, self.regions[index], strict=True)
                )
                target.copy_(source)
                self.pending[index] = ()

    def synchronize(self) -> None:
        """Run all copies."""
        self.run_until(len(self.pending))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SideStream]]:
    """Side streams that were created on the simulated device."""
    created: list[SideStream] = []

    def make_stream() -> SideStream:
        created.append(SideStream())
        return created[-1]

    @contextmanager
    def use(stream: SideStream) -> Iterator[None]:
        with stream:
            yield

    current = SimpleNamespace(wait_event=lambda event: created[-1].run_until(event))
    success = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    for name, value in {
        "Stream": make_stream,
        "stream": use,
        "current_stream": lambda: current,
        "cudart": lambda: success,
        "check_error": lambda code: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield created
    gc.collect()  # pinned memory is unregistered with the simulated functions


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Residual feedforward."""
        return x + self.down(F.gelu(self.up(x)).square())


def build(recompute: Recompute, device: DeviceKind | None) -> list[nn.Module]:
    blocks: list[nn.Module] = [Block(seed) for seed in range(LAYERS)]
    for block in blocks:
        if recompute is not Recompute.nothing:
            checkpoint_block(block, save_matmuls=recompute is Recompute.selective)
    if device is not None:
        offload_blocks(blocks, [recompute] * LAYERS, device)
    return blocks


def run(blocks: Sequence[nn.Module], seed: int) -> Tensor:
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    for block in blocks:
        x = block(x)
    return x.square().mean()


def gradients(blocks: Sequence[nn.Module]) -> list[Tensor]:
    return [p.grad for block in blocks for p in block.parameters() if p.grad is not None]


def train(blocks: Sequence[nn.Module]) -> None:
    """Two micro-batches, then two forward passes before their backward passes."""
    for seed in range(2):
        run(blocks, seed).backward()
    losses = [run(blocks, seed) for seed in (2, 3)]
    for loss in losses:
        loss.backward()


@pytest.mark.parametrize("device", DeviceKind)
@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("autocast", [False, True])
def test_offload_changes_no_gradient(
    recompute: Recompute, device: DeviceKind, autocast: bool, streams: list[SideStream]
) -> None:
    plain, offloaded = build(recompute, None), build(recompute, device)
    for blocks in (plain, offloaded):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            train(blocks)
    torch.testing.assert_close(gradients(offloaded), gradients(plain), rtol=0, atol=0)
    assert len(streams) == (device is DeviceKind.cuda)


def test_blocks_are_fetched_while_the_next_one_runs_backward(streams: list[SideStream]) -> None:
    blocks, copies = build(Recompute.full, DeviceKind.cuda), []
    x = torch.randn(TOKENS, WIDTH)
    for block in blocks:
        x = block(x)
        x.register_hook(lambda _: copies.append(len(streams[0].pending)))
    written = len(streams[0].pending)
    assert written == LAYERS - 1  # the input of the last block stays
    x.sum().backward()
    # Each hook runs before the backward of its block, so after the fetch that the next one starts.
    assert copies == [written, written + 1, written + 2, written + 3]


def test_pinned_memory_is_reused_and_not_rounded(
    streams: list[SideStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: list[PinnedMemory] = []
    create = PinnedMemory.__init__
    monkeypatch.setattr(
        PinnedMemory, "__init__", lambda self: (memories.append(self), create(self))[1]
    )
    blocks = build(Recompute.full, DeviceKind.cuda)
    for seed in range(3):
        run(blocks, seed).backward()
        assert memories[0].allocated_bytes == (LAYERS - 1) * TOKENS * WIDTH * 4


def test_slabs_return_when_no_backward_follows(streams: list[SideStream]) -> None:
    memory = PinnedMemory()
    source = torch.arange(2000).view(torch.uint8)
    parts, copies = memory.copy_out([source, source[:100]])
    copies.wait()
    torch.testing.assert_close(parts[0].bytes, source)
    del parts
    (part,), copies = memory.copy_out([source[:9000]])  # fits into the free slab
    assert memory.allocated_bytes == len(source) + 100
    copies.wait()
    small = source[:100]
    _, copies = memory.copy_out([small])  # would waste most of it
    copies.wait()
    assert memory.allocated_bytes == len(source) + 200
    torch.testing.assert_close(part.bytes, source[:9000])


def test_memory_that_is_freed_unused_is_copied_first(streams: list[SideStream]) -> None:
    blocks = build(Recompute.full, DeviceKind.cuda)
    x = torch.randn(TOKENS, WIDTH)
    unused = blocks[1](blocks[0](x))
    blocks[2](x).sum().backward()  # fetches the input of the block before, for its backward
    del unused
    streams[0].synchronize()


def test_casts_of_weights_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    save = TensorsOnDisk._save
    monkeypatch.setattr(
        TensorsOnDisk, "_save", lambda self, it: (sizes.append(len(it)), save(self, it))[1]
    )
    blocks = build(Recompute.nothing, DeviceKind.cpu)
    for block in blocks:
        block.requires_grad_(False)  # autograd does not link a cast of a frozen weight to it
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        blocks[0](x).sum().backward()
    hidden = TOKENS * 2 * WIDTH * 2
    assert sizes == [hidden, hidden]  # inputs of GELU and of the square


def test_changed_weight_is_rejected() -> None:
    blocks = build(Recompute.nothing, DeviceKind.cpu)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = run(blocks, 0)
    with torch.no_grad():
        next(blocks[1].parameters()).add_(1)
    with pytest.raises(RuntimeError, match="a weight was changed"):
        loss.backward()
