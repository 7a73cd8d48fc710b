"""The way from a command line through Hydra to Runs: one, or the jobs of a multirun.

Hydra composes, this file validates, and only then does a verb hear of a Run. All of a multirun's
jobs are validated before the first starts.
"""

import gc
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from scalewise import console
from scalewise.config import diagnostics, hydra_policy, paths, run_naming, schemas, search_path
from scalewise.config.bounded_loader import bound_omegaconf
from scalewise.config.composition_cache import shared_composition_cache
from scalewise.config.flags import flag_help, launcher_issues, overrides_first, split_flags
from scalewise.config.new_folders import (
    before_each_run,
    missing_folders,
    record_hydra_folders,
    remove_empty,
)
from scalewise.config.parse import parse_run
from scalewise.config.suggestions import did_you_mean
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class SweepJob:
    """One job of a multirun, validated and not yet started."""

    number: int
    run: RunConfig
    folder: Path
    varied: Mapping[str, str]
    """What this job's overrides set otherwise than its neighbours'."""


@dataclass(frozen=True)
class JobEnd:
    """How one job ended: its exit code and the number that a sweeper minimises."""

    exit_code: int
    objective: float


class Command:
    """What a verb does with a Run, and with the jobs of a multirun."""

    checks_machine = True
    """Whether runs must be able to run on the present machine."""
    is_search = False
    """Whether a search hands it jobs, which keeps account of them itself."""
    produces_measurements = False
    """Whether its jobs leave folders with measurements, which a search goes by."""
    remote_launchers: Collection[str] = ()
    """Launchers whose jobs run on other machines."""

    def run_single(self, run: RunConfig, folder: Path) -> int:
        """Runs a single job into ``folder`` and returns the exit code."""
        raise NotImplementedError

    def choose_sweep_folder(self, folder: Path) -> Path:
        """Returns the folder of a multirun, which need not exist, for the ``folder`` proposed.

        Raises ``ConfigError`` where no multirun can run.
        """
        return folder

    def claim_sweep_folder(self, folder: Path, *, user_named: bool) -> Path:
        """Returns the folder of a multirun whose jobs are valid; called once, before ``run_sweep``.

        ``folder`` is what ``choose_sweep_folder`` returned; ``user_named``: whether the user named
        it.
        """
        return folder

    def release_sweep_folder(self) -> None:
        """Gives up what ``claim_sweep_folder`` holds; called at the end of every multirun."""

    def run_sweep(
        self,
        jobs: Sequence[SweepJob],
        folder: Path,
        question: str,
        launcher_options: Mapping[str, object],
    ) -> list[JobEnd]:
        """Runs a batch of a multirun into ``folder`` and returns how each job ended.

        ``launcher_options`` names what runs the jobs, and its options: those of ``hydra/launcher``.
        """
        raise NotImplementedError


@dataclass
class CommandContext:
    """A verb on its way through Hydra."""

    command: Command
    config_folder: Path | None = None
    """The folder of ``-cd``."""
    cli_overrides: Sequence[str] = ()
    """Overrides of the command line; those of a job may come from files."""
    exit_codes: list[int] = field(default_factory=list)
    """Exit codes of its jobs so far."""
    run: RunConfig | None = None
    """The run of a command without ``-m``, once it is valid."""
    exceptions: list[Exception] = field(default_factory=list)
    """What the verb itself raised."""
    sweep_folder: Path | None = None
    """The folder of a multirun."""
    new_folders: list[Path] = field(default_factory=list)
    """That folder and its parents as far as they were not there before, the innermost first."""
    folder_is_user_named: bool = False
    """Whether that folder was named by the user, and not by the time of day."""
    folder_is_claimed: bool = False
    """Whether the folder belongs to this multirun."""
    varied_keys: Sequence[str] = ()
    """Keys that a search varies, though the jobs of one batch may not differ in them."""
    file_overrides: Sequence[str] = ()
    """The axes that a sweep's file adds to what was typed."""


_contexts: list[CommandContext] = []


