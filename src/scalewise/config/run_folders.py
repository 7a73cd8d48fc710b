"""Default names of runs and sweeps, and the folders that Hydra creates for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path, PurePath
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scalewise.compat.hydra import replaced_path_class
from scalewise.config import paths
from scalewise.errors import ConfigError


def register_resolvers() -> None:
    """Register the OmegaConf resolvers of conf/config.yaml for names and folders."""
    for name, function in (
        ("run_name", build_run_name),
        ("sweep_name", build_sweep_name),
        ("experiments", folder_in_experiments),
    ):
        OmegaConf.register_new_resolver(f"scalewise.{name}", function, replace=True)


def build_run_name(*, _root_: Any) -> str:
    """Run name, e.g. ``llama_160m-fsdp-bf16_mixed-adamw-lr3e-4``, ``MyModule-fsdp-bf16_mixed``."""
    choices = _choices(_root_)
    if choices.get("objective") == "module":
        target = str(OmegaConf.select(_root_, "objective.target") or "module")
        return "-".join([target.rpartition(".")[2], choices.parallelism, choices.precision])
    parts = [choices.get(key) for key in ("model", "parallelism", "precision", "optimizer")]
    if parts[0] == "hf":
        parts[0] = (
            PurePath(str(_value_or_none(_root_, "model.path") or "hf")).name.lstrip(".") or "hf"
        )
    joined = "-".join(str(part).replace("/", "-") for part in parts if part)
    return f"{joined}-lr{rate_text(_value_or_none(_root_, 'optimizer.lr'))}"


def _choices(root: Any) -> Any:
    """Chosen options; ``--cfg job`` removes the ``hydra`` node from the config."""
    node = root.hydra if "hydra" in root else HydraConfig.get()
    return node.runtime.choices


def folder_in_experiments(name: str) -> str:
    """Path of a folder in experiments/."""
    return str(paths.project_root() / "experiments" / name)


def _value_or_none(root: Any, key: str) -> Any:
    """Value of a key, or None if it cannot be resolved; the parser reports the issue."""
    try:
        return OmegaConf.select(root, key)
    except (OmegaConfBaseException, RecursionError):
        return None


def build_sweep_name(*, _root_: Any) -> str:
    """Sweep name: the common run name, the experiment and the sweep, or the model."""
    name = OmegaConf.to_container(_root_, resolve=False)["name"]  # type: ignore[index,call-overload]  # a mapping
    if isinstance(name, str) and "${" not in name:
        return name
    choices = _choices(_root_)
    presets = [choices.get(key) for key in ("experiment", "sweep")]
    parts = [str(part).replace("/", "-") for part in dict.fromkeys(presets) if part]
    return "-".join(parts) or f"{choices.get('model')}-sweep"


def rate_text(rate: object) -> str:
    """Format a learning rate: ``3e-4``."""
    if not isinstance(rate, float | int) or not isfinite(rate):
        return str(rate)
    digits, exponent = f"{rate:.6e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def missing_folders(folder: Path) -> list[Path]:
    """List the folder and its parents that do not exist, innermost first.

    ``new/../existing`` counts as existing, although ``mkdir`` creates ``new``.
    """
    path = folder.absolute()
    paths = (p for p in (path, *path.parents) if p.name != "..")
    return [p for p in paths if not os.path.exists(os.path.realpath(p))]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that exist and are empty, in this order."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def record_hydra_folders(new_folders: list[Path]) -> Iterator[None]:
    """Add the folders that Hydra creates within the block to ``new_folders``, innermost first.

    A folder that cannot be created raises ``ConfigError``.
    """
    path_class: Any = type(Path())

    class RecordingPath(path_class):  # type: ignore[misc]  # the path class of this platform
        """Path that records the folders it creates."""

        def mkdir(self, *args: Any, **kwargs: Any) -> None:
            missing = missing_folders(Path(self))
            try:
                super().mkdir(*args, **kwargs)
            except OSError as error:
                reason = f"cannot be created: {error.strerror}"
                fix = "set hydra.run.dir=DIR to a writable folder"
                raise ConfigError.for_key("hydra.run.dir", str(self), reason, fix) from None
            finally:
                new_folders.extend(missing)

    with replaced_path_class(RecordingPath):
        yield
