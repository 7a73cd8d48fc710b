"""How a run is laid over devices: one spec per kind of layout, their real objects in layouts/."""

from scalewise.parallelism.base import DEFAULT_CPU_RANKS, ParallelismConfig

__all__ = ["DEFAULT_CPU_RANKS", "ParallelismConfig"]
