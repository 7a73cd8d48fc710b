"""Cache of functions of a run: results for the run that was planned last.

Memory and time of one run read the same partitions. A ``RunConfig`` has no hash, because its
callbacks are dicts, so that the run is compared by identity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, TypeVar

from scalewise.run_config import RunConfig

Result = TypeVar("Result")


class remember_last_run(Generic[Result]):  # noqa: N801 (a decorator, as functools.lru_cache)
    """Decorator of a function of a run and a rank, which stores the results of one run.

    Args:
        function: Function without side effects.
    """

    def __init__(self, function: Callable[[RunConfig, int], Result]) -> None:
        self._function = function
        self._last: tuple[RunConfig | None, dict[int, Result]] = (None, {})
        update_wrapper(self, function)

    def __call__(self, run: RunConfig, rank: int = 0) -> Result:
        """Return the result for a rank of a run."""
        last_run, results = self._last
        if last_run is not run:
            results = {}
            self._last = (run, results)  # one assignment, so that threads see both or none
        if rank not in results:
            results[rank] = self._function(run, rank)
        return results[rank]
