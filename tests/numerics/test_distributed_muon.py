"""Muon whose ranks divide the matrices among them, against torch's Muon on one rank, bitwise."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fixtures.strategies import LLAMA, TINY_DECODER
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scalewise import compose
from scalewise.hardware import DeviceKind
from scalewise.optimizers import muon
from scalewise.optimizers.build import build_from_groups, set_replicas
from scalewise.optimizers.config import MuonConfig
from scalewise.strategies.single import SingleDevice

RANKS = 3
SHAPES = [(8, 16)] * 7 + [(16, 8)] * 2 + [(4, 12)] + [(1, 8)] * 4
"""Of 8 rows the ranks have 3, 3 and 2; of 4 rows 2, 2 and none; of one row 1, none and none."""
STEPS = 3
BATCHES = (1, 2, 16)
"""Matrices that a rank orthogonalizes at once."""


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train_reference() -> list[Tensor]:
    parameters = [nn.Parameter(tensor) for tensor in tensors(0)]
    optimizer = torch.optim.Muon(
        parameters, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, tensors(step + 1), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def train_distributed(*, is_sharded: bool) -> list[Tensor]:
    """Train on this rank of a process group, sharded by rows or with equal gradients."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if is_sharded else tensor

    parameters = [nn.Parameter(place(tensor)) for tensor in tensors(0)]
    config = MuonConfig(lr=0.02)
    group = {"params": parameters, "weight_decay": 0.1, "hidden": True}
    optimizer = build_from_groups(config, [group])
    if not is_sharded:
        world = dist.group.WORLD
        assert world is not None
        set_replicas(config, optimizer, world)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, tensors(step + 1), strict=True):
            parameter.grad = place(gradient)
        optimizer.step()
    return [
        parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for parameter in parameters
    ]


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    orthogonalized: Counter[str] = Counter()
    iterate = muon.newton_schulz

    def counted(updates_KRC: Tensor, *settings: Any) -> Tensor:
        orthogonalized["matrices"] += len(updates_KRC)
        orthogonalized["calls"] += 1
        return iterate(updates_KRC, *settings)

    muon.newton_schulz = counted
    results: dict[str, Any] = {"reference": train_reference()}
    for batch in BATCHES:
        muon.batch_size = lambda numel, *, on_cuda, batch=batch: batch
        for name in ("replicated", "sharded"):
            orthogonalized.clear()
            results[f"{name} {batch}"] = train_distributed(is_sharded=name == "sharded")
            results[f"{name} {batch} counts"] = dict(orthogonalized)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Parameters and counts of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("batch", BATCHES)
def test_distributed_muon_equals_muon_on_one_rank(
    batch: int, results: list[dict[str, Any]]
) -> None:
    for name in (f"replicated {batch}", f"sharded {batch}"):
        for rank, result in enumerate(results):
            for shape, actual, expected in zip(
                SHAPES, result[name], result["reference"], strict=True
            ):
                assert torch.equal(actual, expected), (name, rank, shape)
        counts = [result[f"{name} counts"]["matrices"] for result in results]
        assert sum(counts) == STEPS * len(SHAPES), name
        assert max(counts) - min(counts) <= STEPS * len(set(SHAPES)), name
    calls = results[0][f"sharded {batch} counts"]["calls"]
    rounds = sum(-(-count // (RANKS * batch)) for count in Counter(SHAPES).values())
    assert calls == STEPS * rounds


def test_newton_schulz_of_a_batch_equals_each_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((32, 8), (8, 32), (24, 12)):
        updates_KRC = torch.randn(5, rows, columns, generator=generator).bfloat16()
        settings = ((3.4445, -4.7750, 2.0315), 5, 1e-7)
        batched = muon.newton_schulz(updates_KRC, *settings)
        for index in range(5):
            alone = muon.newton_schulz(updates_KRC[index : index + 1], *settings)
            assert torch.equal(batched[index], alone[0]), (rows, columns)
        singular_values = torch.linalg.svdvals(batched.float())
        assert float(singular_values.min()) > 0.3, (rows, columns)
        assert float(singular_values.max()) < 1.6, (rows, columns)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(("device", "is_compiled"), [("h100", True), ("cpu", False)])
def test_compiled_runs_on_cuda_compile_the_orthogonalization(
    device: str, *, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("optimizer=muon", "compile=block", "compile.backend=aot_eager")
    run = compose([*TINY_DECODER, *LLAMA, *overrides, f"hardware={device}"], check_machine=False)
    strategy = SingleDevice(DeviceKind.cpu)
    module = strategy.build(run)
    compiled: list[Any] = []

    def compile_function(function: Any, **options: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_function)
    strategy.build_optimizer(run, module)
    assert compiled == [muon.newton_schulz] * is_compiled


def test_compiled_newton_schulz_equals_the_eager_one() -> None:
    settings = ((3.4445, -4.7750, 2.0315), 5, 1e-7)
    compiled = torch.compile(muon.newton_schulz, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    for count, rows, columns in ((3, 32, 8), (1, 8, 32), (2, 24, 12)):
        updates_KRC = torch.randn(count, rows, columns, generator=generator).bfloat16()
        expected = muon.newton_schulz(updates_KRC, *settings)
        assert torch.equal(compiled(updates_KRC, *settings), expected), (count, rows, columns)
