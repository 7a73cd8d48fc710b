"""Ranks that somebody else started: torchrun or the like, or Slurm's srun."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence

from scalewise.errors import EXIT_CODES, ConfigError
from scalewise.hardware import RANK_VARIABLES, launched_world_size
from scalewise.launch import signals

FIRST_PORT, PORTS = 15000, 20000
"""Where the ranks of a Slurm step meet: a port that its job id picks."""

LAUNCHER_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
"""All that one of several ranks needs to know."""

MPI_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": 2,
    "PMI_SIZE": 2,
    "MV2_COMM_WORLD_SIZE": 2,
    "PMIX_RANK": 1,
    "PMI_RANK": 1,
}
"""Variables of mpirun, each with the least value that says that there are several processes."""

REJECTION_WAIT_S = 3.0
"""Seconds in which rank 0 says what all ranks are refused for."""


def is_external_rank() -> bool:
    """Returns whether this process is one of several ranks that it did not start itself."""
    return launched_world_size() is not None


def is_leader() -> bool:
    """Returns whether this process speaks for the job: alone, or as rank 0."""
    return not is_external_rank() or os.environ["RANK"] == "0"


def exit_if_not_rank_0() -> None:
    """Ends every rank but 0 without a word, by the exit code of a refusal that all share.

    Not at once: torchrun ends the others when one has ended, be it before rank 0 could speak.
    """
    if not is_leader():
        with signals.ignore_signals():
            time.sleep(REJECTION_WAIT_S)
        sys.exit(EXIT_CODES["refused"])


def adopt_slurm_step(
    environment: MutableMapping[str, str], min_tasks: int = 2
) -> ConfigError | None:
    """Says what srun says in the words of torchrun, if srun started ``min_tasks`` tasks or more.

    Not for what ``sbatch`` runs without ``srun``: that is one process, whatever was allocated.
    Rank variables that are left over (a part of torchrun's, of a world of one) are removed: the
    process is alone. Returns an error where they name one of several ranks and the rest is absent.
    """
    tasks = _parse_count(environment, "SLURM_STEP_NUM_TASKS")
    if tasks < min_tasks or all(name in environment for name in RANK_VARIABLES):
        return _check_rank_variables(environment)
    if absent := [name for name in ("SLURM_PROCID", "SLURM_LOCALID") if name not in environment]:
        return _incomplete_variables(environment, "SLURM_STEP_NUM_TASKS", absent)
    _adopt_step(environment, tasks)
    return _out_of_range(environment)


def _check_rank_variables(environment: MutableMapping[str, str]) -> ConfigError | None:
    """Removes rank variables that are left over; returns what is wrong with those of a rank."""
    given = [name for name in LAUNCHER_VARIABLES if name in environment]
    absent = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if absent:
        numbers = {name: environment.pop(name) for name in given if name in RANK_VARIABLES}
        of_a_rank = {"RANK", "LOCAL_RANK"} & numbers.keys()
        least = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        if of_a_rank and any(value != least.get(key, "0") for key, value in numbers.items()):
            return _incomplete_variables(numbers, next(iter(numbers)), absent)
        return _mpi_error(environment)
    return _out_of_range(environment)


def _out_of_range(environment: MutableMapping[str, str]) -> ConfigError | None:
    """Returns an error for a rank that its world does not have, and removes the variables."""
    for name, ranks in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        value, most = environment[name], environment[ranks]
        if not (value.isdecimal() and most.isdecimal() and int(value) < int(most)):
            for key in RANK_VARIABLES:
                environment.pop(key)
            fix = "start the ranks with torchrun or srun, or unset both for a run that is alone"
            return ConfigError.for_key(name, value, f"is no rank of {ranks}={most}", fix)
    return None


def _mpi_error(environment: MutableMapping[str, str]) -> ConfigError | None:
    """Returns an error for one of several processes of mpirun, each of which would train alone."""
    for name, least in MPI_VARIABLES.items():
        if "SLURM_STEP_NUM_TASKS" not in environment and _parse_count(environment, name) >= least:
            reason = "mpirun started several processes, and each would be a run of its own"
            fix = f"start one, or the ranks with torchrun or srun; if one is meant, unset {name}"
            return ConfigError.for_key(name, environment[name], reason, fix)
    return None


def _incomplete_variables(
    environment: Mapping[str, str], name: str, missing_names: Sequence[str]
) -> ConfigError:
    are = "are" if len(missing_names) > 1 else "is"
    reason = f"names one of several ranks, and {', '.join(missing_names)} {are} not set"
    fix = f"start the ranks with torchrun or srun, or unset {name} for a run that is alone"
    return ConfigError.for_key(name, environment[name], reason, fix)


def _parse_count(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else 0


def _adopt_step(environment: MutableMapping[str, str], tasks: int) -> None:
    """Sets torchrun's variables from those of a task of a Slurm step."""
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "127.0.0.1"))
    job = _parse_count(environment, "SLURM_JOB_ID")
    each = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_NTASKS_PER_NODE"))
    one_node = environment.get("SLURM_STEP_NUM_NODES") == "1"  # its name need not be known there
    told = {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "GROUP_RANK": environment.get("SLURM_NODEID", "0"),
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": re.split(r"\D", each or str(tasks))[0],
        "MASTER_ADDR": "127.0.0.1" if one_node else first_host(hosts),
        "MASTER_PORT": str(FIRST_PORT + job % PORTS),
    }
    for key, value in told.items():
        environment.setdefault(key, value)


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list: ``node[03-07,12],login1`` is ``node03``."""
    head = re.match(r"([^\[,\s]*)(?:\[(\w+))?", nodes)
    assert head is not None
    return head[1] + (head[2] or "")