def run_command(command: Command, arguments: Sequence[str]) -> int:
    """Returns the exit code of ``scalewise VERB ARGUMENTS``.

    Raises ``ConfigError`` with every complaint for a line that cannot run; no folder is left.
    """
    arguments = overrides_first(arguments)
    flags = split_flags(arguments)
    if flags.hydra_help:
        console.print_lines(*flag_help())
        return 0
    away = any(f"hydra/launcher={name}" in flags.overrides for name in command.remote_launchers)
    made: list[Path] = []
    own = Path(flags.config_dir).absolute() if flags.config_dir else None
    context = CommandContext(command, own, tuple(flags.overrides))
    if unreadable := list(diagnostics.unparsable_overrides(flags.overrides)):
        raise ConfigError(unreadable)
    typed = [line.partition("=") for line in flags.overrides]
    launchers = [name for key, _, name in typed if key == "hydra/launcher"]
    if foreign := [c for name in launchers for c in launcher_issues(name)]:
        raise ConfigError(foreign)

    def validate(config: DictConfig) -> None:
        HydraConfig.instance().set_config(config)  # for interpolations of ${hydra:...}
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = os.path.abspath(config.hydra.run.dir)
        try:
            context.run = _single_run(config, context)
        except Exception as error:  # Hydra would hide which error it was
            context.exceptions.append(error)
            raise

    def task(_: DictConfig) -> None:
        console.redact_logs()
        try:
            gc.enable()
            assert context.run is not None
            context.exit_codes.append(
                command.run_single(context.run, Path(HydraConfig.get().runtime.output_dir))
            )
        except Exception as error:  # Hydra would print about it
            context.exceptions.append(error)
        finally:  # a signal is no Exception
            remove_empty(made)

    _contexts.append(context)
    program = hydra.main(
        version_base="1.3", config_path=str(paths.project_root() / "conf"), config_name="config"
    )(task)
    argv, errors = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["scalewise", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises instead of printing a traceback
    gc.disable()  # until what the line says is composed: see the import of a verb
    try:
        prepare()
        with (
            record_hydra_folders(made),
            before_each_run(validate),
            shared_composition_cache(),
            hydra_policy.enforce_policy(),
            nullcontext() if _may_switch_to_multirun(flags) else _skip_mode_composition(),
        ):
            program()
        if context.exceptions:
            raise context.exceptions[0]
    except SystemExit as error:
        if not (error.code and flags.package):
            raise
        reason, fix = (
            "is no part of the config",
            did_you_mean(flags.package, paths.GROUPS, "--package "),
        )
        raise ConfigError.for_key("--package", flags.package, reason, fix) from None
    except Exception as error:  # whatever Hydra made of it is translated below
        if error in context.exceptions or (isinstance(error, ConfigError) and not error.__cause__):
            raise
        lines = [*context.file_overrides, *flags.overrides]
        raise diagnostics.translate_hydra_error(
            error, lines, check_machine=command.checks_machine and not away
        ) from error
    finally:
        gc.enable()
        command.release_sweep_folder()
        remove_empty(context.new_folders)
        _contexts.remove(context)
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if errors is not None:
            os.environ["HYDRA_FULL_ERROR"] = errors
    return _exit_code(context.exit_codes)


def _single_run(config: DictConfig, context: CommandContext) -> RunConfig:
    """Returns the validated Run of a command without ``-m``; raises ``ConfigError``."""
    if (
        launcher := config.hydra.runtime.choices["hydra/launcher"]
    ) in context.command.remote_launchers:
        fix = "add -m: a sweep of one job"
        raise ConfigError.for_key("hydra/launcher", launcher, "a single run runs here", fix)
    return parse_run(
        config,
        _typed_overrides(config.hydra),
        context.cli_overrides,
        check_machine=context.command.checks_machine,
    )


def _may_switch_to_multirun(flags: Namespace) -> bool:
    """Returns whether a file or a setting, where there is no ``-m``, can make a multirun of it."""
    if flags.multirun:
        return False
    keys = {line.lstrip("+~").partition("=")[0] for line in flags.overrides}
    named = {"sweep", "experiment"} & keys or any(key.startswith("hydra") for key in keys)
    return bool(named or flags.config_dir or flags.config_name)


@contextmanager
def _skip_mode_composition() -> Iterator[None]:
    """Spares a whole composition, a quarter of a plan's start: Hydra's, to read ``hydra.mode``."""
    asks = Hydra.get_mode
    Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]  # Hydra has no switch
    try:
        yield
    finally:
        Hydra.get_mode = asks  # type: ignore[method-assign]  # puts Hydra's own back


