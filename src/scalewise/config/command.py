"""Subcommands that compose runs, the jobs of a multirun, and the state of one command."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scalewise.errors import ConfigError
from scalewise.expectations import Expectation, SweepCase
from scalewise.run_config import RunConfig
from scalewise.sweep_question import SweepQuestion


@dataclass(frozen=True)
class SweepJob:
    """Validated job of a multirun."""

    number: int
    """Job number, from 0."""
    run: RunConfig
    """Resolved run of the job."""
    folder: Path
    """Run folder; it does not exist yet."""
    varied: Mapping[str, str]
    """Overrides in which the jobs of the multirun differ: value by key."""
    expectation: Expectation | None = None
    """Expected outcome; None if the job is not a case of ``hydra/sweeper=cases``."""


@dataclass(frozen=True)
class RejectedJob:
    """Job of a multirun whose config is rejected."""

    varied: Mapping[str, str]
    """Overrides in which the jobs of the multirun differ: value by key."""
    error: ConfigError
    """All issues of the config."""


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of one job."""

    exit_code: int
    """Exit code, a value of ``EXIT_CODES``."""
    objective: float
    """Value that the sweeper minimizes."""


class Command:
    """Base class of subcommands that handle a single run or the jobs of a multirun."""

    checks_machine = True
    """Whether runs are also validated against this machine."""
    is_search = False
    """Whether a hyperparameter search submits the jobs; the search records them itself."""
    produces_measurements = False
    """Whether jobs write measurements, which a search needs."""
    remote_launchers: Collection[str] = ()
    """Launchers that run jobs on other machines."""
    rejected_jobs: list[RejectedJob] | None = None
    """Rejected jobs of a multirun that handles the valid ones; None: it handles none of them."""

    def run_single(self, run: RunConfig, folder: Path) -> int:
        """Run a single job in ``folder`` and return its exit code."""
        raise NotImplementedError

    def choose_sweep_folder(self, folder: Path) -> Path:
        """Choose the folder of a multirun; ``folder`` is the configured one. It need not exist.

        Raises ``ConfigError`` if a multirun is not possible.
        """
        return folder

    def claim_sweep_folder(self, folder: Path, *, user_named: bool) -> Path:
        """Create or lock the folder of a multirun and return it.

        Called once, before ``run_sweep``, if all jobs are valid.

        Args:
            folder: Result of ``choose_sweep_folder``.
            user_named: Whether the user named the folder.
        """
        return folder

    def release_sweep_folder(self) -> None:
        """Release the lock of ``claim_sweep_folder``; called at the end of every multirun."""

    def run_sweep(
        self,
        jobs: Sequence[SweepJob],
        folder: Path,
        question: SweepQuestion,
        launcher_options: Mapping[str, object],
    ) -> list[JobOutcome]:
        """Run a batch of jobs in ``folder`` and return the outcome of each job.

        Args:
            jobs: Validated jobs.
            folder: Sweep folder.
            question: Question of the sweep, with hypothesis and answer.
            launcher_options: Options of ``hydra/launcher``; ``engine`` names the executor.
        """
        raise NotImplementedError


@dataclass
class CommandContext:
    """State of one command while Hydra composes and runs it."""

    command: Command
    """Subcommand of the command line."""
    config_folder: Path | None = None
    """Folder of ``-cd``."""
    cli_overrides: Sequence[str] = ()
    """Overrides of the command line; jobs also have overrides of sweep files."""
    exit_codes: list[int] = field(default_factory=list)
    """Exit codes of the jobs so far."""
    run: RunConfig | None = None
    """Validated run of a command without ``-m``."""
    exceptions: list[Exception] = field(default_factory=list)
    """Exceptions that the subcommand raised."""
    sweep_folder: Path | None = None
    """Folder of the multirun."""
    new_folders: list[Path] = field(default_factory=list)
    """Folders created for the multirun, innermost first."""
    folder_is_user_named: bool = False
    """Whether the user named the sweep folder; by default it is named by the time."""
    folder_is_claimed: bool = False
    """Whether the command has claimed the sweep folder."""
    varied_keys: Sequence[str] = ()
    """Keys that a search varies, even if they are equal in one batch."""
    file_overrides: Sequence[str] = ()
    """Overrides that a sweep file adds to the command line."""
    cases: Sequence[SweepCase] = ()
    """Cases of ``hydra/sweeper=cases``, one per job."""
    hypothesis: str = ""
    """Expected answer to the question of the cases."""
    answer: str = ""
    """Template of the answer."""
