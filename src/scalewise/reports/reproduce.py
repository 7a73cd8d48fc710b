"""Last section of a report: commands, changed settings, environment, versions and W&B links."""

from pathlib import Path

from scalewise.reports import number_format
from scalewise.reports.compare import ReportComparison
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.reports.summary_tables import common_value
from scalewise.typed_override import shell_word
from scalewise.units import GIB


def reproduce_commands(
    comparison: ReportComparison, record: RunRecord | SweepRecord
) -> list[tuple[str, str]]:
    """Description and command line of each command."""
    commands = [
        ("This run" if isinstance(record, RunRecord) else "The whole sweep", record.command)
    ]
    best = comparison.rank_jobs(*comparison.headline_metric)
    if isinstance(record, SweepRecord) and best:
        commands.append((f"Only {best[0].name}", best[0].run.command))
    if isinstance(record, SweepRecord) and "failed" in (job.status for job in record.jobs):
        resume = f"{shell_word(f'resume_sweep={_sweep_folder(record)}')} retry=failed"
        commands.append(("Retry failed jobs", record.command and f"{record.command} {resume}"))
    if folder := _unsynced_folder(comparison, record):
        commands.append(("Upload to W&B", f"scalewise publish {shell_word(folder)}"))
    return [(description, command) for description, command in commands if command]


def _sweep_folder(record: SweepRecord) -> str:
    """Sweep folder relative to the launch folder; ``DIR`` if ``hydra.sweep.dir`` is set."""
    is_custom = "hydra.sweep.dir=" in record.command
    return "DIR" if is_custom else f"runs/{record.name}/{record.folder}"


def _unsynced_folder(comparison: ReportComparison, record: RunRecord | SweepRecord) -> str:
    """Folder with offline W&B runs, relative to the launch folder; empty if there is none.

    A W&B run is stored in ``wandb/`` of the run folder, unless ``WANDB_DIR`` is set.
    """
    levels = 1 if isinstance(record, RunRecord) else 2
    for job in comparison.jobs:
        parents = Path(str(job.run.wandb.get("folder") or "")).parents
        offline = job.run.wandb.get("mode") == "offline"
        if offline and len(parents) > levels and parents[levels].name == record.folder:
            return str(parents[levels])
    return ""


def setting_changes(comparison: ReportComparison) -> list[tuple[str, str, str]]:
    """Key, default and value of each setting that differs from its default."""
    runs = [job.run for job in comparison.jobs]
    defaults = {
        c.key: number_format.format_value(c.default) for run in runs for c in run.changed_settings
    }
    changes = []
    for key, default in defaults.items():
        values = common_value(
            number_format.format_value(c.value)
            for run in runs
            for c in run.changed_settings
            if c.key == key
        )
        if key in comparison.varying:
            values = f"{len(comparison.varying[key])} values"
        changes.append((key, default, values))
    missing = [key for key in comparison.varying if key not in defaults]
    return [*((key, "", f"{len(comparison.varying[key])} values") for key in missing), *changes]


def environment_facts(comparison: ReportComparison) -> list[tuple[str, str]]:
    """Name and value of each property of the machine."""
    runs = [job.run for job in comparison.jobs if job.run.machine]
    facts = []
    for key in ("device", "processor", "cores", "memory_bytes", "system"):
        values = [run.machine[key] for run in runs if run.machine.get(key) is not None]
        if key == "memory_bytes":
            values = [f"{v / GIB:.2f} GiB" for v in values]
        facts.append((key.removesuffix("_bytes"), common_value(str(item) for item in values)))
    sizes = [str(run.world_size) for run in runs]
    facts.append(("ranks", ", ".join(sorted(set(sizes), key=int))))
    return [(key, text) for key, text in facts if text]


def software_versions(comparison: ReportComparison) -> list[tuple[str, str]]:
    """Package versions and the commit."""
    runs = [job.run for job in comparison.jobs]
    names = dict.fromkeys(name for run in runs for name in run.versions)
    versions = [(n, common_value(r.versions[n] for r in runs if n in r.versions)) for n in names]
    commit = common_value(run.git_commit[:12] for run in runs if run.git_commit)
    return [*versions, *([("commit", commit)] if commit else [])]


def wandb_links(comparison: ReportComparison) -> list[tuple[str, str]]:
    """Job name and URL of each W&B run."""
    pairs = [(job.name, web_address(job.run.wandb.get("url"))) for job in comparison.jobs]
    return [(name, url) for name, url in pairs if url]


def web_address(address: object) -> str:
    """``address`` if it is an http(s) URL; else empty."""
    url = str(address or "")
    return url if url.startswith(("https://", "http://")) else ""