def prepare() -> None:
    """Registers schemas, resolvers, experiments and sweeps with Hydra; may be called again."""
    bound_omegaconf()
    Plugins.instance()  # whatever is installed has its names by now: one has a joblib too
    schemas.store_schemas()
    search_path.mount_configs(_contexts[-1].config_folder if _contexts else None)
    run_naming.register_resolvers()


def launch(
    loader: ConfigLoader,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
    options: Callable[[], Mapping[str, object]],
) -> list[JobReturn]:
    """Returns the results of a batch of jobs, numbered from ``first_number``; for Hydra's launcher.

    ``options``: those of the launcher, some of which name the folder of the multirun.
    """
    gc.enable()
    context = _contexts[-1]
    proposed = context.sweep_folder or current_sweep_folder(config)
    here = (
        context.command.checks_machine
        and options()["engine"] not in context.command.remote_launchers
    )
    jobs = _validate_jobs(loader, config, job_overrides, first_number, proposed, check_machine=here)
    folder = claimed_sweep_folder(config)
    jobs = [_relocated(job, proposed, folder) for job in jobs]
    engine = options()
    try:
        ends = context.command.run_sweep(jobs, folder, jobs[0].run.question, engine)
    except Exception as error:  # Hydra would hide which error it was
        context.exceptions.append(error)
        raise
    context.exit_codes.extend(end.exit_code for end in ends)
    return [_job_return(end) for end in ends]


def current_sweep_folder(config: DictConfig) -> Path:
    """Returns the folder of the multirun under way, if its verb admits it, and keeps it in mind."""
    setup_globals()
    sweep = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    if _contexts[-1].sweep_folder is None and isinstance(sweep, dict):
        _contexts[-1].folder_is_user_named = "${now:" not in str(sweep["dir"])
    return _set_sweep_folder(
        config, _contexts[-1].command.choose_sweep_folder(Path(config.hydra.sweep.dir).absolute())
    )


def claimed_sweep_folder(config: DictConfig) -> Path:
    """Returns the folder of the multirun under way once it is its own: a colliding one moves."""
    context = _contexts[-1]
    assert context.sweep_folder is not None
    if not context.folder_is_claimed:
        _set_sweep_folder(
            config,
            context.command.claim_sweep_folder(
                context.sweep_folder, user_named=context.folder_is_user_named
            ),
        )
        context.folder_is_claimed = True
    return context.sweep_folder


def _set_sweep_folder(config: DictConfig, folder: Path) -> Path:
    with read_write(config), open_dict(config):
        config.hydra.sweep.dir = str(folder)
    context = _contexts[-1]
    context.new_folders = [*missing_folders(folder), *context.new_folders]
    if context.sweep_folder not in (None, folder):  # a new one beside that which was proposed
        context.new_folders.insert(0, folder)
    context.sweep_folder = folder
    return folder


def _relocated(job: SweepJob, proposed_folder: Path, folder: Path) -> SweepJob:
    if folder == proposed_folder or not job.folder.is_relative_to(proposed_folder):
        return job
    return replace(job, folder=folder / job.folder.relative_to(proposed_folder))


def has_measurements() -> bool:
    """Returns whether the verb under way leaves measurements that a search can go by."""
    return _contexts[-1].command.produces_measurements


def begin_search() -> None:
    """Tells the verb under way that a search will hand it jobs, batch by batch."""
    _contexts[-1].command.is_search = True


