"""Tokenizer, chat template and generation settings of an exported folder.

They are those of the model that training began with, where there was one. What a run has changed
(a tokenizer, a template, the token that ends an answer) is written over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.tokenization_utils_base import (
    ADDED_TOKENS_FILE,
    SPECIAL_TOKENS_MAP_FILE,
    TOKENIZER_CONFIG_FILE,
)
from transformers.utils.hub import (
    CHAT_TEMPLATE_DIR,
    CHAT_TEMPLATE_FILE,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
)

from scalewise.checkpoints.trained import TrainedRun
from scalewise.data import chat_templates, run_tokenizer
from scalewise.data.captions import CaptionData
from scalewise.data.chat import ChatData
from scalewise.data.labeled_text import LabeledText
from scalewise.data.seq2seq import Seq2SeqData
from scalewise.data.tokenizer_files import tokenizer_path
from scalewise.errors import ConfigError, DataError
from scalewise.models.base import ModelConfig
from scalewise.models.hf import hub
from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.tracking.run_files import copy_file, read_json, write_json

GENERATION = "generation_config.json"
TEMPLATES = (CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE)
VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
COPIED = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE, *TEMPLATES)
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a folder by role (``bos_token``), their ids, and what a run has taught."""

    by_role: dict[str, str]
    ids: dict[str, int]
    tokenizer_trained: bool
    """Whether the tokenizer was trained by the run, so that earlier ids have no meaning."""
    answer_end_token: str | None
    """Token that the run taught as the end of an answer."""
    pad_token: str | None
    """Token that fills the rows of a classifier."""

    def token_id(self, role: str) -> int | None:
        """Returns the id of the token of a role."""
        return self.ids.get(self.by_role.get(role, ""))

    def end_token_ids(self, declared_ids: int | list[int] | None) -> int | list[int] | None:
        """Returns the ids that end generation, given those of the model that training began with.

        Those stay as they are unless the run has taught another, or has trained its tokenizer.
        """
        if self.tokenizer_trained:
            return self.token_id("eos_token")
        taught = self.ids.get(self.answer_end_token or "")
        if declared_ids is None:
            return self.token_id("eos_token") if taught is None else taught
        listed = declared_ids if isinstance(declared_ids, list) else [declared_ids]
        return declared_ids if taught is None or taught in listed else [*listed, taught]


def write_tokenizer_files(trained_run: TrainedRun, target_folder: Path) -> list[str]:
    """Writes the files beside weights that lie in ``target_folder``; returns why there is no
    tokenizer."""
    model = _pretrained_folder(trained_run.model)
    notes: list[str] = []
    special = SpecialTokens({}, {}, tokenizer_trained=False, answer_end_token=None, pad_token=None)
    try:
        source = _tokenizer_folder(trained_run)
        file = _tokenizer_file(trained_run, source)
    except (DataError, OSError) as error:
        notes, file = [f"no tokenizer: {error}"], None
    else:
        if file is None:
            notes = ["no tokenizer: the data were token ids"]
    if file is not None:
        special = _write_tokenizer_json(trained_run, target_folder, source, file)
    for folder in (target_folder, target_folder / "base"):
        if (folder / "config.json").is_file():
            _write_special_ids(folder, model, special)
    return notes


def _pretrained_folder(model: ModelConfig) -> Path | None:
    """Returns the folder of the model that training began with, or of its configuration."""
    if isinstance(model, HuggingFaceConfig):
        try:
            return hub.model_folder(model.path, hub.CONFIGURATION)
        except ConfigError:
            return None
    path = Path(model.pretrained_path).expanduser() if model.pretrained_path else None
    return path if path is None or path.is_dir() else path.parent


def _tokenizer_folder(trained_run: TrainedRun) -> Path | None:
    """Returns the folder of the tokenizer that the run was given; None: it trained its own.

    Data that are token ids have the one beside the weights.
    """
    given = getattr(trained_run.data, "tokenizer", "")
    if given is None:
        return None
    if given:
        path = Path(given).expanduser()
        return path if path.is_dir() else path.parent
    beside = trained_run.model.find_tokenizer_file()
    return beside.parent if beside else None


def _tokenizer_file(trained_run: TrainedRun, tokenizer_folder: Path | None) -> Path | None:
    """Returns the tokenizer.json that reads the run's ids; None where they were never text."""
    if (own := trained_run.folder / run_tokenizer.NAME).is_file():
        run_tokenizer.load_tokenizer(own)
        return own
    given = Path(getattr(trained_run.data, "tokenizer", None) or "").expanduser()
    if given.is_file():
        return given
    if tokenizer_folder is not None and (tokenizer_folder / run_tokenizer.NAME).is_file():
        return tokenizer_folder / run_tokenizer.NAME
    return trained_run.find_tokenizer() if hasattr(trained_run.data, "tokenizer") else None


