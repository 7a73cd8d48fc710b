"""Hydra's way to a search: ``hydra/sweeper=optuna`` lets Optuna choose the next jobs.

Hydra imports every module here in every application, so nothing heavy is imported at its head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from optuna.trial import Trial

    from scalewise.errors import Complaint
    from scalewise.study.space import Axis
    from scalewise.study.spec import Search
    from scalewise.study.study import Study


class OptunaSweeper(Sweeper):
    """Hands batches of trials to the launcher until the study has all that it wants."""

    def __init__(self, params: dict[str, str], **options: Any) -> None:
        self.params, self.options = dict(params), options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keeps what trials are composed with."""
        from hydra.core.plugins import Plugins

        from scalewise.config import door

        door.searches()
        self.loader, self.asked = hydra_context.config_loader, config
        self.batches = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Searches; raises ``ConfigError`` for options that cannot be had before any job runs."""
        from scalewise.config import door, search_axes
        from scalewise.errors import ConfigError
        from scalewise.study.spec import Search

        lines = [f"{key}={value}" for key, value in self.params.items()]
        space, fixed = search_axes.read([*lines, *arguments], self.loader)
        search = Search.of(self.options)
        complaints = [*_of_package(), *search.complaints(space)]
        complaints += self._of_validation(search, space)
        if complaints:
            raise ConfigError(complaints)
        self._check(space, fixed)
        door.vary([axis.key for axis in space])
        if door.measures():
            self._search(search, space, fixed, door.claimed_folder(self.asked))
        else:
            from scalewise.study.space import overrides
            from scalewise.study.study import drawn

            points = [[*fixed, *overrides(point)] for point in drawn(search, space)]
            self.batches.launch([p for p in points if not self._refused(p)], 0)

    def _of_validation(self, search: "Search", space: Sequence["Axis"]) -> Iterator["Complaint"]:
        """Yields the objective that no trial would measure."""
        from scalewise.errors import Complaint

        every = "trainer.validate_every"
        validates = self.asked.trainer.validate_every or every in [axis.key for axis in space]
        if "val/loss" in search.objectives and not validates:
            yield Complaint(every, None, "no trial would measure val/loss", f"set {every}=100")

    def _check(self, space: Sequence["Axis"], fixed: Sequence[str]) -> None:
        """Refuses what no trial could run with, and values that no option or type knows."""
        from scalewise.study.space import Choice, first, overrides

        for axis in space:
            for value in axis.values if isinstance(axis, Choice) else ():
                self.loader.load_sweep_config(self.asked, [*fixed, f"{axis.key}={value}"])
        if (error := self._refused(fixed)) and self._refused([*fixed, *overrides(first(space))]):
            raise error

    def _search(
        self, search: "Search", space: Sequence["Axis"], fixed: Sequence[str], folder: Path
    ) -> None:
        from scalewise.study import outcome, record, study
        from scalewise.verbs import show_study

        found = study.opened(search, space, folder)
        folder.mkdir(parents=True, exist_ok=True)
        show_study.begins(found, found.reclaim())
        stopped = False
        while not stopped and (trials := found.asked()):
            first = 1 + max((int(str(r["number"])) for r in outcome.rows(folder)), default=-1)
            started = self._launched(found, trials, fixed, folder, first)
            for number, trial in enumerate(started, start=first):
                ended = outcome.of_job(folder, number)
                found.tell(trial, ended)
                stopped = stopped or ended.lost
            record.write(found, folder)
        show_study.ended(record.of(found, folder), folder)

    def _launched(
        self,
        found: "Study",
        trials: Sequence["Trial"],
        fixed: Sequence[str],
        folder: Path,
        first: int,
    ) -> list["Trial"]:
        """Runs the trials that can run and returns them; the others are told as refused."""
        from scalewise.config import door
        from scalewise.study.outcome import Outcome
        from scalewise.study.space import overrides
        from scalewise.verbs import show_study

        lines: list[list[str]] = []
        started: list[Trial] = []
        for trial in trials:
            line = [*fixed, *overrides(trial.params)]
            if error := self._refused(line):
                reason = "; ".join(str(complaint) for complaint in error.complaints)
                found.tell(trial, Outcome("refused", reason))
                door.refused(error)
                show_study.refused(trial.number, trial.params, reason)
                continue
            number = first + len(started)
            found.begin(trial, folder, number, folder / str(number))
            started.append(trial)
            lines.append(line)
        if lines:
            self.batches.launch(lines, first)
        return started

    def _refused(self, overrides: Sequence[str]) -> Any:
        from scalewise.config import door

        return door.refusal(self.loader, self.asked, overrides)


def _of_package() -> Iterator["Complaint"]:
    from scalewise.errors import Complaint

    try:
        import optuna  # noqa: F401 (asked for, as the searches will ask)
    except ImportError:
        reason, cure = "optuna is not installed", "pip install 'scalewise[optuna]'"
        yield Complaint("hydra/sweeper", "optuna", reason, cure)


@dataclass
class OptunaSweeperConf:
    """Its options; ``scalewise.study.spec.Search`` says what they mean."""

    _target_: str = f"{__name__}.{OptunaSweeper.__name__}"
    _recursive_: bool = False
    params: dict[str, str] = field(default_factory=dict)
    trials: int | None = None
    jobs: int = 1
    sampler: str = "tpe"
    seed: int = 1
    objectives: Any = None  # mappings: as such, Hydra would let nobody add to them by a line
    constraints: Any = None
    pruner: str = "none"
    storage: str | None = None
    study: str | None = None


ConfigStore.instance().store(
    group="hydra/sweeper", name="optuna", node=OptunaSweeperConf, provider="scalewise"
)
