"""Ranks that somebody else started: torchrun or the like, or Slurm's srun."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import MutableMapping

from scalewise.errors import EXIT_CODES
from scalewise.launch import signals

FIRST_PORT, PORTS = 15000, 20000
"""Where the ranks of a Slurm step meet: a port that its job id picks."""

SPEECH = 3.0
"""Seconds in which rank 0 says what all ranks are refused for."""


def by_others() -> bool:
    """Returns whether this process is one of several ranks that it did not start itself."""
    return "LOCAL_RANK" in os.environ and "RANK" in os.environ


def leads() -> bool:
    """Returns whether this process speaks for the job: alone, or as rank 0."""
    return not by_others() or os.environ["RANK"] == "0"


def let_rank_0_speak() -> None:
    """Ends every rank but 0 without a word, by the exit code of a refusal that all share.

    Not at once: torchrun ends the others when one has ended, be it before rank 0 could speak.
    """
    if not leads():
        with signals.ignored():
            time.sleep(SPEECH)
        sys.exit(EXIT_CODES["refused"])


def adopt(environment: MutableMapping[str, str], least: int = 2) -> None:
    """Says what srun says in the words of torchrun, if srun started ``least`` tasks or more.

    Not for what ``sbatch`` runs without ``srun``: that is one process, whatever was allocated.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "0"))
    if tasks < least or "RANK" in environment:
        return
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "127.0.0.1"))
    job = int(environment.get("SLURM_JOB_ID", "0"))
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
