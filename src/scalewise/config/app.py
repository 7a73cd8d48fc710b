"""Hydra application: composes and validates the runs of a command line.

A command receives validated runs only. All jobs of a multirun are validated before the first one
starts.
"""

import gc
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from scalewise import console
from scalewise.compat.hydra import log_setup_hook, run_job_hook, without_mode_composition
from scalewise.config import diagnostics, hydra_policy, paths, run_folders, schemas, sweep_jobs
from scalewise.config.command import Command, CommandContext, JobOutcome, SweepJob
from scalewise.config.composition_cache import shared_composition_cache
from scalewise.config.flags import flag_help, overrides_first, split_flags
from scalewise.config.hydra_policy import bound_omegaconf
from scalewise.config.launchers import launcher_issues, unknown_option_issues
from scalewise.config.parse import parse_run
from scalewise.config.run_folders import missing_folders, record_hydra_folders, remove_empty
from scalewise.config.sweep_jobs import typed_overrides
from scalewise.errors import ConfigError, did_you_mean
from scalewise.expectations import SweepCase
from scalewise.run_config import RunConfig
from scalewise.sweep_question import SweepQuestion

_contexts: list[CommandContext] = []


def run_command(command: Command, arguments: Sequence[str]) -> int:
    """Run ``scalewise COMMAND ARGUMENTS`` and return its exit code.

    Raises ``ConfigError`` with every config issue; in this case no folder remains.
    """
    arguments = overrides_first(arguments)
    flags = split_flags(arguments)
    if flags.hydra_help:
        console.print_lines(*flag_help())
        return 0
    try:
        os.getcwd()
    except FileNotFoundError:
        reason, fix = "the current folder has been deleted", "cd to another folder"
        raise ConfigError.for_key("", "", reason, fix) from None
    created_folders: list[Path] = []
    user_folder = Path(flags.config_dir).absolute() if flags.config_dir else None
    context = CommandContext(command, user_folder, tuple(flags.overrides))
    if syntax_issues := list(diagnostics.unparsable_overrides(flags.overrides)):
        raise ConfigError(syntax_issues)
    pairs = [line.partition("=") for line in flags.overrides]
    launchers = [name for key, _, name in pairs if key == "hydra/launcher"]
    if plugin_issues := [c for name in launchers for c in launcher_issues(name)]:
        raise ConfigError(plugin_issues)

    def validate(config: DictConfig) -> None:
        HydraConfig.instance().set_config(config)  # resolves interpolations of ${hydra:...}
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = os.path.abspath(config.hydra.run.dir)
        try:
            context.run = _single_run(config, context)
        except Exception as error:  # Hydra wraps it otherwise
            context.exceptions.append(error)
            raise

    def task(_: DictConfig) -> None:
        try:
            gc.enable()
            assert context.run is not None
            context.exit_codes.append(
                command.run_single(context.run, Path(HydraConfig.get().runtime.output_dir))
            )
        except Exception as error:  # Hydra prints it otherwise
            context.exceptions.append(error)
        finally:  # also after a signal, which raises a BaseException
            remove_empty(created_folders)

    _contexts.append(context)
    program = hydra.main(
        version_base="1.3", config_path=str(paths.project_root() / "conf"), config_name="config"
    )(task)
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["scalewise", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of exit
    gc.disable()  # until the config is composed; see the import of a command in cli.py
    try:
        prepare()
        with (
            record_hydra_folders(created_folders),
            run_job_hook(validate),
            log_setup_hook(console.adapt_log_setup),
            shared_composition_cache(),
            hydra_policy.enforce_policy(),
            nullcontext() if _may_switch_to_multirun(flags) else without_mode_composition(),
        ):
            program()
        if context.exceptions:
            raise context.exceptions[0]
    except SystemExit as error:
        if not (error.code and flags.package):
            raise
        reason, fix = (
            "is not a key of the config",
            did_you_mean(flags.package, paths.GROUPS, "--package "),
        )
        raise ConfigError.for_key("--package", flags.package, reason, fix) from None
    except Exception as error:  # errors of Hydra are translated below
        if error in context.exceptions or (isinstance(error, ConfigError) and not error.__cause__):
            raise
        lines = [*context.file_overrides, *flags.overrides]
        raise diagnostics.translate_hydra_error(
            error,
            lines,
            check_machine=command.checks_machine,
            remote_launchers=command.remote_launchers,
        ) from error
    finally:
        gc.enable()
        command.release_sweep_folder()
        remove_empty(context.new_folders)
        _contexts.remove(context)
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    return _exit_code(context.exit_codes)


def _single_run(config: DictConfig, context: CommandContext) -> RunConfig:
    """Parse and validate the run of a command without ``-m``; raises ``ConfigError``."""
    if (
        launcher := config.hydra.runtime.choices["hydra/launcher"]
    ) in context.command.remote_launchers:
        fix = "add -m for a sweep of one job"
        reason = "requires -m: a single run runs on this machine"
        raise ConfigError.for_key("hydra/launcher", launcher, reason, fix)
    return parse_run(
        config,
        typed_overrides(config.hydra),
        context.cli_overrides,
        check_machine=context.command.checks_machine,
    )


def _may_switch_to_multirun(flags: Namespace) -> bool:
    """Return whether a config file or an override can enable multirun without ``-m``."""
    if flags.multirun:
        return False
    keys = {line.lstrip("+~").partition("=")[0] for line in flags.overrides}
    selects_preset = {"sweep", "experiment"} & keys or any(key.startswith("hydra") for key in keys)
    return bool(selects_preset or flags.config_dir or flags.config_name)


def prepare() -> None:
    """Register schemas, resolvers, experiments and sweeps with Hydra; idempotent."""
    bound_omegaconf()
    schemas.store_schemas()
    paths.mount_configs(_contexts[-1].config_folder if _contexts else None)
    run_folders.register_resolvers()


def launch(
    loader: ConfigLoader,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
    options: Callable[[], Mapping[str, object]],
) -> list[JobReturn]:
    """Validate and run a batch of jobs for the Hydra launcher, and return their results.

    Args:
        loader: Hydra's config loader.
        config: Composed config of the multirun.
        job_overrides: Overrides of each job.
        first_number: Number of the first job.
        options: Function that resolves the launcher options; some contain the sweep folder.
    """
    gc.enable()
    context = _contexts[-1]
    launcher = str(config.hydra.runtime.choices["hydra/launcher"])  # a file may choose it
    if issues := [*launcher_issues(launcher)] or [*unknown_option_issues(launcher, options())]:
        raise ConfigError(issues)
    proposed_folder = context.sweep_folder or current_sweep_folder(config)
    check_machine = (
        context.command.checks_machine
        and options()["engine"] not in context.command.remote_launchers
    )
    jobs = sweep_jobs.validate_jobs(
        context,
        loader,
        config,
        job_overrides,
        first_number,
        proposed_folder,
        check_machine=check_machine,
    )
    folder = claimed_sweep_folder(config)
    jobs = [_relocated(job, proposed_folder, folder) for job in jobs]
    launcher_options = options()
    try:
        question = SweepQuestion(jobs[0].run.question, context.hypothesis, context.answer)
        outcomes = context.command.run_sweep(jobs, folder, question, launcher_options)
    except Exception as error:  # Hydra wraps it otherwise
        context.exceptions.append(error)
        raise
    context.exit_codes.extend(outcome.exit_code for outcome in outcomes)
    return [_job_return(outcome) for outcome in outcomes]


def current_sweep_folder(config: DictConfig) -> Path:
    """Choose the folder of the current multirun and store it in the context."""
    setup_globals()
    sweep = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    if _contexts[-1].sweep_folder is None and isinstance(sweep, dict):
        _contexts[-1].folder_is_user_named = "${now:" not in str(sweep["dir"])
    return _set_sweep_folder(
        config, _contexts[-1].command.choose_sweep_folder(Path(config.hydra.sweep.dir).absolute())
    )


def claimed_sweep_folder(config: DictConfig) -> Path:
    """Claim the folder of the current multirun; a folder in use is replaced by a new one."""
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
    if context.sweep_folder not in (None, folder):  # another folder than the configured one
        context.new_folders.insert(0, folder)
    context.sweep_folder = folder
    return folder


def _relocated(job: SweepJob, proposed_folder: Path, folder: Path) -> SweepJob:
    if folder == proposed_folder or not job.folder.is_relative_to(proposed_folder):
        return job
    return replace(job, folder=folder / job.folder.relative_to(proposed_folder))


def has_measurements() -> bool:
    """Return whether the jobs of the current command write measurements for a search."""
    return _contexts[-1].command.produces_measurements


def mark_search() -> None:
    """Mark the current command as run by a search, which submits jobs in batches."""
    _contexts[-1].command.is_search = True


def set_varied_keys(keys: Sequence[str]) -> None:
    """Record the keys that the current multirun varies between batches."""
    _contexts[-1].varied_keys = tuple(keys)


def record_rejected(error: ConfigError) -> None:
    """Record the exit code of a job that the search rejected."""
    _contexts[-1].exit_codes.append(error.exit_code)


def rejection_reason(
    loader: ConfigLoader, config: DictConfig, overrides: Sequence[str]
) -> ConfigError | None:
    """Return the config error of a job with these overrides; None if it is valid."""
    try:
        sweep_jobs.validate_jobs(
            _contexts[-1],
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


def set_file_overrides(overrides: Sequence[str]) -> None:
    """Store the axes of a sweep file for error messages; called by the Hydra sweeper."""
    _contexts[-1].file_overrides = overrides


def set_cases(cases: Sequence[SweepCase], hypothesis: str, answer: str) -> None:
    """Store the cases of the multirun, one per job; called by the Hydra sweeper.

    Args:
        cases: Cases.
        hypothesis: Expected answer to the question of the sweep.
        answer: Template of the answer.
    """
    _contexts[-1].cases = cases
    _contexts[-1].hypothesis, _contexts[-1].answer = hypothesis, answer


def _job_return(outcome: JobOutcome) -> JobReturn:
    result = JobReturn()
    result.status = JobStatus.COMPLETED
    result.return_value = outcome.objective
    return result


def _exit_code(exit_codes: Sequence[int]) -> int:
    """Exit code of several jobs: 0, the code of all unsuccessful jobs, or 1 if they differ."""
    error_codes = set(exit_codes) - {0}
    return error_codes.pop() if len(error_codes) == 1 else int(bool(error_codes))