def note_varied(keys: Sequence[str]) -> None:
    """Notes the keys that the multirun under way varies from batch to batch."""
    _contexts[-1].varied_keys = tuple(keys)


def count_rejected(error: ConfigError) -> None:
    """Counts a job of the multirun under way that a search left out, as one that was refused."""
    _contexts[-1].exit_codes.append(error.exit_code)


def rejection_reason(
    loader: ConfigLoader, config: DictConfig, overrides: Sequence[str]
) -> ConfigError | None:
    """Returns why a job with these overrides could not run; None where it can."""
    try:
        _validate_jobs(
            loader,
            config,
            [overrides],
            0,
            Path(),
            check_machine=_contexts[-1].command.checks_machine,
        )
    except ConfigError as error:
        return error
    return None


def remember_sweep_axes(overrides: Sequence[str]) -> None:
    """Keeps the axes of a sweep's file in mind, for complaints about them; for Hydra's sweeper."""
    _contexts[-1].file_overrides = overrides


def _validate_jobs(
    loader: ConfigLoader,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
    folder: Path,
    *,
    check_machine: bool,
) -> list[SweepJob]:
    varied = _varied_values(job_overrides, _contexts[-1].varied_keys)
    jobs: list[SweepJob] = []
    issues: dict[str, ConfigIssue] = {}
    failed: Exception | None = None
    checking = console.show_progress(job_overrides, "checking", "jobs")
    for number, overrides in enumerate(checking, start=first_number):
        try:
            composed = loader.load_sweep_config(config, list(overrides))
        except Exception as error:  # Hydra's: the whole line is looked at again, all jobs of it
            failed = error
            break
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
        try:
            # Alone, a job is its own overrides: the axes would make it a sweep again.
            lines = [
                line for line in _typed_overrides(composed.hydra) if not line.startswith("sweep=")
            ]
            run = parse_run(
                composed, lines, _contexts[-1].cli_overrides, check_machine=check_machine
            )
        except ConfigError as error:
            issues |= {str(issue): issue for issue in error.issues}
            continue
        subdir = str(OmegaConf.select(composed, "hydra.sweep.subdir"))
        if not _is_inside(subdir):
            fix = "give the name of a folder in it: 'hydra.sweep.subdir=${hydra.job.num}'"
            reason = "leads out of the sweep's folder"
            raise ConfigError.for_key("hydra.sweep.subdir", subdir, reason, fix)
        own = folder / subdir
        jobs.append(SweepJob(number, run, own, varied[number - first_number]))
    if issues:
        raise ConfigError(issues.values()) from failed
    if failed is not None:
        raise failed
    return jobs


def _is_inside(path: str) -> bool:
    """Returns whether a relative path names something within the folder that it starts from."""
    first = Path(os.path.normpath(path)).parts[:1]
    return not os.path.isabs(path) and first not in ((), ("..",))


def _typed_overrides(hydra_config: DictConfig) -> list[str]:
    """Returns the overrides as they were typed: an interpolation in one is not resolved there."""
    lines = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    assert isinstance(lines, list)
    return [str(line) for line in lines]


def _varied_values(
    job_overrides: Sequence[Sequence[str]], varied_keys: Sequence[str]
) -> list[dict[str, str]]:
    tables = [dict(o.split("=", 1) for o in overrides if "=" in o) for overrides in job_overrides]
    keys = dict.fromkeys(key for table in tables for key in table)
    varying = [
        key for key in keys if key in varied_keys or len({table.get(key) for table in tables}) > 1
    ]
    return [{key.lstrip("+"): table[key] for key in varying if key in table} for table in tables]


def _job_return(job_end: JobEnd) -> JobReturn:
    result = JobReturn()
    result.status = JobStatus.COMPLETED
    result.return_value = job_end.objective
    return result


def _exit_code(exit_codes: Sequence[int]) -> int:
    """Returns 0, the code that all unsuccessful jobs share, or 1 where they differ."""
    bad = set(exit_codes) - {0}
    return bad.pop() if len(bad) == 1 else int(bool(bad))
