"""Hydra sweeper plugins: ``hydra/sweeper=basic``, ``optuna``, ``cases`` and ``screen``.

``basic`` replaces Hydra's own sweeper of this name, so that the file of a sweep may choose another
one. Hydra imports this module in every application, so heavy imports are inside the functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LaunchingSweeper(Sweeper):
    """Base class: keeps the config, its loader and the launcher."""

    config: DictConfig
    loader: ConfigLoader
    launcher: Launcher

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Create the launcher and store the config and the config loader."""
        self.config, self.loader = config, hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )


class ScalewiseSweeper(LaunchingSweeper):
    """Sweeper that launches all combinations of ``params`` with the tuples of ``zip``.

    Both map keys to values in Hydra's sweep syntax: ``a,b,c``, ``range(1,9)``, ``choice(..)``.
    """

    def __init__(self, params: Mapping[str, object], zip: Mapping[str, object]) -> None:
        self.params, self.zipped_params = params, zip

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the sweep and return its results; ``arguments`` replace axes of the same key."""
        from scalewise.config import app, parsed_overrides

        file_overrides = parsed_overrides.sweep_overrides(self.params, self.zipped_params)
        app.set_file_overrides(file_overrides)
        batch: Any = parsed_overrides.expand_jobs(
            file_overrides, arguments, list(self.zipped_params), self.loader
        )
        return self.launcher.launch(batch, initial_job_idx=0)


class OptunaSweeper(LaunchingSweeper):
    """Sweeper that launches batches of trials until the study has all its trials."""

    def __init__(self, params: dict[str, str], **options: Any) -> None:
        self.params, self.options = dict(params), options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Mark the sweep as a search before the launcher chooses its folder."""
        from scalewise.config import app

        app.mark_search()
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> None:
        """Run the search. Raises ``ConfigError`` for invalid options before any job runs."""
        from scalewise.commands.trial_runner import TrialRunner

        axes = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        TrialRunner(self.loader, self.config, self.launcher).run(axes, self.options)


class CasesSweeper(LaunchingSweeper):
    """Sweeper that launches named cases, each with overrides and expectations of its own."""

    def __init__(self, cases: Any, only: Any, hypothesis: str, answer: str) -> None:
        self.cases, self.only, self.hypothesis, self.answer = cases, only, hypothesis, answer

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the cases and return their results. Raises ``ConfigError`` for invalid cases."""
        from scalewise.config import app, parsed_overrides

        cases, jobs = parsed_overrides.expand_cases(
            self.cases, self.only, self.answer, arguments, self.loader
        )
        app.set_cases(cases, self.hypothesis.strip(), self.answer.strip())
        return self.launcher.launch(jobs, initial_job_idx=0)


class ScreenSweeper(LaunchingSweeper):
    """Sweeper that launches all jobs of a two-level fractional factorial as one batch."""

    def __init__(self, factors: Any, **options: Any) -> None:
        self.options = {"factors": factors or {}, **options}

    def sweep(self, arguments: list[str]) -> None:
        """Run the screening. Raises ``ConfigError`` for invalid factors."""
        from scalewise.config import parsed_overrides
        from scalewise.errors import ConfigError, ConfigIssue
        from scalewise.hpo.screen import ScreeningDesign

        axes, fixed_overrides = parsed_overrides.read_axes(arguments, self.loader)
        design = ScreeningDesign(**self.options)
        fix = "add it to hydra.sweeper.factors, or give it one value"
        issues = [
            ConfigIssue(axis.key, "", "is varied, and is not a factor of the screening", fix)
            for axis in axes
        ]
        issues += design.validate([override.split("=", 1)[0] for override in fixed_overrides])
        if issues:
            raise ConfigError(issues)
        self.launcher.launch(
            [[*fixed_overrides, *overrides] for overrides in design.build_overrides()], 0
        )


@dataclass
class OptunaSweeperConf:
    """Options of the sweeper, documented in ``scalewise.hpo.config.SearchConfig``."""

    _target_: str = f"{__name__}.{OptunaSweeper.__name__}"
    _recursive_: bool = False
    params: dict[str, str] = field(default_factory=dict)
    trials: int | None = None
    jobs: int = 1
    sampler: str = "tpe"
    seed: int = 1
    objectives: Any = None  # Any: Hydra rejects new keys in a Dict field
    constraints: Any = None
    pruner: str = "none"
    storage: str | None = None
    study: str | None = None


@dataclass
class CasesSweeperConf:
    """Options of the sweeper, documented in ``scalewise.config.option_docs.CasesOptions``."""

    _target_: str = f"{__name__}.{CasesSweeper.__name__}"
    _recursive_: bool = False
    _convert_: str = "all"
    cases: Any = None
    only: Any = None
    hypothesis: str = ""
    answer: str = ""


@dataclass
class ScreenSweeperConf:
    """Options of the sweeper, documented in ``scalewise.hpo.screen.ScreeningDesign``."""

    _target_: str = f"{__name__}.{ScreenSweeper.__name__}"
    _recursive_: bool = False
    factors: Any = None
    interactions: bool = False
    repeats: int = 2
    seed: int = 1


for name, node in {
    "basic": {
        "_target_": f"{__name__}.{ScalewiseSweeper.__name__}",
        "_recursive_": False,
        "_convert_": "all",
        "params": {},
        "zip": {},
    },
    "optuna": OptunaSweeperConf,
    "cases": CasesSweeperConf,
    "screen": ScreenSweeperConf,
}.items():
    ConfigStore.instance().store(group="hydra/sweeper", name=name, node=node, provider="scalewise")
