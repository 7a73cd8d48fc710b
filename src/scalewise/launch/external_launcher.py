"""Ranks started by an external launcher: torchrun, or srun of Slurm."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence

from scalewise.errors import EXIT_CODES, ConfigError
from scalewise.hardware import RANK_VARIABLES, launched_world_size
from scalewise.launch import signals

MIN_PORT, NUM_PORTS = 15000, 20000
"""Range of the rendezvous port of a Slurm step; the job ID selects the port."""

LAUNCHER_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a rank requires."""

MPI_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": 2,
    "PMI_SIZE": 2,
    "MV2_COMM_WORLD_SIZE": 2,
    "PMIX_RANK": 1,
    "PMI_RANK": 1,
}
"""Environment variables of mpirun, with the minimum value that implies several processes."""

REJECTION_WAIT_S = 3.0
"""Time for rank 0 to print the error before the other ranks exit, in seconds."""


def is_external_rank() -> bool:
    """Whether an external launcher started this process as one of several ranks."""
    return launched_world_size() is not None


def is_leader() -> bool:
    """Whether this process is the only one or rank 0."""
    return not is_external_rank() or os.environ["RANK"] == "0"


def exit_if_not_rank_0() -> None:
    """Exit all ranks but 0 without printing, so that a config error appears once.

    They wait before they exit, because torchrun ends all ranks, rank 0 included, when one exits.
    """
    if not is_leader():
        with signals.ignore_signals():
            time.sleep(REJECTION_WAIT_S)
        sys.exit(EXIT_CODES["refused"])


def adopt_slurm_step(
    environment: MutableMapping[str, str], min_tasks: int = 2
) -> ConfigError | None:
    """Set torchrun's variables from Slurm's, if srun started at least ``min_tasks`` tasks.

    Does not apply to processes that ``sbatch`` runs without ``srun``. Removes an incomplete set of
    rank variables of a single process; returns an error if they are those of one of several ranks.
    """
    tasks = _parse_count(environment, "SLURM_STEP_NUM_TASKS")
    if tasks < min_tasks or all(name in environment for name in RANK_VARIABLES):
        return _check_rank_variables(environment)
    if missing_names := [
        name for name in ("SLURM_PROCID", "SLURM_LOCALID") if name not in environment
    ]:
        return _incomplete_variables(environment, "SLURM_STEP_NUM_TASKS", missing_names)
    _adopt_step(environment, tasks)
    return _out_of_range(environment)


def _check_rank_variables(environment: MutableMapping[str, str]) -> ConfigError | None:
    """Remove incomplete rank variables; return an error if this is one of several ranks."""
    present_names = [name for name in LAUNCHER_VARIABLES if name in environment]
    missing_names = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if missing_names:
        removed_values = {
            name: environment.pop(name) for name in present_names if name in RANK_VARIABLES
        }
        rank_keys = {"RANK", "LOCAL_RANK"} & removed_values.keys()
        single_values = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        if rank_keys and any(
            value != single_values.get(key, "0") for key, value in removed_values.items()
        ):
            return _incomplete_variables(removed_values, next(iter(removed_values)), missing_names)
        return _mpi_error(environment)
    return _out_of_range(environment)


def _out_of_range(environment: MutableMapping[str, str]) -> ConfigError | None:
    """Error for a rank outside its world size; removes the rank variables."""
    for name, count_name in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        value, count = environment[name], environment[count_name]
        if not (value.isdecimal() and count.isdecimal() and int(value) < int(count)):
            for key in RANK_VARIABLES:
                environment.pop(key)
            fix = "start the ranks with torchrun or srun, or unset both for a single-process run"
            return ConfigError.for_key(name, value, f"is not a rank of {count_name}={count}", fix)
    return None


def _mpi_error(environment: MutableMapping[str, str]) -> ConfigError | None:
    """Error for one of several processes of mpirun, which would all train separately."""
    for name, minimum in MPI_VARIABLES.items():
        if "SLURM_STEP_NUM_TASKS" not in environment and _parse_count(environment, name) >= minimum:
            reason = "mpirun started several processes, and each would be a separate run"
            fix = f"start the ranks with torchrun or srun; for a single process, unset {name}"
            return ConfigError.for_key(name, environment[name], reason, fix)
    return None


def _incomplete_variables(
    environment: Mapping[str, str], name: str, missing_names: Sequence[str]
) -> ConfigError:
    verb = "are" if len(missing_names) > 1 else "is"
    reason = f"is set for one of several ranks, and {', '.join(missing_names)} {verb} not set"
    fix = f"start the ranks with torchrun or srun, or unset {name} for a single-process run"
    return ConfigError.for_key(name, environment[name], reason, fix)


def _parse_count(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else 0


def _adopt_step(environment: MutableMapping[str, str], tasks: int) -> None:
    """Set torchrun's variables from those of a task of a Slurm step."""
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "127.0.0.1"))
    job_id = _parse_count(environment, "SLURM_JOB_ID")
    tasks_per_node = environment.get(
        "SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_NTASKS_PER_NODE")
    )
    # The only node may not resolve its own host name.
    is_one_node = environment.get("SLURM_STEP_NUM_NODES") == "1"
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "GROUP_RANK": environment.get("SLURM_NODEID", "0"),
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": re.split(r"\D", tasks_per_node or str(tasks))[0],
        "MASTER_ADDR": "127.0.0.1" if is_one_node else first_host(hosts),
        "MASTER_PORT": str(MIN_PORT + job_id % NUM_PORTS),
    }
    for key, value in variables.items():
        environment.setdefault(key, value)


def first_host(nodes: str) -> str:
    """First host of a Slurm node list, e.g. ``node03`` for ``node[03-07,12],login1``."""
    match = re.match(r"([^\[,\s]*)(?:\[(\w+))?", nodes)
    assert match is not None
    return match[1] + (match[2] or "")
