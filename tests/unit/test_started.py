"""What srun says is said as torchrun would say it."""

from __future__ import annotations

import pytest

from scalewise.launch.started import adopt, first_host

STEP = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_step_of_several_tasks_is_ranks() -> None:
    environment = dict(STEP)
    adopt(environment)
    assert {key: value for key, value in environment.items() if key not in STEP} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(15000 + 123456 % 20000),
    }


@pytest.mark.parametrize(
    "change",
    [{"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}],
    ids=["torchrun inside srun", "one task"],
)
def test_what_is_no_step_of_ranks_stays(change: dict[str, str]) -> None:
    environment = STEP | change
    adopt(environment)
    assert environment == STEP | change


def test_a_task_of_a_job_is_a_rank_even_alone() -> None:
    alone = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    environment = alone | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "1"}
    adopt(environment, least=1)
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")
    assert environment["MASTER_ADDR"] == "127.0.0.1"  # whatever the one node is called


def test_what_sbatch_runs_is_alone() -> None:
    batch = {key: value for key, value in STEP.items() if "STEP" not in key} | {"SLURM_NTASKS": "8"}
    environment = dict(batch)
    adopt(environment)
    assert environment == batch


def test_what_the_user_says_stays() -> None:
    environment = STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    adopt(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node03", "node03"),
        ("node[03-07,12],login1", "node03"),
        ("a1,b[2-3]", "a1"),
        ("rack[1,4]", "rack1"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
