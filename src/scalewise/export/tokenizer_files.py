"""Tokenizer, chat template and generation settings of an exported folder.

They are copied from the pretrained model, if there is one. Changes by the run (a tokenizer, a chat
template, the token that ends an answer) override them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import GenerationConfig
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

from scalewise import regular_files
from scalewise.checkpoints.trained_run import TOKENIZER_FILE, TrainedRun, load_tokenizer
from scalewise.data import chat_templates
from scalewise.data.chat import CaptionData, ChatData, LabeledText, Seq2SeqData
from scalewise.data.tokenizer import tokenizer_path
from scalewise.errors import ConfigError, DataError
from scalewise.models.base import ModelConfig
from scalewise.models.hf import hub
from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.run_files import copy_file, read_json, write_json

GENERATION_FILE = "generation_config.json"
TEMPLATE_FILES = (CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE)
VOCABULARY_FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
COPIED_FILES = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE, *TEMPLATE_FILES)
MODEL_KEYS = ("use_cache", "decoder_start_token_id", "transformers_version")
"""Keys of a generation config that a model's ``config.json`` has too."""
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of an exported folder."""

    by_role: dict[str, str]
    """Tokens by role, such as ``bos_token``."""
    ids: dict[str, int]
    """Ids of all tokens."""
    tokenizer_trained: bool
    """Whether the run has trained the tokenizer, so that ids of the pretrained model are void."""
    answer_end_token: str | None
    """Token that the run has trained as the end of an answer."""
    pad_token: str | None
    """Padding token of a classifier."""

    def token_id(self, role: str) -> int | None:
        """Id of the token of a role."""
        return self.ids.get(self.by_role.get(role, ""))

    def end_token_ids(self, declared_ids: int | list[int] | None) -> int | list[int] | None:
        """Ids that end generation.

        Args:
            declared_ids: Those of the pretrained model. They are kept unless the run has trained
                the tokenizer, and extended by the trained answer end token.
        """
        if self.tokenizer_trained:
            return self.token_id("eos_token")
        trained_id = self.ids.get(self.answer_end_token or "")
        if declared_ids is None:
            return self.token_id("eos_token") if trained_id is None else trained_id
        id_list = declared_ids if isinstance(declared_ids, list) else [declared_ids]
        if trained_id is None or trained_id in id_list:
            return declared_ids
        return [*id_list, trained_id]


def write_tokenizer_files(trained_run: TrainedRun, target_folder: Path) -> list[str]:
    """Write tokenizer and generation files next to the weights in ``target_folder``.

    Returns:
        Notes on a missing tokenizer.
    """
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
    """Folder of the pretrained model or its config; None: there is none."""
    if isinstance(model, HuggingFaceConfig):
        try:
            return hub.model_folder(model.path, hub.CONFIG_FILES)
        except ConfigError:
            return None
    path = regular_files.expand_home(model.pretrained_path) if model.pretrained_path else None
    return path if path is None or path.is_dir() else path.parent


def _tokenizer_folder(trained_run: TrainedRun) -> Path | None:
    """Folder of the tokenizer in the run's config; None: the run has trained its tokenizer.

    For data of token ids, it is the folder of the pretrained weights.
    """
    configured = getattr(trained_run.data, "tokenizer", "")
    if configured is None:
        return None
    if configured:
        path = regular_files.expand_home(configured)
        return path if path.is_dir() else path.parent
    model_file = trained_run.model.find_tokenizer_file()
    return model_file.parent if model_file else None


def _tokenizer_file(trained_run: TrainedRun, tokenizer_folder: Path | None) -> Path | None:
    """Path of the tokenizer.json of the run; None: the data were token ids."""
    if (run_file := trained_run.folder / TOKENIZER_FILE).is_file():
        load_tokenizer(run_file)
        return run_file
    configured = regular_files.expand_home(getattr(trained_run.data, "tokenizer", None) or "")
    if configured.is_file():
        return configured
    if tokenizer_folder is not None and (tokenizer_folder / TOKENIZER_FILE).is_file():
        return tokenizer_folder / TOKENIZER_FILE
    return trained_run.find_tokenizer() if hasattr(trained_run.data, "tokenizer") else None


def _write_tokenizer_json(
    trained_run: TrainedRun, target_folder: Path, tokenizer_folder: Path | None, file: Path
) -> SpecialTokens:
    copy_file(file, target_folder / TOKENIZER_FILE)
    if tokenizer_folder is not None:
        _copy(tokenizer_folder, target_folder)
    config: dict[str, Any] = dict(read_json(target_folder / TOKENIZER_CONFIG_FILE))
    special_map: dict[str, Any] = dict(read_json(target_folder / SPECIAL_TOKENS_MAP_FILE))
    ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    if not _is_declared(trained_run):
        config, special_map = _plain_config(config | special_map, ids), {}
        for name in (SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE):
            (target_folder / name).unlink(missing_ok=True)
    if not (target_folder / TOKENIZER_CONFIG_FILE).is_file():
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {"model_max_length": trained_run.model.context}
    data, end_token = trained_run.data, getattr(trained_run.data, "end_of_text", None)
    end_token = end_token if end_token in ids else None
    template = _template_text(target_folder, config)
    is_chat = isinstance(data, ChatData) and not isinstance(
        data, CaptionData | Seq2SeqData | LabeledText
    )
    changes: dict[str, Any] = {}
    if is_chat and not template:
        changes |= {"chat_template": chat_templates.PLAIN_TEMPLATE, "eos_token": end_token}
    if end_token and not (config | special_map).get("eos_token"):
        changes["eos_token"] = end_token
    is_classifier = bool(data.classes)
    if is_classifier and end_token and not (config | special_map).get("pad_token"):
        changes["pad_token"] = end_token
    write_json(target_folder / TOKENIZER_CONFIG_FILE, config | changes)
    if special_map:
        special_map |= {role: changes[role] for role in special_map if role in changes}
        write_json(target_folder / SPECIAL_TOKENS_MAP_FILE, special_map)
    all_roles = special_map | config | changes
    roles = {role: _token_text(token) for role, token in all_roles.items() if token}
    has_answers = isinstance(data, ChatData) and not isinstance(data, LabeledText)
    ends_answers = not (is_chat and template) or (end_token or "") in template
    return SpecialTokens(
        roles,
        ids,
        tokenizer_trained=tokenizer_folder is None,
        answer_end_token=end_token if has_answers and ends_answers else None,
        pad_token=roles.get("pad_token") if is_classifier else None,
    )


def _template_text(folder: Path, config: dict[str, Any]) -> str:
    """Return the chat templates of a folder; empty if there are none."""
    files = [*map(folder.joinpath, TEMPLATE_FILES), *folder.glob(f"{CHAT_TEMPLATE_DIR}/*.jinja")]
    texts = (regular_files.read_text(file) for file in files if file.is_file())
    return "".join([str(config.get("chat_template") or ""), *texts])


def _is_declared(trained_run: TrainedRun) -> bool:
    """Whether the other tokenizer files are consistent with the run's tokenizer.json."""
    configured = getattr(trained_run.data, "tokenizer", None)
    return not configured or tokenizer_path(configured).name == TOKENIZER_FILE


