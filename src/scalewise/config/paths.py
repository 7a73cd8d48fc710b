"""Where conf/, experiments/ and sweeps/ are: inside the installed package, else in the checkout."""

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
"""Config groups in the order of the defaults list; a part of the frozen surface."""

CLOSED_GROUPS = tuple(group for group in GROUPS if group != "callbacks")
"""Groups whose choice must be one of the registered specs."""


@cache
def project_root() -> Path:
    """Returns the folder that holds ``conf``, ``experiments`` and ``sweeps``."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "_tree", package.parents[1])
    for candidate in candidates:
        if (candidate / "conf" / "config.yaml").is_file():
            return candidate
    looked = " or ".join(str(candidate) for candidate in candidates)
    raise ConfigError.for_key("", "", f"no conf/config.yaml in {looked}", "install scalewise again")


def option_names(group: str, schema: str = "") -> list[str]:
    """Returns the options of a group, of ``experiment`` or of ``sweep``, by file name.

    ``schema``: of those alone that stand on that spec.
    """
    folder = option_folder(group)
    files = sorted(folder.rglob("*.yaml"))
    if schema:
        files = [f for f in files if f"/schema/{group}/{schema}@" in f.read_text("utf-8")]
    return [file.relative_to(folder).with_suffix("").as_posix() for file in files]


def option_folder(group: str) -> Path:
    """Returns the folder with the YAML files of a group, of ``experiment`` or of ``sweep``."""
    folders = {"experiment": "experiments", "sweep": "sweeps"}
    return project_root() / folders.get(group, f"conf/{group}")
