"""Export of a trained run to a folder that transformers or PEFT loads, with a model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from scalewise.adapters import AdapterConfig, NoAdapterConfig, lora_modules, peft_export
from scalewise.adapters.lora_config import PiSSAAdapterConfig
from scalewise.adapters.target_modules import module_name
from scalewise.checkpoints.trained_run import TrainedRun
from scalewise.errors import ConfigError, DataError
from scalewise.export import AdapterExport, compressed_tensors, staging_folder, tokenizer_files
from scalewise.metric_names import METRICS
from scalewise.models.base import is_adapter_weight
from scalewise.models.build import build_model, export_model
from scalewise.models.decoder import state_dict_adapter
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.hf.config import HuggingFaceConfig, InitKind
from scalewise.run_files import read_json, write_json, write_text
from scalewise.units import format_bytes

CONVERSION_FILE = "conversion.json"
"""File with the disk size and the loss of integer weights."""
NOT_MERGEABLE_REASON = "cannot be merged: the adapter adds prompt tokens, not weights"
DEQUANTIZED_NOTE = "quantized weights are exported dequantized, as they were used in training"
METRIC_KEYS = (
    "val/loss",
    "val/reward_accuracy",
    "val/reward",
    "val/accuracy",
    "train/loss",
    "train/tokens",
)
"""Metrics of the last step that the card shows."""


def write_export(
    trained_run: TrainedRun, target_folder: Path, adapter_export: AdapterExport
) -> list[str]:
    """Write weights, config, tokenizer and model card to ``target_folder``.

    The folder is renamed to its final name when it is complete.

    Returns:
        Notes: size and loss of integer weights, and missing files.

    Raises:
        ConfigError: the format does not support the adapter.
    """
    average_notes = ["weights are the moving average of the trained weights"]
    notes: list[str] = []
    with staging_folder(target_folder) as partial:
        if adapter_export is AdapterExport.alone:
            _write_adapter(
                trained_run, trained_run.read_state_dict(), partial, target_folder / "base"
            )
        elif not trained_run.adapter.can_merge:
            raise ConfigError.for_key(
                "adapter", adapter_export, NOT_MERGEABLE_REASON, "set adapter=alone"
            )
        elif trained_run.fake_quantized_weights:
            notes = _write_quantized(trained_run, partial)
        else:
            export_model(trained_run.model, trained_run.read_merged_state_dict(), partial)
            if trained_run.packed_weights:
                notes = [DEQUANTIZED_NOTE]
        if trained_run.is_averaged:
            notes = [*average_notes, *notes]
        _name_classes(trained_run, partial)
        tokenizer_notes = tokenizer_files.write_tokenizer_files(trained_run, partial)
        status, summary = (
            read_json(trained_run.folder / f"{name}.json") for name in ("status", "summary")
        )
        library = "peft" if adapter_export is AdapterExport.alone else "transformers"
        write_text(
            partial / "README.md", model_card(status, summary, trained_run.step, library, notes)
        )
    return [*notes, *tokenizer_notes]


def _name_classes(trained_run: TrainedRun, target_folder: Path) -> None:
    """Write the class names to each config with an ``id2label``."""
    names = {str(number): name for number, name in enumerate(trained_run.data.classes)}
    for file in (target_folder / "config.json", target_folder / "base" / "config.json"):
        if names and "id2label" in (config := read_json(file)):
            ids = {name: int(number) for number, name in names.items()}
            write_json(file, config | {"id2label": names, "label2id": ids})


def _write_quantized(trained_run: TrainedRun, target_folder: Path) -> list[str]:
    """Write integer weights and ``conversion.json``; return notes on their size and loss."""
    compressed_tensors.write_compressed(trained_run, target_folder)
    try:
        validation = trained_run.load_splits().validation
        reason = "the data of the run have no validation split"
    except (DataError, OSError) as error:
        validation, reason = None, str(error)
    record = compressed_tensors.measure_compressed(trained_run, target_folder, validation)
    write_json(target_folder / CONVERSION_FILE, record)
    notes = [
        f"{record['layers']} weights in 4 bits: {format_bytes(record['disk_bytes'])} on disk "
        f"instead of {format_bytes(record['disk_bytes_in_fp32'])} in fp32"
    ]
    notes.append("transformers loads them with: pip install 'compressed-tensors>=0.15'")
    if "loss" not in record:
        return [*notes, f"loss of the 4-bit weights is not measured: {reason}"]
    return [
        *notes,
        f"on {record['rows']} validation samples: loss {record['loss']:.4f}, "
        f"{record['loss'] - record['loss_as_trained']:+.4f} compared with fake quantization and "
        f"{record['loss'] - record['loss_in_fp32']:+.4f} compared with fp32; logits differ by "
        f"{record['logits_apart_as_trained']:.2g} and {record['logits_apart_in_fp32']:.2g}",
    ]


def _write_adapter(
    trained_run: TrainedRun, state: dict[str, Tensor], target_folder: Path, base_model_path: Path
) -> None:
    """Write a PEFT folder, and the base model if it was initialized from a seed.

    ``base_model_path``: final path of that base model.
    """
    model, adapter = trained_run.model, trained_run.adapter
    if isinstance(adapter, NoAdapterConfig):
        reason = "the run has trained no adapter"
        raise ConfigError.for_key("adapter", AdapterExport.alone, reason, "set adapter=merged")
    if isinstance(adapter, PiSSAAdapterConfig):
        base_state = build_model(model, trained_run.seed).state_dict()
        adapter, state = lora_modules.pissa_to_lora(adapter, state, base_state)
    if isinstance(model, HuggingFaceConfig):
        _write_hf(state, adapter, model, target_folder, base_model_path)
        return
    assert isinstance(model, DecoderConfig)
    peft_export.export_adapter(
        state, adapter, model, target_folder, model.weights or str(base_model_path)
    )
    if model.weights is None:  # no pretrained weights are published elsewhere
        base = {name: tensor for name, tensor in state.items() if not is_adapter_weight(name)}
        if trained_modules := adapter.fully_trained_modules(model):
            initial = build_model(model, trained_run.seed).state_dict()
            base |= {name: initial[name] for name in base if module_name(name) in trained_modules}
        state_dict_adapter.export_folder(base, model, target_folder / "base")


def _write_hf(
    state: dict[str, Tensor],
    adapter: AdapterConfig,
    model: HuggingFaceConfig,
    target_folder: Path,
    base_model_path: Path,
) -> None:
    is_random = model.init is InitKind.random
    path = str(base_model_path) if is_random else model.path
    peft_export.export_hf_adapter(state, adapter, model, target_folder, path)
    if is_random:  # no pretrained weights are published elsewhere
        base = {name: tensor for name, tensor in state.items() if not is_adapter_weight(name)}
        export_model(model, base, target_folder / "base")


def model_card(
    status: Mapping[str, Any],
    summary: Mapping[str, Any],
    step: int,
    library: str,
    weights: Sequence[str] = (),
) -> str:
    """Markdown of a ``README.md`` with the metadata header of Hugging Face.

    Args:
        status: Content of the run's ``status.json``.
        summary: Content of the run's ``summary.json``; empty for a run that was killed.
        step: Optimizer step of the exported checkpoint.
        library: Library that loads the folder.
        weights: Notes on the weights.
    """
    choices, metrics = status.get("choices", {}), summary.get("metrics", {})
    lines = [
        "---",
        f"library_name: {library}",
        "tags: [scalewise]",
        "---",
        "",
        f"# {status.get('name')}",
        "",
        _size_text(summary, step),
        "",
        "## Configuration",
        "",
        "| group | option |",
        "|---|---|",
        *(f"| {group} | {choice} |" for group, choice in choices.items()),
        "",
        "## Metrics",
        "",
        "| | at the end of the run |",
        "|---|---|",
        *(
            f"| {METRICS[key].meaning} (`{key}`) | {metrics[key]:,.6g} |"
            for key in METRIC_KEYS
            if metrics.get(key) is not None
        ),
        "",
        *(("## Weights", "", *(f"- {line}" for line in weights), "") if weights else ()),
        "## Reproduce",
        "",
        "```sh",
        str(status.get("command")),
        "```",
        "",
        f"Commit {status.get('git_commit') or 'unknown'}"
        f"{', with changes' * bool(status.get('git_dirty'))}; "
        + ", ".join(f"{name} {version}" for name, version in status.get("versions", {}).items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def _size_text(summary: Mapping[str, Any], step: int) -> str:
    """Model size and training length; a run that was killed has no summary."""
    if summary.get("parameters") is None:
        return f"After {step} steps of a run that did not finish."
    return (
        f"{summary['parameters']:,} parameters after {step} of {summary.get('steps')} steps of "
        f"{summary.get('global_batch')} x {summary.get('sequence')} tokens."
    )
