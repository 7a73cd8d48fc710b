"""What a report ends with: what to paste, what was set, where it ran, where W&B has it."""

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
    """Returns what to paste, each under a line that says what it does."""
    found = [("This run" if isinstance(record, RunRecord) else "The whole sweep", record.command)]
    winners = comparison.rank_jobs(*comparison.headline_metric)
    if isinstance(record, SweepRecord) and winners:
        found.append((f"{winners[0].name} alone", winners[0].run.command))
    if isinstance(record, SweepRecord) and "failed" in (job.status for job in record.jobs):
        resumed = f"{shell_word(f'resume_sweep={_sweep_folder(record)}')} retry=failed"
        found.append(("The failed again", record.command and f"{record.command} {resumed}"))
    if place := _unsynced_folder(comparison, record):
        found.append(("Send it to W&B", f"scalewise publish {shell_word(place)}"))
    return [(why, command) for why, command in found if command]


def _sweep_folder(record: SweepRecord) -> str:
    """Returns where a sweep lies for whom began it; ``DIR`` where that was chosen otherwise."""
    chosen = "hydra.sweep.dir=" in record.command
    return "DIR" if chosen else f"runs/{record.name}/{record.folder}"


def _unsynced_folder(comparison: ReportComparison, record: RunRecord | SweepRecord) -> str:
    """Returns the folder as it was seen from where offline runs were begun; empty if there is none.

    A W&B run lies in ``wandb/`` of its own folder, unless the environment had it elsewhere.
    """
    up = 1 if isinstance(record, RunRecord) else 2
    for job in comparison.jobs:
        parents = Path(str(job.run.wandb.get("folder") or "")).parents
        offline = job.run.wandb.get("mode") == "offline"
        if offline and len(parents) > up and parents[up].name == record.folder:
            return str(parents[up])
    return ""


def setting_changes(comparison: ReportComparison) -> list[tuple[str, str, str]]:
    """Returns key, default and value of each setting that differs from the defaults."""
    runs = [job.run for job in comparison.jobs]
    defaults = {
        c.key: number_format.format_value(c.default) for run in runs for c in run.changed_settings
    }
    found = []
    for key, default in defaults.items():
        values = common_value(
            number_format.format_value(c.value)
            for run in runs
            for c in run.changed_settings
            if c.key == key
        )
        if key in comparison.varying:
            values = f"{len(comparison.varying[key])} values"
        found.append((key, default, values))
    missing = [key for key in comparison.varying if key not in defaults]
    return [*((key, "", f"{len(comparison.varying[key])} values") for key in missing), *found]


def environment_facts(comparison: ReportComparison) -> list[tuple[str, str]]:
    """Returns where it ran."""
    runs = [job.run for job in comparison.jobs if job.run.machine]
    found = []
    for key in ("device", "processor", "cores", "memory_bytes", "system"):
        values = [run.machine[key] for run in runs if run.machine.get(key) is not None]
        if key == "memory_bytes":
            values = [f"{v / GIB:.2f} GiB" for v in values]
        found.append((key.removesuffix("_bytes"), common_value(str(item) for item in values)))
    sizes = [str(run.world_size) for run in runs]
    found.append(("ranks", ", ".join(sorted(set(sizes), key=int))))
    return [(key, text) for key, text in found if text]


def software_versions(comparison: ReportComparison) -> list[tuple[str, str]]:
    """Returns the software it ran with, and where W&B has it."""
    runs = [job.run for job in comparison.jobs]
    names = dict.fromkeys(name for run in runs for name in run.versions)
    found = [(n, common_value(r.versions[n] for r in runs if n in r.versions)) for n in names]
    commit = common_value(run.git_commit[:12] for run in runs if run.git_commit)
    return [*found, *([("commit", commit)] if commit else [])]


def wandb_links(comparison: ReportComparison) -> list[tuple[str, str]]:
    """Returns name and address of the runs that W&B holds; only web addresses."""
    pairs = [(job.name, web_address(job.run.wandb.get("url"))) for job in comparison.jobs]
    return [(name, url) for name, url in pairs if url]


def web_address(address: object) -> str:
    """Returns a web address as it is; of anything else nothing."""
    url = str(address or "")
    return url if url.startswith(("https://", "http://")) else ""
