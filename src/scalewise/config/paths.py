"""Paths of conf/, experiments/ and sweeps/, in the installed package or the source checkout."""

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
    "callbacks",
)
"""Config groups in the order of the defaults list; a stable interface."""

CLOSED_GROUPS = tuple(group for group in GROUPS if group != "callbacks")
"""Groups whose options must be registered classes."""


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
