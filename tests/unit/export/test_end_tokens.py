"""Tokens that end the generation of an exported model."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from scalewise.export.tokenizer_files import SpecialTokens, _template_text, _write_special_ids
from scalewise.run_files import read_json, write_json

IDS = {"<|eos|>": 0, "<|end|>": 1}


def special_tokens(answer_end_token: str | None) -> SpecialTokens:
    return SpecialTokens(
        {"eos_token": "<|eos|>"},
        IDS,
        tokenizer_trained=False,
        answer_end_token=answer_end_token,
        pad_token=None,
    )


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": 0}, [0, 1]),
        ({"eos_token_id": 0}, {"do_sample": True}, [0, 1]),
        ({"eos_token_id": [0, 2]}, {}, [0, 2, 1]),
        ({}, {"eos_token_id": [0, 1]}, [0, 1]),
        ({}, {}, 1),
    ],
)
def test_trained_end_token_extends_those_of_the_model(
    config: dict[str, Any], generation: dict[str, Any], expected: object, tmp_path: Any
) -> None:
    """Pythia's end token has the id 0."""
    model, target = tmp_path / "model", tmp_path / "target"
    for folder in (model, target):
        folder.mkdir()
    write_json(model / "config.json", config)
    write_json(target / "config.json", {"model_type": "gpt_neox"})
    if generation:
        write_json(model / "generation_config.json", generation)
    _write_special_ids(target, model, special_tokens("<|end|>"))
    written = read_json(target / "generation_config.json") or read_json(target / "config.json")
    assert written["eos_token_id"] == expected


def test_template_is_read_from_every_file(tmp_path: Any) -> None:
    assert _template_text(tmp_path, {}) == ""
    (tmp_path / "chat_template.jinja").write_text("a<|end|>")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("b")
    assert _template_text(tmp_path, {"chat_template": "c"}) == "ca<|end|>b"


SETTINGS = {"num_beams": 4, "no_repeat_ngram_size": 3, "forced_eos_token_id": 2, "max_length": 142}


@pytest.mark.parametrize("settings", [SETTINGS, {}])
def test_generation_settings_in_the_config_of_a_model_are_kept(
    settings: dict[str, Any], tmp_path: Any
) -> None:
    """As in BART and Marian; transformers writes no such keys to config.json."""
    model, target = tmp_path / "model", tmp_path / "target"
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}
    architecture = {"model_type": "bart", "use_cache": True, "d_model": 8}
    for folder, extra in ((model, settings), (target, {})):
        folder.mkdir()
        write_json(folder / "config.json", {**architecture, **ids, **extra})
    expected = GenerationConfig.from_pretrained(
        model, config_file_name="config.json", _from_model_config=True
    )
    _write_special_ids(target, model, special_tokens(None))
    if not settings:
        assert not (target / "generation_config.json").exists()
        return
    written = GenerationConfig.from_pretrained(target)
    for key in (*ids, *settings):
        assert getattr(written, key) == getattr(expected, key), key
