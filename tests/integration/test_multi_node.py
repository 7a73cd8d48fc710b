"""One command on several nodes: torchrun agents and srun tasks."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from datetime import datetime

import psutil
import pytest
from fixtures.cli_runner import TINY, CliProcess, CliRunner, same_weights

RUN_OVERRIDES = ("parallelism=fsdp", "checkpoint.every=2", "tracking=none")
TRUST_FIXTURES = "trusted_packages=[fixtures]"


def free_port() -> int:
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return int(free_socket.getsockname()[1])


def start_agents(runner: CliRunner, *overrides: str, restarts: int = 0) -> list[CliProcess]:
    """Two nodes with one rank each, on the loopback interface."""
    port = free_port()
    return [
        runner.start_process(
            [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=2",
                    "--nproc-per-node=1",
                ),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=nodes"),
                *(f"--node-rank={node}", "--local-addr=127.0.0.1", f"--max-restarts={restarts}"),
                *(
                    "--monitor-interval=0.1",
                    "-m",
                    "scalewise",
                    "train",
                    *TINY,
                    *RUN_OVERRIDES,
                    *overrides,
                ),
            ],
            {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                # Otherwise agents with different restart counts find addresses of ended processes.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )
        for node in range(2)
    ]


def test_two_torchrun_agents_train_one_run(run_cli: CliRunner) -> None:
    for result in [agent.wait() for agent in start_agents(run_cli)]:
        result.assert_ok()
    folder = result.folder
    assert folder.status["status"] == "ok"
    assert folder.status["world_size"] == 2
    assert folder.steps == list(range(1, 9))


@pytest.mark.exhaustive
def test_failure_of_a_rank_ends_rank_0_that_ignores_signals(run_cli: CliRunner) -> None:
    hang = "+callbacks.hang={_target_:fixtures.faults.HangRank,rank:0,step:3}"
    failure = ("+inject=oom", "callbacks.inject.rank=1", "callbacks.inject.step=3")
    nodes = start_agents(run_cli, TRUST_FIXTURES, hang, *failure)
    first, _ = [node.wait() for node in nodes]
    folder, status = first.folder, first.folder.status
    assert (status["status"], status["rank"]) == ("out_of_memory", 1)
    hang_time = folder.path.joinpath("hung").stat().st_mtime
    assert datetime.fromisoformat(status["ended"]).timestamp() - hang_time < 25


def test_lost_rank_restarts_and_both_nodes_resume(run_cli: CliRunner) -> None:
    full_run = run_cli(*TINY, *RUN_OVERRIDES).assert_ok().folder
    slow_steps = (TRUST_FIXTURES, "+callbacks.slow._target_=fixtures.faults.SlowSteps")
    nodes = start_agents(run_cli, "resume=auto", "name=nodes", *slow_steps, restarts=1)
    nodes[0].wait_until(
        lambda: any(run_cli.cwd.glob("runs/nodes/*/checkpoints/step-00000004")), "4"
    )
    rank_1_processes = [
        p for node in nodes for p in node.descendants() if p.environ().get("RANK") == "1"
    ]
    assert rank_1_processes
    rank_of_python = max(rank_1_processes, key=lambda process: process.create_time())
    rank_of_python.send_signal(signal.SIGKILL)
    result = [node.wait() for node in nodes]
    assert [node.code for node in result] == [0, 0], "\n".join(node.transcript for node in result)
    runs = sorted(p for p in run_cli.cwd.glob("runs/nodes/*") if (p / "status.json").is_file())
    folders = [f for f in result[0].folders if f.path in runs]
    last = folders[-1]
    assert last.status["status"] == "ok"
    assert last.status["resumed_from"] is not None
    assert last.steps == list(range(1, 9))
    assert same_weights(last.weights(8), full_run.weights(8))


def start_tasks(runner: CliRunner, *overrides: str) -> list[CliProcess]:
    """Two tasks of one step on one node."""
    port = str(free_port())
    return [
        runner.start(
            *TINY,
            *RUN_OVERRIDES,
            *overrides,
            env={
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_JOB_ID": "1",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task),
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            },
        )
        for task in range(2)
    ]


def test_srun_tasks_are_ranks_and_exit_despite_threads(run_cli: CliRunner) -> None:
    lingering_thread = "+callbacks.lingering._target_=fixtures.faults.LingeringThread"
    for result in [task.wait() for task in start_tasks(run_cli, TRUST_FIXTURES, lingering_thread)]:
        result.assert_ok()
    assert result.folder.status["status"] == "ok"
    assert result.folder.status["world_size"] == 2


SLOW_STEPS = (TRUST_FIXTURES, "+callbacks.slow._target_=fixtures.faults.SlowSteps")


def listening_addresses(commands: list[CliProcess]) -> set[str]:
    """Addresses on which the processes of these commands accept connections."""
    return {
        socket.laddr.ip
        for command in commands
        for process in command.descendants()
        for socket in process.net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize(
    "start", [start_tasks, lambda runner, *overrides: [runner.start(*TINY, *overrides)]]
)
def test_single_node_ranks_listen_on_loopback_only(
    start: Callable[..., list[CliProcess]], run_cli: CliRunner
) -> None:
    processes = start(run_cli, *SLOW_STEPS, *RUN_OVERRIDES)
    processes[0].wait_for_step(2)
    assert listening_addresses(processes) == {"127.0.0.1"}


SWEEP_REJECTION = "a sweep is not supported with torchrun or srun"


@pytest.mark.parametrize("sweep", [("optimizer.lr=1e-3,2e-3", "-m"), ("sweep=learning_rate",)])
def test_srun_of_a_sweep_is_rejected(sweep: tuple[str, ...], run_cli: CliRunner) -> None:
    first, second_result = [task.wait(60) for task in start_tasks(run_cli, *sweep)]
    first.assert_rejected(SWEEP_REJECTION, f"run: scalewise train {' '.join(TINY)}", sweep[-1])
    assert (second_result.code, second_result.out, second_result.err) == (2, "", "")
    assert list(run_cli.cwd.iterdir()) == []


def test_torchrun_of_a_sweep_is_rejected_once(run_cli: CliRunner) -> None:
    first, second_result = [
        node.wait(60) for node in start_agents(run_cli, "optimizer.lr=1e-3,2e-3", "-m")
    ]
    assert 0 not in (first.code, second_result.code)
    assert f"{first.transcript}{second_result.transcript}".count(SWEEP_REJECTION) == 1
    assert list(run_cli.cwd.iterdir()) == []
