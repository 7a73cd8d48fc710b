"""Losses of JAX, whose words docs/coming_from.md maps to ours, and of the same training here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fixtures import jax_counterpart
from fixtures.documentation import ROOT
from fixtures.job_runner import JobRunner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scalewise.models.base import TPStyle
from scalewise.parallelism.mesh import MeshConfig
from scalewise.strategies.tensor_parallel import apply_tensor_parallel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="the extra jax is not installed"
)

SCRIPT = ROOT / "docs" / "examples" / "jax_mlp.py"
TOLERANCE = 1e-6
MESHES = {"data 1, model 4": (1, 4), "data 2, model 2": (2, 2)}
"""Ranks of data and tensor parallelism by mesh."""
STYLES = {"up": TPStyle.column, "down": TPStyle.row}


@pytest.fixture(scope="module")
def jax_losses() -> dict[str, list[float]]:
    """Loss of each step by mesh; JAX runs in a process of its own."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    result = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = (line.split(":") for line in result.stdout.splitlines())
    return {mesh: [float(loss) for loss in losses.split()] for mesh, losses in lines}


def tensor_parallel_losses(data: int, model: int) -> list[float]:
    """Losses of this rank's process group, with FSDP over data ranks."""
    mesh = init_device_mesh("cpu", (data, model), mesh_dim_names=("data", "model"))
    mlp = jax_counterpart.MLP()
    spec = MeshConfig(tensor=model, sequence_parallel=False)
    apply_tensor_parallel(cast(Any, mlp), STYLES, mesh["model"], spec)
    assert mlp.up.weight.to_local().shape == (jax_counterpart.HIDDEN // model, 8)
    if data > 1:
        fully_shard(mlp, mesh=mesh["data"])
    optimizer = torch.optim.SGD(mlp.parameters(), lr=jax_counterpart.LR)
    losses = []
    for batch in jax_counterpart.initial_tensors()[2]:
        loss = jax_counterpart.mean_loss(mlp, batch.chunk(data)[mesh["data"].get_local_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / data
        dist.all_reduce(mean, group=mesh["data"].get_group())
        losses.append(float(mean))
    return losses


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    losses = {mesh: tensor_parallel_losses(*ranks) for mesh, ranks in MESHES.items()}
    torch.save(losses, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_jax_meshes_have_equal_losses(jax_losses: dict[str, list[float]]) -> None:
    reference = jax_losses["data 1, model 1"]
    assert list(jax_losses) == ["data 1, model 1", "data 4, model 1", *MESHES]
    assert len(set(reference)) == jax_counterpart.STEPS
    for mesh, losses in jax_losses.items():
        assert losses == pytest.approx(reference, rel=TOLERANCE), mesh


def test_tensor_parallel_mlp_has_the_losses_of_jax(
    jax_losses: dict[str, list[float]], tmp_path: Path
) -> None:
    mp.spawn(run_rank, (str(tmp_path),), nprocs=4)
    for rank in range(4):
        losses = torch.load(tmp_path / f"{rank}.pt")
        for mesh in MESHES:
            assert losses[mesh] == pytest.approx(jax_losses[mesh], rel=TOLERANCE), (rank, mesh)


@pytest.mark.parametrize(
    ("ranks", "mesh"), [(1, "data 1, model 1"), (4, "data 4, model 1")], ids=["single", "ddp"]
)
def test_data_parallel_user_module_has_the_losses_of_jax(
    ranks: int, mesh: str, jax_losses: dict[str, list[float]], tmp_path: Path, shared_cache: Path
) -> None:
    strategy = ("parallelism=ddp", f"parallelism.replicas={ranks}") if ranks > 1 else ()
    run = JobRunner(tmp_path, shared_cache).without_defaults(
        "objective=module",
        "objective.target=fixtures.jax_counterpart.MLPModule",
        "data.target=fixtures.jax_counterpart.MLPData",
        f"+data.arguments.batch_size={jax_counterpart.BATCH // ranks}",
        "trusted_packages=[fixtures]",
        f"trainer.max_steps={jax_counterpart.STEPS}",
        "trainer.clip_norm=null",
        "trainer.log_every=1",
        "trainer.validate_every=null",
        "tracking=none",
        "hardware=cpu",
        "callbacks=none",
        *strategy,
    )
    assert run.column("train/loss") == pytest.approx(jax_losses[mesh], rel=TOLERANCE)
