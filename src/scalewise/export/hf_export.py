"""A run's folder to a folder that transformers, or PEFT, loads."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from scalewise.adapters import AdapterConfig, NoAdapterConfig
from scalewise.adapters.lora_config import PiSSAAdapterConfig
from scalewise.adapters.target_modules import is_adapter_weight, module_name
from scalewise.checkpoints.trained import TrainedRun
from scalewise.errors import ConfigError, DataError
from scalewise.export import AdapterExport, tokenizer_files
from scalewise.export.model_card import model_card
from scalewise.export.staging import staging_folder
from scalewise.models.decoder import state_dict_adapter
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.hf.config import HuggingFaceConfig, InitKind
from scalewise.tracking.run_files import read_json, write_json, write_text
from scalewise.units import format_bytes

CONVERSION = "conversion.json"
"""What integers save and cost, beside them."""
BEFORE_THE_TEXT = "what was trained stands before the text, and is no part of the model's weights"
UNPACKED = "matrices that were packed are as unpacked, which is what was trained beside"


def write_export(told: TrainedRun, to: Path, form: AdapterExport) -> list[str]:
    """Writes the folder ``to``: weights, configuration, tokenizer, card; returns what to tell.

    That is what integers save and cost, and what the folder lacks. The folder appears whole or not
    at all.

    Raises ``ConfigError`` where the format has no place for it.
    """
    averaged = ["weights are the moving average of those that were trained"] * told.averaged
    said: list[str] = []
    with staging_folder(to) as partial:
        if form is AdapterExport.alone:
            _write_adapter(told, told.state(), partial, to / "base")
        elif not told.adapter.merges:
            raise ConfigError.one("adapter", form, BEFORE_THE_TEXT, "set adapter=alone")
        elif told.fake_quantized:
            said = _write_quantized(told, partial)
        else:
            told.model.export(told.merged(), partial)
            if told.packed:
                said = [UNPACKED]
        said = [*averaged, *said]
        _name_classes(told, partial)
        lacks = tokenizer_files.write_tokenizer_files(told, partial)
        status, summary = (
            read_json(told.folder / f"{name}.json") for name in ("status", "summary")
        )
        library = "peft" if form is AdapterExport.alone else "transformers"
        write_text(partial / "README.md", model_card(status, summary, told.step, library, said))
    return [*said, *lacks]


def _name_classes(told: TrainedRun, to: Path) -> None:
    """Calls the classes by their names in each configuration that numbers them."""
    names = {str(number): name for number, name in enumerate(told.data.classes)}
    for file in (to / "config.json", to / "base" / "config.json"):
        if names and "id2label" in (config := read_json(file)):
            ids = {name: int(number) for number, name in names.items()}
            write_json(file, config | {"id2label": names, "label2id": ids})


def _write_quantized(told: TrainedRun, to: Path) -> list[str]:
    """Writes integers, and what they save and cost to ``conversion.json`` too; returns that."""
    from scalewise.export import compressed_tensors

    compressed_tensors.write_compressed(told, to)
    try:
        rows, why = told.splits().validation, "the run's data have no held-out rows"
    except (DataError, OSError) as error:
        rows, why = None, str(error)
    found = compressed_tensors.measure_compressed(told, to, rows)
    write_json(to / CONVERSION, found)
    said = [
        f"{found['layers']} matrices in 4 bits: {format_bytes(found['disk_bytes'])} on disk "
        f"instead of {format_bytes(found['disk_bytes_in_fp32'])} in fp32"
    ]
    said.append("transformers loads them with: pip install 'compressed-tensors>=0.15'")
    if "loss" not in found:
        return [*said, f"no loss of the integers: {why}"]
    return [
        *said,
        f"on {found['rows']} held-out rows: loss {found['loss']:.4f}, "
        f"{found['loss'] - found['loss_as_trained']:+.4f} beside as trained and "
        f"{found['loss'] - found['loss_in_fp32']:+.4f} beside fp32; logits are "
        f"{found['logits_apart_as_trained']:.2g} and {found['logits_apart_in_fp32']:.2g} apart",
    ]


def _write_adapter(told: TrainedRun, state: dict[str, Tensor], to: Path, base: Path) -> None:
    """Writes an adapter; ``base`` is where a model that nobody else has will lie."""
    model, adapter = told.model, told.adapter
    if isinstance(adapter, NoAdapterConfig):
        reason = "the run has trained no adapter"
        raise ConfigError.one("adapter", AdapterExport.alone, reason, "set adapter=merged")
    from scalewise.adapters import peft_export

    if isinstance(adapter, PiSSAAdapterConfig):
        adapter, state = adapter.beside(state, model.build(told.seed).state_dict())
    if isinstance(model, HuggingFaceConfig):
        _write_hf(state, adapter, model, to, base)
        return
    assert isinstance(model, DecoderConfig)
    peft_export.export_adapter(state, adapter, model, to, model.weights or str(base))
    if model.weights is None:  # drawn from a seed: nobody else has it
        own = {name: tensor for name, tensor in state.items() if not is_adapter_weight(name)}
        if whole := adapter.whole(model):
            begun = model.build(told.seed).state_dict()
            own |= {name: begun[name] for name in own if module_name(name) in whole}
        state_dict_adapter.export_folder(own, model, to / "base")


def _write_hf(
    state: dict[str, Tensor], adapter: AdapterConfig, model: HuggingFaceConfig, to: Path, base: Path
) -> None:
    from scalewise.adapters import peft_export_hf

    fresh = model.init is InitKind.random
    path = str(base) if fresh else model.path
    peft_export_hf.export_hf_adapter(state, adapter, model, to, path)
    if fresh:  # drawn from a seed: nobody else has it
        own = {name: tensor for name, tensor in state.items() if not is_adapter_weight(name)}
        model.export(own, to / "base")
