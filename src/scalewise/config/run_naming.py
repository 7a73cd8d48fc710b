"""Readable names: the parts of a run and its learning rate, or the sweep's experiment."""

from math import isfinite
from pathlib import PurePath
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scalewise.config import paths


def register_resolvers() -> None:
    """Registers the resolvers that conf/config.yaml uses for names, and experiments for folders."""
    for name, function in (
        ("run_name", build_run_name),
        ("sweep_name", build_sweep_name),
        ("experiments", folder_in_experiments),
    ):
        OmegaConf.register_new_resolver(f"scalewise.{name}", function, replace=True)


def build_run_name(*, _root_: Any) -> str:
    """Returns e.g. ``llama_160m-fsdp-bf16_mixed-adamw-lr3e-4``, ``MyModule-fsdp-bf16_mixed``."""
    choices = _choices(_root_)
    if choices.get("objective") == "module":
        target = str(OmegaConf.select(_root_, "objective.target") or "module")
        return "-".join([target.rpartition(".")[2], choices.parallelism, choices.precision])
    parts = [choices.get(key) for key in ("model", "parallelism", "precision", "optimizer")]
    if parts[0] == "hf":
        parts[0] = (
            PurePath(str(_value_or_none(_root_, "model.path") or "hf")).name.lstrip(".") or "hf"
        )
    named = "-".join(str(part).replace("/", "-") for part in parts if part)
    return f"{named}-lr{rate_text(_value_or_none(_root_, 'optimizer.lr'))}"


def _choices(root: Any) -> Any:
    """Returns the options chosen; ``--cfg job`` has taken the ``hydra`` node out of the config."""
    node = root.hydra if "hydra" in root else HydraConfig.get()
    return node.runtime.choices


def folder_in_experiments(name: str) -> str:
    """Returns the path of a folder that lies among the experiments, wherever these are."""
    return str(paths.project_root() / "experiments" / name)


def _value_or_none(root: Any, key: str) -> Any:
    """Returns a value, or None where it cannot be had: the reader complains under its own key."""
    try:
        return OmegaConf.select(root, key)
    except (OmegaConfBaseException, RecursionError):
        return None


def build_sweep_name(*, _root_: Any) -> str:
    """Returns the name that all jobs share, or the experiment and the sweep, or the model."""
    own = OmegaConf.to_container(_root_, resolve=False)["name"]  # type: ignore[index,call-overload]  # a mapping
    if isinstance(own, str) and "${" not in own:
        return own
    choices = _choices(_root_)
    given = [choices.get(key) for key in ("experiment", "sweep")]
    parts = [str(part).replace("/", "-") for part in dict.fromkeys(given) if part]
    return "-".join(parts) or f"{choices.get('model')}-sweep"


def rate_text(rate: object) -> str:
    """Returns a learning rate as people write it: ``3e-4``."""
    if not isinstance(rate, float | int) or not isfinite(rate):
        return str(rate)
    digits, exponent = f"{rate:.6e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