def _plain_config(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Tokenizer config of ``PreTrainedTokenizerFast`` with the tokens of a tokenizer.json."""
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
    """Copy the files of a tokenizer, except for tokenizer.json."""
    for name in (*COPIED_FILES, *VOCABULARY_FILES):
        if (source / name).is_file():
            copy_file(source / name, target_folder / name)
    for path in sorted((source / CHAT_TEMPLATE_DIR).glob("*.jinja")):
        (target_folder / CHAT_TEMPLATE_DIR).mkdir(exist_ok=True)
        copy_file(path, target_folder / CHAT_TEMPLATE_DIR / path.name)


def _token_text(token: object) -> str:
    """Text of a token, which a config stores as a string or as a mapping."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _write_special_ids(folder: Path, model: Path | None, special_tokens: SpecialTokens) -> None:
    """Write the ids of special tokens and the generation config of a model folder."""
    config: dict[str, Any] = dict(read_json(folder / "config.json"))
    pretrained = read_json(model / "config.json") if model else {}
    generation = _generation_settings(model, pretrained) if model else {}
    ids: dict[str, Any] = {
        key: pretrained[key] for key in ID_KEYS if pretrained.get(key) is not None
    }
    declared = _first_set("eos_token_id", generation, ids)
    end_ids = special_tokens.end_token_ids(_first_set("eos_token_id", generation, ids, config))
    if end_ids != declared:
        ids["eos_token_id"] = end_ids
        generation |= {"eos_token_id": end_ids} if generation else {}
    for role in ("bos_token", "pad_token") if model is None else ():
        ids.setdefault(f"{role}_id", special_tokens.token_id(role))
    if special_tokens.pad_token is not None:
        ids["pad_token_id"] = special_tokens.ids.get(special_tokens.pad_token)
    write_json(folder / "config.json", config | {k: v for k, v in ids.items() if v is not None})
    if generation:
        write_json(folder / GENERATION_FILE, generation)


def _generation_settings(model: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Generation config of a pretrained model; empty if it sets special tokens only.

    Models of before 2023 have it in their ``config.json``, from which transformers reads it.
    """
    if (model / GENERATION_FILE).exists():
        return dict(read_json(model / GENERATION_FILE))
    settings = GenerationConfig.from_model_config(dict(config)).to_diff_dict()
    settings = {key: value for key, value in settings.items() if key in config}
    return settings if settings.keys() - {*ID_KEYS, *MODEL_KEYS} else {}


def _first_set(key: str, *tables: dict[str, Any]) -> Any:
    """Return the first value of a key that is set, which may be 0; None if there is none."""
    return next((table[key] for table in tables if table.get(key) is not None), None)
