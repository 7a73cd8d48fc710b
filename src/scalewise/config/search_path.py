"""What lies outside of conf/, experiments and sweeps and a folder of the user's, for Hydra."""

from pathlib import Path

from scalewise.config import paths

MOUNTED_FILES: dict[str, Path] = {}
"""Files by the path under which Hydra asks for them: ``experiment/a/b.yaml``."""

USER_FOLDERS: list[Path] = []
"""The folder of ``-cd``, if one was given."""


def mount_configs(user_folder: Path | None = None) -> None:
    """Mounts the files of the tree and, over them, those of ``user_folder``, a folder of the
    user's.

    There they lie in ``experiments/``, as in the tree, or in ``experiment/``, as its groups do.
    """
    MOUNTED_FILES.clear()
    USER_FOLDERS[:] = [user_folder] if user_folder else []
    for base in (paths.project_root(), *USER_FOLDERS):
        for group in ("experiment", "sweep"):
            for folder in (base / f"{group}s", base / group):
                for file in folder.rglob("*.yaml"):
                    MOUNTED_FILES[f"{group}/{file.relative_to(folder).as_posix()}"] = file
