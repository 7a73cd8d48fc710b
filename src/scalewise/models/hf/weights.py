"""The weights of a model of transformers under its own names, both ways, as safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from scalewise.errors import CheckpointError, Complaint
from scalewise.models import initial
from scalewise.models.base import Part, Weight
from scalewise.models.hf import hub, image_text, skeleton
from scalewise.models.hf.configuration import KEY, configuration
from scalewise.models.hf.encoder_decoder import EncoderDecoderModule
from scalewise.models.hf.image_text import ImageTextModule
from scalewise.models.hf.module import HuggingFaceModule

if TYPE_CHECKING:
    from scalewise.models.hf.spec import HuggingFace

BUFFERS = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    "final_logits_bias",
    *(".EncDecAttention.relative_attention_bias.weight", "coder.embed_tokens.weight"),
)
"""Endings of tensors that old checkpoints carry and that are no weights, or others once more."""
HEAD = "lm_head.weight"
"""What some checkpoints hold once more that is the embedding."""
INITIAL_STD = 0.02
"""Of a configuration that names none, as in transformers."""


@torch.no_grad()
def draw(module: HuggingFaceModule, census: Iterable[Weight], seed: int) -> None:
    """Draws every matrix afresh, each from ``seed`` and its name; norms are one, biases zero."""
    roles = {weight.name: weight.role for weight in census}
    std = getattr(module.head.config, "initializer_range", None) or INITIAL_STD
    for name, parameter in module.own_parameters():
        if isinstance(parameter, nn.Parameter) and roles[name] == "bias":
            nn.init.zeros_(parameter)
        elif isinstance(parameter, nn.Parameter) and roles[name] == "norm":
            nn.init.ones_(parameter)
        else:
            initial.draw(name, parameter, seed, std)


@torch.no_grad()
def start(module: HuggingFaceModule, path: str) -> None:
    """Gives a materialized module, sharded or not, the weights at ``path``, in its dtype.

    One tensor is read at a time, and each rank keeps its own part of it. Raises
    ``CheckpointError`` for files that cannot be read, or are of another model.
    """
    stored = Stored(hub.folder(path, hub.WEIGHTS), path)
    names = stored.match(module)
    for name, parameter in module.own_parameters():
        tensor = stored.read(names[name])
        initial.put(parameter, tensor.T if module.theirs(name) in module.transposed else tensor)


class Stored:
    """The tensors of a folder, by their names without what only some checkpoints have in front."""

    def __init__(self, folder: Path, path: str) -> None:
        """``path`` is what the user calls the folder."""
        self.folder, self.path, self._open = folder, path, dict[str, Any]()
        self._files = dict(self._listed())

    def _listed(self) -> Iterator[tuple[str, str]]:
        index = self.folder / hub.INDEX
        if index.is_file():
            try:
                held = json.loads(index.read_text("utf-8"))["weight_map"]
                yield from {str(name): str(file) for name, file in held.items()}.items()
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                reason = f"{index.name} is no index of shards ({error!r})"
                raise CheckpointError.one(KEY, self.path, reason, "fetch it again") from error
            return
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            reason, cure = "has no weights as safetensors", "save_pretrained writes them"
            raise CheckpointError.one(KEY, self.path, reason, f"{cure}; or set model.init=random")
        for file in files:
            yield from ((name, file.name) for name in self._file(file.name).keys())  # noqa: SIM118  # it is no mapping

    def _file(self, name: str) -> Any:
        """Returns an open file, of which nothing is read before it is asked for."""
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                reason = f"{name} cannot be read as safetensors ({error})"
                cure = "fetch or write it again"
                raise CheckpointError.one(KEY, self.path, reason, cure) from error
        return self._open[name]

    @property
    def names(self) -> frozenset[str]:
        """Returns the tensors' names."""
        return frozenset(self._files)

    def match(self, module: HuggingFaceModule) -> dict[str, str]:
        """Returns the stored name of each weight of a module, or of a part of one, by its own.

        Raises ``CheckpointError`` for what is missing, left over or of another shape.
        """
        prefix = f"{module.head.base_model_prefix}."
        known = {name.removeprefix(prefix): name for name in self._files}
        found, missing, misshapen = {}, [], []
        for name, parameter in module.own_parameters():
            theirs = module.theirs(name)
            stored = known.pop(theirs.removeprefix(prefix), None)
            if stored is None:
                missing.append(theirs)
                continue
            found[name] = stored
            want = [*parameter.shape][:: -1 if theirs in module.transposed else 1]
            have = self._file(self._files[stored]).get_slice(stored).get_shape()
            if have != want:
                misshapen.append(f"{stored} {have} where the model has {want}")
        whole = len(module.blocks) == module.depth
        twice = () if isinstance(module, EncoderDecoderModule) else (HEAD,)
        rest = [name for name in known.values() if not name.endswith((*BUFFERS, *twice))]
        lines = {"lacks": missing, "holds": misshapen}
        lines |= {"holds what the model lacks:": rest if whole else []}
        if complaints := [
            Complaint(
                KEY,
                self.path,
                f"{said} {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else ""),
                "give the folder of the model that config.json is of",
            )
            for said, names in lines.items()
            if names
        ]:
            raise CheckpointError(complaints)
        return found

    def read(self, name: str) -> Tensor:
        """Returns one tensor."""
        tensor: Tensor = self._file(self._files[name]).get_tensor(name)
        return tensor


def export(state: Mapping[str, Tensor], spec: HuggingFace, folder: Path) -> None:
    """Writes a folder that ``transformers.AutoModelForCausalLM``, or that of its kind, loads.

    ``state`` holds whole tensors and gives the dtype.
    """
    module = skeleton.module(spec.path, spec.depth, Part(range(spec.layers)))
    tensors = {}
    for name, _ in module.own_parameters():
        theirs, tensor = module.theirs(name), state[name].detach()
        tensors[theirs] = (tensor.T if theirs in module.transposed else tensor).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / hub.SINGLE, metadata={"format": "pt"})
    config = configuration(spec.path, spec.depth)
    config.architectures = [type(module.head).__name__]
    config.dtype = next(iter(tensors.values())).dtype
    config.save_pretrained(folder)
    if isinstance(module, ImageTextModule):
        processor = json.dumps(image_text.processor(spec.image_size), indent=2)
        (folder / "preprocessor_config.json").write_text(processor, "utf-8")