def _write_tokenizer_json(
    trained_run: TrainedRun, target_folder: Path, tokenizer_folder: Path | None, file: Path
) -> SpecialTokens:
    copy_file(file, target_folder / run_tokenizer.NAME)
    if tokenizer_folder is not None:
        _copy(tokenizer_folder, target_folder)
    config: dict[str, Any] = dict(read_json(target_folder / TOKENIZER_CONFIG_FILE))
    mapped: dict[str, Any] = dict(read_json(target_folder / SPECIAL_TOKENS_MAP_FILE))
    ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    if not _is_declared(trained_run):
        config, mapped = _plain_config(config | mapped, ids), {}
        for name in (SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE):
            (target_folder / name).unlink(missing_ok=True)
    if not (target_folder / TOKENIZER_CONFIG_FILE).is_file():
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {"model_max_length": trained_run.model.context}
    data, end = trained_run.data, getattr(trained_run.data, "end_of_text", None)
    end = end if end in ids else None
    template = "chat_template" in config or any(
        (target_folder / name).is_file() for name in TEMPLATES
    )
    converses = isinstance(data, ChatData) and not isinstance(
        data, CaptionData | Seq2SeqData | LabeledText
    )
    changed: dict[str, Any] = {}
    if converses and not template:
        changed |= {"chat_template": chat_templates.PLAIN, "eos_token": end}
    if end and not (config | mapped).get("eos_token"):
        changed["eos_token"] = end
    pads = bool(data.classes)
    if pads and end and not (config | mapped).get("pad_token"):
        changed["pad_token"] = end
    write_json(target_folder / TOKENIZER_CONFIG_FILE, config | changed)
    if mapped:
        mapped |= {role: changed[role] for role in mapped if role in changed}
        write_json(target_folder / SPECIAL_TOKENS_MAP_FILE, mapped)
    roles = {
        role: _token_text(token) for role, token in (mapped | config | changed).items() if token
    }
    answers = isinstance(data, ChatData) and not isinstance(data, LabeledText)
    taught = end if answers and not (converses and template) else None
    pad = roles.get("pad_token") if pads else None
    return SpecialTokens(
        roles,
        ids,
        tokenizer_trained=tokenizer_folder is None,
        answer_end_token=taught,
        pad_token=pad,
    )


def _is_declared(trained_run: TrainedRun) -> bool:
    """Returns whether the files beside the run's tokenizer.json decided its ids too."""
    given = getattr(trained_run.data, "tokenizer", None)
    return not given or tokenizer_path(given).name == run_tokenizer.NAME


def _plain_config(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Returns a configuration of the tokens that a tokenizer.json has, of no class of its own."""
    tokens: dict[str, Any] = {
        key: _token_text(token)
        for key, token in config.items()
        if key.endswith("_token") and not key.startswith("add_") and _token_text(token) in ids
    }
    for key in ("chat_template", "model_max_length"):
        if key in config:
            tokens[key] = config[key]
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}


def _copy(source: Path, target_folder: Path) -> None:
    """Copies a tokenizer's files, but for tokenizer.json."""
    for name in (*COPIED, *VOCABULARIES):
        if (source / name).is_file():
            copy_file(source / name, target_folder / name)
    for path in sorted((source / CHAT_TEMPLATE_DIR).glob("*.jinja")):
        (target_folder / CHAT_TEMPLATE_DIR).mkdir(exist_ok=True)
        copy_file(path, target_folder / CHAT_TEMPLATE_DIR / path.name)


def _token_text(token: object) -> str:
    """Returns a token's text; configurations hold it as such, or in a table."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _write_special_ids(folder: Path, model: Path | None, special_tokens: SpecialTokens) -> None:
    """Writes the ids of special tokens, and the generation settings, of one model's folder."""
    config: dict[str, Any] = dict(read_json(folder / "config.json"))
    began = read_json(model / "config.json") if model else {}
    generation: dict[str, Any] = dict(read_json(model / GENERATION)) if model else {}
    ids: dict[str, Any] = {key: began[key] for key in IDS if began.get(key) is not None}
    declared = generation.get("eos_token_id") or ids.get("eos_token_id")
    ends = special_tokens.end_token_ids(declared or config.get("eos_token_id"))
    if ends != declared:
        ids["eos_token_id"] = ends
        generation |= {"eos_token_id": ends} if generation else {}
    for role in ("bos_token", "pad_token") if model is None else ():
        ids.setdefault(f"{role}_id", special_tokens.token_id(role))
    if special_tokens.pad_token is not None:
        ids["pad_token_id"] = special_tokens.ids.get(special_tokens.pad_token)
    write_json(folder / "config.json", config | {k: v for k, v in ids.items() if v is not None})
    if generation:
        write_json(folder / GENERATION, generation)
