"""Ranks of srun are described by the same variables as ranks of torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from scalewise import cli
from scalewise.hardware import RANK_VARIABLES
from scalewise.launch.external_launcher import MPI_VARIABLES, adopt_slurm_step, first_host

STEP = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_srun_step_of_several_tasks_is_ranks() -> None:
    environment = dict(STEP)
    adopt_slurm_step(environment)
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
    [TORCHRUN, {"SLURM_STEP_NUM_TASKS": "1"}],
    ids=["torchrun inside srun", "one task"],
)
def test_other_slurm_steps_are_unchanged(change: dict[str, str]) -> None:
    environment = STEP | change
    adopt_slurm_step(environment)
    assert environment == STEP | change


def test_single_srun_task_is_a_rank() -> None:
    single_task_environment = STEP | {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    environment = single_task_environment | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "1"}
    adopt_slurm_step(environment, min_tasks=1)
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")
    assert environment["MASTER_ADDR"] == "127.0.0.1"  # for any name of the single node


def test_sbatch_script_is_a_single_process() -> None:
    batch = {key: value for key, value in STEP.items() if "STEP" not in key} | {"SLURM_NTASKS": "8"}
    environment = dict(batch)
    adopt_slurm_step(environment)
    assert environment == batch


def test_rank_variables_of_the_user_are_kept() -> None:
    environment = STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    adopt_slurm_step(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_torchrun_ranks_are_kept() -> None:
    environment = dict(TORCHRUN)
    assert adopt_slurm_step(environment) is None
    assert environment == TORCHRUN


@pytest.mark.parametrize(
    "stale_variables",
    [
        {"LOCAL_RANK": "0"},
        {"RANK": "0"},
        {"RANK": "0", "LOCAL_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "8"},
        {"LOCAL_WORLD_SIZE": "4"},
        {"WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
    ],
    ids=" ".join,
)
def test_stale_rank_variables_are_removed(stale_variables: dict[str, str]) -> None:
    environment = dict(stale_variables)
    assert adopt_slurm_step(environment) is None
    assert set(environment) <= {"MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize("missing_variable", TORCHRUN)
def test_rank_without_a_variable_is_rejected_by_name(missing_variable: str) -> None:
    environment = {key: value for key, value in TORCHRUN.items() if key != missing_variable}
    error = adopt_slurm_step(environment)
    assert error is not None
    (issue,) = error.issues
    assert f"{missing_variable} is not set" in issue.reason
    assert not set(environment) & set(RANK_VARIABLES), "no other command takes it for a rank"


@pytest.mark.parametrize(
    "change",
    [{"RANK": "2"}, {"RANK": "-1"}, {"RANK": "one"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": ""}],
    ids=str,
)
def test_impossible_rank_is_rejected(change: dict[str, str]) -> None:
    error = adopt_slurm_step(dict(TORCHRUN | change))
    assert error is not None
    assert "is not a rank of" in str(error)


@pytest.mark.parametrize("missing_variable", ["SLURM_PROCID", "SLURM_LOCALID"])
def test_slurm_step_without_a_variable_is_rejected_by_name(missing_variable: str) -> None:
    error = adopt_slurm_step({key: value for key, value in STEP.items() if key != missing_variable})
    assert error is not None
    assert f"{missing_variable} is not set" in str(error)


def test_salloc_shell_is_a_single_process() -> None:
    shell = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NODELIST": "gpu[07-08]"}
    step = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for environment in (dict(shell), shell | step, shell | {"SLURM_STEP_NUM_TASKS": "many"}):
        before = dict(environment)
        assert adopt_slurm_step(environment) is None, environment
        assert environment == before, environment


@pytest.mark.parametrize("change", [{"SLURM_PROCID": "8"}, {"SLURM_LOCALID": "4"}])
def test_slurm_task_outside_its_step_is_rejected(change: dict[str, str]) -> None:
    environment = STEP | change
    assert "is not a rank of" in str(adopt_slurm_step(environment))
    assert not set(RANK_VARIABLES) & environment.keys()


@pytest.mark.parametrize("name", MPI_VARIABLES)
def test_mpirun_processes_are_rejected(name: str) -> None:
    assert adopt_slurm_step({name: str(MPI_VARIABLES[name] - 1)}) is None
    assert adopt_slurm_step({name: "4", **TORCHRUN}) is None
    assert adopt_slurm_step({name: "4", **STEP}) is None  # srun sets PMI variables too
    error = adopt_slurm_step({name: "4"})
    assert error is not None
    assert name in str(error)


@pytest.mark.parametrize("overrides", [("train", "--cfg", "job"), ("plan",), ("doctor",)])
def test_commands_ignore_stale_rank_variables(
    overrides: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main([*overrides]) == 0
    assert "LOCAL_RANK" not in os.environ
    monkeypatch.setenv("LOCAL_RANK", "3")
    expected = 2 if overrides[0] == "train" else 0
    assert cli.main([*overrides]) == expected
    assert ("RANK, WORLD_SIZE" in capsys.readouterr().err) == bool(expected)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node03", "node03"),
        ("node[03-07,12],login1", "node03"),
        ("a1,b[2-3]", "a1"),
        ("rack[1,4]", "rack1"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
