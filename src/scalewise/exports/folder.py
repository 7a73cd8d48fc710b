"""A run's folder to a folder that transformers, or PEFT, loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch import Tensor

from scalewise.adapters import Adapter, NoAdapter
from scalewise.adapters.layers import is_added, module_of
from scalewise.adapters.low_rank import Pissa
from scalewise.checkpoints.trained import Trained
from scalewise.data import templates
from scalewise.data.captions import Captions
from scalewise.data.chat import Chat
from scalewise.data.seq2seq import Seq2SeqData
from scalewise.errors import ConfigError, DataError
from scalewise.exports import Form
from scalewise.exports.card import card
from scalewise.models.decoder import weights
from scalewise.models.decoder.spec import Decoder
from scalewise.models.hf.spec import HuggingFace, Init
from scalewise.tracking.files import read_json, write_json, write_text
from scalewise.units import bytes_text

CONVERSION = "conversion.json"
"""What integers save and cost, beside them."""


def write(told: Trained, to: Path, form: Form) -> list[str]:
    """Writes the folder ``to``: weights, configuration, tokenizer, card; returns what to tell.

    That is what integers save and cost, and what the folder lacks.

    Raises ``ConfigError`` where the format has no place for it, before anything is written.
    """
    averaged = ["weights are the moving average of those that were trained"] * told.averaged
    said: list[str] = []
    if form is Form.alone:
        _write_alone(told, told.state(), to)
    elif not told.adapter.merges:
        reason = "what was trained stands before the text, and is no part of the model's weights"
        raise ConfigError.one("adapter", form, reason, "set adapter=alone")
    elif told.fake_quantized:
        said = _write_integers(told, to)
    else:
        told.model.export(told.merged(), to)
        if told.packed:
            said = ["matrices that were packed are as unpacked, which is what was trained beside"]
    said = [*averaged, *said]
    _name_classes(told, to)
    status, summary = (read_json(told.folder / f"{name}.json") for name in ("status", "summary"))
    library = "peft" if form is Form.alone else "transformers"
    write_text(to / "README.md", card(status, summary, told.step, library, said))
    return [*said, *_write_tokenizer(told, to)]


def _name_classes(told: Trained, to: Path) -> None:
    """Calls the classes by their names in each configuration that numbers them."""
    names = {str(number): name for number, name in enumerate(told.data.classes)}
    for file in (to / "config.json", to / "base" / "config.json"):
        if names and "id2label" in (config := read_json(file)):
            ids = {name: int(number) for number, name in names.items()}
            write_json(file, config | {"id2label": names, "label2id": ids})


def _write_integers(told: Trained, to: Path) -> list[str]:
    """Writes integers, and what they save and cost to ``conversion.json`` too; returns that."""
    from scalewise.exports import integers

    integers.write(told, to)
    try:
        rows, why = told.splits().validation, "the run's data have no held-out rows"
    except (DataError, OSError) as error:
        rows, why = None, str(error)
    found = integers.measured(told, to, rows)
    write_json(to / CONVERSION, found)
    said = [
        f"{found['layers']} matrices in 4 bits: {bytes_text(found['disk_bytes'])} on disk instead "
        f"of {bytes_text(found['disk_bytes_in_fp32'])} in fp32"
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


def _write_alone(told: Trained, state: dict[str, Tensor], to: Path) -> None:
    model, adapter = told.model, told.adapter
    if isinstance(adapter, NoAdapter):
        reason = "the run has trained no adapter"
        raise ConfigError.one("adapter", Form.alone, reason, "set adapter=merged")
    from scalewise.adapters import exported

    if isinstance(adapter, Pissa):
        adapter, state = adapter.beside(state, model.build(told.seed).state_dict())
    if isinstance(model, HuggingFace):
        _of_transformers(state, adapter, model, to)
        return
    assert isinstance(model, Decoder)
    base = model.weights or str(to / "base")
    exported.export(state, adapter, model, to, base)
    if model.weights is None:  # drawn from a seed: nobody else has it
        own = {name: tensor for name, tensor in state.items() if not is_added(name)}
        if whole := adapter.whole(model):
            begun = model.build(told.seed).state_dict()
            own |= {name: begun[name] for name in own if module_of(name) in whole}
        weights.export(own, model, to / "base")


def _of_transformers(
    state: dict[str, Tensor], adapter: Adapter, model: HuggingFace, to: Path
) -> None:
    from scalewise.adapters import exported_of_transformers

    fresh = model.init is Init.random
    base = str(to / "base") if fresh else model.path
    exported_of_transformers.export(state, adapter, model, to, base)
    if fresh:  # drawn from a seed: nobody else has it
        own = {name: tensor for name, tensor in state.items() if not is_added(name)}
        model.export(own, to / "base")


def _write_tokenizer(told: Trained, to: Path) -> list[str]:
    """Copies the tokenizer beside the weights; returns why there is none."""
    try:
        file = told.tokenizer()
    except (DataError, OSError) as error:
        return [f"no tokenizer: {error}"]
    if file is None:
        return ["no tokenizer: the data were token ids"]
    shutil.copyfile(file, to / "tokenizer.json")
    special = {
        it["content"]: it["id"] for it in json.loads(file.read_text("utf-8"))["added_tokens"]
    }
    end = getattr(told.data, "end_of_text", None)
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": told.model.context}
    facts |= {"eos_token": end} if end in special else {}
    facts |= _template(told)
    write_json(to / "tokenizer_config.json", facts)
    config = to / "config.json"
    if config.is_file() and facts.get("eos_token") in special:  # where ``generate`` stops
        write_json(config, read_json(config) | {"eos_token_id": special[facts["eos_token"]]})
    return []


def _template(told: Trained) -> dict[str, object]:
    """Returns how conversations are written, where the run has learnt from some."""
    data = told.data
    if not isinstance(data, Chat):
        return {}
    if isinstance(data, Captions | Seq2SeqData):
        return {"eos_token": data.end_of_text}
    if data.tokenizer is not None:
        source, config = templates.source_beside(Path(data.tokenizer).expanduser())
        if source:
            kept = ("bos_token", "eos_token")
            return {key: config[key] for key in kept if key in config} | {"chat_template": source}
    return {"eos_token": data.end_of_text, "chat_template": templates.PLAIN}
