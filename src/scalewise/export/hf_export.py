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


def write_export(
    trained_run: TrainedRun, target_folder: Path, adapter_export: AdapterExport
) -> list[str]:
    """Writes the folder ``target_folder``: weights, configuration, tokenizer, card; returns what to
    tell.

    That is what integers save and cost, and what the folder lacks. The folder appears whole or not
    at all.

    Raises ``ConfigError`` where the format has no place for it.
    """
    averaged = [
        "weights are the moving average of those that were trained"
    ] * trained_run.is_averaged
    said: list[str] = []
    with staging_folder(target_folder) as partial:
        if adapter_export is AdapterExport.alone:
            _write_adapter(
                trained_run, trained_run.read_state_dict(), partial, target_folder / "base"
            )
        elif not trained_run.adapter.merges:
            raise ConfigError.for_key(
                "adapter", adapter_export, BEFORE_THE_TEXT, "set adapter=alone"
            )
        elif trained_run.fake_quantized_weights:
            said = _write_quantized(trained_run, partial)
        else:
            trained_run.model.export(trained_run.read_merged_state_dict(), partial)
            if trained_run.packed_weights:
                said = [UNPACKED]
        said = [*averaged, *said]
        _name_classes(trained_run, partial)
        lacks = tokenizer_files.write_tokenizer_files(trained_run, partial)
        status, summary = (
            read_json(trained_run.folder / f"{name}.json") for name in ("status", "summary")
        )
        library = "peft" if adapter_export is AdapterExport.alone else "transformers"
        write_text(
            partial / "README.md", model_card(status, summary, trained_run.step, library, said)
        )
    return [*said, *lacks]


def _name_classes(trained_run: TrainedRun, target_folder: Path) -> None:
    """Calls the classes by their names in each configuration that numbers them."""
    names = {str(number): name for number, name in enumerate(trained_run.data.classes)}
    for file in (target_folder / "config.json", target_folder / "base" / "config.json"):
        if names and "id2label" in (config := read_json(file)):
            ids = {name: int(number) for number, name in names.items()}
            write_json(file, config | {"id2label": names, "label2id": ids})


def _write_quantized(trained_run: TrainedRun, target_folder: Path) -> list[str]:
    """Writes integers, and what they save and cost to ``conversion.json`` too; returns that."""
    from scalewise.export import compressed_tensors

    compressed_tensors.write_compressed(trained_run, target_folder)
    try:
        rows, why = trained_run.load_splits().validation, "the run's data have no held-out rows"
    except (DataError, OSError) as error:
        rows, why = None, str(error)
    found = compressed_tensors.measure_compressed(trained_run, target_folder, rows)
    write_json(target_folder / CONVERSION, found)
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


def _write_adapter(
    trained_run: TrainedRun, state: dict[str, Tensor], target_folder: Path, base_model_path: Path
) -> None:
    """Writes an adapter; ``base_model_path`` is where a model that nobody else has will lie."""
    model, adapter = trained_run.model, trained_run.adapter
    if isinstance(adapter, NoAdapterConfig):
        reason = "the run has trained no adapter"
        raise ConfigError.for_key("adapter", AdapterExport.alone, reason, "set adapter=merged")
    from scalewise.adapters import peft_export

    if isinstance(adapter, PiSSAAdapterConfig):
        adapter, state = adapter.to_lora(state, model.build(trained_run.seed).state_dict())
    if isinstance(model, HuggingFaceConfig):
        _write_hf(state, adapter, model, target_folder, base_model_path)
        return
    assert isinstance(model, DecoderConfig)
    peft_export.export_adapter(
        state, adapter, model, target_folder, model.weights or str(base_model_path)
    )
    if model.weights is None:  # drawn from a seed: nobody else has it
        own = {name: tensor for name, tensor in state.items() if not is_adapter_weight(name)}
        if whole := adapter.fully_trained_modules(model):
            begun = model.build(trained_run.seed).state_dict()
            own |= {name: begun[name] for name in own if module_name(name) in whole}
        state_dict_adapter.export_folder(own, model, target_folder / "base")


def _write_hf(
    state: dict[str, Tensor],
    adapter: AdapterConfig,
    model: HuggingFaceConfig,
    target_folder: Path,
    base_model_path: Path,
) -> None:
    from scalewise.adapters import peft_export_hf

    fresh = model.init is InitKind.random
    path = str(base_model_path) if fresh else model.path
    peft_export_hf.export_hf_adapter(state, adapter, model, target_folder, path)
    if fresh:  # drawn from a seed: nobody else has it
        own = {name: tensor for name, tensor in state.items() if not is_adapter_weight(name)}
        model.export(own, target_folder / "base")
