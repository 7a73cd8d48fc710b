"""An adapter of a model of transformers alone, as PEFT keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from peft import IA3Config, PeftConfig
from torch import Tensor

from scalewise.adapters import exported, layers
from scalewise.adapters.low_rank import Lora
from scalewise.adapters.scales import IA3
from scalewise.adapters.spec import Adapter
from scalewise.errors import ConfigError
from scalewise.models.base import Part
from scalewise.models.hf.spec import HuggingFace


def export(
    state: Mapping[str, Tensor], spec: Adapter, model: HuggingFace, folder: Path, base: str
) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``state`` holds whole tensors; ``base`` is where the model lies that the adapter belongs to.
    Raises ``ConfigError`` for modules that are trained whole.
    """
    if spec.trained:
        reason = "are kept beside an adapter of the suite's own decoder alone"
        raise ConfigError.one("adapter.trained", list(spec.trained), reason, "set adapter=merged")
    module = model.shape(Part(range(model.layers)))
    added = {module.theirs(name): each for name, each in state.items() if layers.is_added(name)}
    adapted = {name.split(".lora_")[0].split(".ia3_l")[0] for name in added}
    transposed = bool(module.transposed)
    config: PeftConfig
    if isinstance(spec, Lora):
        config = exported.low_rank_config(spec, adapted, fan_in_fan_out=transposed)
    else:
        assert isinstance(spec, IA3)
        inputs = [name for name, each in added.items() if len(each) == 1]
        config = IA3Config(
            target_modules=sorted(adapted),
            feedforward_modules=sorted(name.split(".ia3_l")[0] for name in inputs),
            fan_in_fan_out=transposed,
        )
    tensors = {f"{exported.STEM}{_peft(name)}": each for name, each in added.items()}
    task = "SEQ_2_SEQ_LM" if model.encodes else "CAUSAL_LM"
    # PEFT has no task of pictures.
    exported.save(config, tensors, folder, base, None if model.image_size else task)


def _peft(name: str) -> str:
    """Returns PEFT's name of an added tensor on the disk: magnitudes and scales are no layers."""
    name = name.replace(".default", "")
    return name.removesuffix(".weight") if "magnitude" in name else name
