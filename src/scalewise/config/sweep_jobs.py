"""Validation of the jobs of a multirun, before the first one starts."""

import os
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf, open_dict

from scalewise.config.command import CommandContext, RejectedJob, SweepJob
from scalewise.config.parse import parse_run
from scalewise.console import show_progress
from scalewise.errors import ConfigError


def validate_jobs(
    context: CommandContext,
    loader: ConfigLoader,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
    folder: Path,
    *,
    check_machine: bool,
) -> list[SweepJob]:
    """Validate the jobs of a multirun; raises ``ConfigError`` with the issues of all jobs.

    Args:
        context: Command that runs the jobs; may keep rejected ones.
        loader: Hydra's config loader.
        config: Composed config of the multirun.
        job_overrides: Overrides of each job.
        first_number: Number of the first job.
        folder: Sweep folder.
        check_machine: Whether runs are also validated against this machine.
    """
    cases = context.cases
    varied = _varied_values(job_overrides, context.varied_keys)
    if cases:
        varied = [{"name": case.name} for case in cases]
    jobs: list[SweepJob] = []
    rejected: list[RejectedJob] = []
    composition_error: Exception | None = None
    progress = show_progress(job_overrides, "checking", "jobs")
    for number, overrides in enumerate(progress, start=first_number):
        try:
            job_config = loader.load_sweep_config(config, list(overrides))
        except Exception as error:  # run_command diagnoses all overrides again
            composition_error = error
            break
        with open_dict(job_config):
            job_config.hydra.job.id = job_config.hydra.job.num = number
        try:
            # The overrides of one job must not select the sweep again.
            overrides_of_job = [
                line for line in typed_overrides(job_config.hydra) if not line.startswith("sweep=")
            ]
            run = parse_run(
                job_config,
                overrides_of_job,
                context.cli_overrides,
                check_machine=check_machine,
            )
        except ConfigError as error:
            rejected.append(RejectedJob(varied[number - first_number], error))
            continue
        subdir = str(OmegaConf.select(job_config, "hydra.sweep.subdir"))
        if not _is_inside(subdir):
            fix = "set 'hydra.sweep.subdir=${hydra.job.num}'"
            reason = "is outside of the sweep folder"
            raise ConfigError.for_key("hydra.sweep.subdir", subdir, reason, fix)
        job_folder = folder / subdir
        expectation = cases[number].expect if cases else None
        jobs.append(SweepJob(number, run, job_folder, varied[number - first_number], expectation))
    kept = context.command.rejected_jobs
    if rejected and (kept is None or not jobs or composition_error is not None):
        issues = {str(issue): issue for job in rejected for issue in job.error.issues}
        raise ConfigError(issues.values()) from composition_error
    if composition_error is not None:
        raise composition_error
    if kept is not None:
        kept.extend(rejected)
        context.exit_codes.extend(job.error.exit_code for job in rejected)
    return jobs


def _is_inside(path: str) -> bool:
    """Return whether a relative path stays inside of its start folder."""
    first = Path(os.path.normpath(path)).parts[:1]
    return not os.path.isabs(path) and first not in ((), ("..",))


def typed_overrides(hydra_config: DictConfig) -> list[str]:
    """Overrides as typed, with interpolations unresolved."""
    overrides = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return [str(line) for line in overrides]


def _varied_values(
    job_overrides: Sequence[Sequence[str]], varied_keys: Sequence[str]
) -> list[dict[str, str]]:
    job_values = [
        dict(o.split("=", 1) for o in overrides if "=" in o) for overrides in job_overrides
    ]
    keys = dict.fromkeys(key for values in job_values for key in values)
    varying = [
        key
        for key in keys
        if key in varied_keys or len({values.get(key) for values in job_values}) > 1
    ]
    return [
        {key.lstrip("+"): values[key] for key in varying if key in values} for values in job_values
    ]
