"""Config group ``parallelism``: parallelism strategies as configs; imports no torch."""

from scalewise.parallelism.base import DEFAULT_CPU_RANKS, ParallelismConfig

__all__ = ["DEFAULT_CPU_RANKS", "ParallelismConfig"]
