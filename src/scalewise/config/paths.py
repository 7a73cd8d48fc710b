"""Paths of conf/, experiments/ and sweeps/, and the files outside of conf/ that Hydra finds."""

from functools import cache
from pathlib import Path

from scalewise.errors import ConfigError

GROUPS = (
    "model",
    "data",
    "parallelism",
    "precision",
    "optimizer",
    "schedule",
    "objective",
    "adapter",
    "quantization",
    "memory",
    "compile",
    "trainer",
    "checkpoint",
    "tracking",
    "launch",
    "hardware",
    "plan",
    "verify",
    "callbacks",
)
"""Config groups in the order of the defaults list; a stable interface."""

CLOSED_GROUPS = tuple(group for group in GROUPS if group != "callbacks")
"""Groups whose options must be registered classes."""

PRESETS = ("experiment", "sweep")
"""Groups whose options set keys of other groups."""


@cache
def project_root() -> Path:
    """Folder of ``conf``, ``experiments`` and ``sweeps``."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "_tree", package.parents[1])
    for candidate in candidates:
        if (candidate / "conf" / "config.yaml").is_file():
            return candidate
    searched = " or ".join(str(candidate) for candidate in candidates)
    raise ConfigError.for_key("", "", f"no conf/config.yaml in {searched}", "reinstall scalewise")


def option_names(group: str, schema: str = "") -> list[str]:
    """Options of a group, of ``experiment`` or of ``sweep``, in alphabetical order.

    Args:
        group: Config group, ``experiment`` or ``sweep``.
        schema: Registered class name; only options that extend it are listed.
    """
    folder = option_folder(group)
    files = sorted(folder.rglob("*.yaml"))
    if schema:
        files = [f for f in files if f"/schema/{group}/{schema}@" in f.read_text("utf-8")]
    return [file.relative_to(folder).with_suffix("").as_posix() for file in files]


def option_folder(group: str) -> Path:
    """Folder with the YAML files of a group, of ``experiment`` or of ``sweep``."""
    folders = {"experiment": "experiments", "sweep": "sweeps"}
    return project_root() / folders.get(group, f"conf/{group}")


MOUNTED_FILES: dict[str, Path] = {}
"""Files by their path in Hydra's search path: ``experiment/a/b.yaml``."""

USER_FOLDERS: list[Path] = []
"""Folder of ``-cd``; empty without the flag."""


def mount_configs(user_folder: Path | None = None) -> None:
    """Register the experiments and sweeps of scalewise and of ``user_folder``.

    Files of ``user_folder`` override those of scalewise. They are in ``experiments/`` or
    ``experiment/``, and in ``sweeps/`` or ``sweep/``.
    """
    MOUNTED_FILES.clear()
    USER_FOLDERS[:] = [user_folder] if user_folder else []
    for base in (project_root(), *USER_FOLDERS):
        for group in PRESETS:
            for folder in (base / f"{group}s", base / group):
                for file in folder.rglob("*.yaml"):
                    MOUNTED_FILES[f"{group}/{file.relative_to(folder).as_posix()}"] = file
