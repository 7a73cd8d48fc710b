"""What lies outside of conf/, experiments and sweeps and a folder of the user's, for Hydra."""

from pathlib import Path

from scalewise.config import tree

MOUNTED: dict[str, Path] = {}
"""Files by the path under which Hydra asks for them: ``experiment/a/b.yaml``."""

OWN: list[Path] = []
"""The folder of ``-cd``, if one was given."""


def mount(own: Path | None = None) -> None:
    """Mounts the files of the tree and, over them, those of ``own``, a folder of the user's.

    There they lie in ``experiments/``, as in the tree, or in ``experiment/``, as its groups do.
    """
    MOUNTED.clear()
    OWN[:] = [own] if own else []
    for base in (tree.root(), *OWN):
        for group in ("experiment", "sweep"):
            for folder in (base / f"{group}s", base / group):
                for file in folder.rglob("*.yaml"):
                    MOUNTED[f"{group}/{file.relative_to(folder).as_posix()}"] = file
