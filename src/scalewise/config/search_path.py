"""Config files outside of conf/ that Hydra finds: experiments, sweeps and a user folder."""

from pathlib import Path

from scalewise.config import paths

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
    for base in (paths.project_root(), *USER_FOLDERS):
        for group in ("experiment", "sweep"):
            for folder in (base / f"{group}s", base / group):
                for file in folder.rglob("*.yaml"):
                    MOUNTED_FILES[f"{group}/{file.relative_to(folder).as_posix()}"] = file
