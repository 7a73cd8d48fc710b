"""Exported folders: complete or absent, readable, with the files of the base model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
)

from scalewise.checkpoints.trained_run import CONFIG_GROUPS, TrainedRun, save_tokenizer
from scalewise.data import chat_templates
from scalewise.data.prepare import DataSplits
from scalewise.export import AdapterExport, hf_export
from scalewise.run_config import RunConfig
from scalewise.run_files import copy_file, read_json, write_json

Compose = Callable[..., RunConfig]

SPECIAL_TOKENS = ["<|begin|>", "<|end_of_text|>", "<|eot|>", "<|pad|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SETTINGS = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 3}


def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello how are you fine thanks"], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Instruction-tuned model: two end tokens, padding, template and generation settings."""
    at = tmp_path_factory.mktemp("instruct") / "model"
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **SETTINGS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**SETTINGS, do_sample=True, temperature=0.6)
    model.save_pretrained(at)
    tokenizer().save(str(at / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|eot|>",
        "pad_token": "<|pad|>",
        "padding_side": "left",
        "model_max_length": 256,
        "additional_special_tokens": ["<|user|>", "<|assistant|>"],
    }
    write_json(at / "tokenizer_config.json", tokenizer_config)
    (at / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    write_json(at / "special_tokens_map.json", {"eos_token": {"content": "<|eot|>"}})
    return at


def train_run(compose: Compose, at: Path, *overrides: str) -> TrainedRun:
    """Run without a completed step."""
    run = compose(*overrides, "data.sequence=64", "trainer.max_steps=1", check_machine=False)
    at.mkdir(exist_ok=True)
    specs = {name: getattr(run, name) for name in CONFIG_GROUPS}
    return TrainedRun(folder=at, checkpoint=None, seed=1, **specs)


def text_overrides(model: Path, *more: str) -> tuple[str, ...]:
    paths = f"data.paths=[{model.parent}/text.txt]"
    (model.parent / "text.txt").write_text("hello how are you\n" * 100, "utf-8")
    tokenizer_override = f"data.tokenizer={model}/tokenizer.json"
    return ("data=text", paths, tokenizer_override, "data.end_of_text='<|end_of_text|>'", *more)


def chat_overrides(model: Path, *more: str) -> tuple[str, ...]:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]
    row = json.dumps({"messages": messages}) + "\n"
    (model.parent / "chat.jsonl").write_text(row * 40, "utf-8")
    paths = f"data.paths=[{model.parent}/chat.jsonl]"
    tokenizer_override = f"data.tokenizer={model}/tokenizer.json"
    return ("data=chat", paths, tokenizer_override, "data.end_of_text='<|end_of_text|>'", *more)


def hf(model: Path) -> tuple[str, ...]:
    return ("model=hf", f"model.path={model}")


DECODER = (
    *("model=llama3_8b", "model.vocabulary=320", "model.context=256", "model.width=32"),
    *("model.layers=2", "model.heads=4", "model.kv_heads=4", "model.feedforward=64"),
    *("model.rope_scaling=false", "model.rope_theta=10000.0", "model.norm_epsilon=1e-6"),
)


def decoder(model: Path) -> tuple[str, ...]:
    return (*DECODER, f"model.weights={model}")


@pytest.mark.parametrize("data", [text_overrides, chat_overrides])
@pytest.mark.parametrize("model", [hf, decoder])
def test_export_keeps_the_generation_config(
    model: Callable[[Path], tuple[str, ...]],
    data: Callable[[Path], tuple[str, ...]],
    instruct: Path,
    compose: Compose,
    tmp_path: Path,
) -> None:
    trained_run = train_run(compose, tmp_path / "run", *model(instruct), *data(instruct))
    to = tmp_path / "out"
    assert hf_export.write_export(trained_run, to, AdapterExport.merged) == []
    actual, expected = AutoTokenizer.from_pretrained(to), AutoTokenizer.from_pretrained(instruct)
    for name in ("bos_token", "eos_token", "pad_token", "padding_side", "chat_template"):
        assert getattr(actual, name) == getattr(expected, name), name
    assert actual.special_tokens_map == expected.special_tokens_map
    assert actual.model_max_length == expected.model_max_length
    settings = read_json(to / "generation_config.json")
    assert settings == read_json(instruct / "generation_config.json")
    config = read_json(to / "config.json")
    assert {key: config[key] for key in SETTINGS} == SETTINGS
    prompts = [[{"role": "user", "content": text}] for text in ("hello", "how are you thanks")]
    batches = [
        ids.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        for ids in (actual, expected)
    ]
    generated_ids = []
    for at, batch in zip((to, instruct), batches, strict=True):
        peer = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            generated_ids.append(peer.generate(**batch, max_new_tokens=16))
    assert torch.equal(*generated_ids)


@pytest.mark.parametrize("name", ["tokenizer.json", "plain.json"])
def test_export_tokenizer_has_the_ids_of_training(
    name: str, instruct: Path, compose: Compose, tmp_path: Path
) -> None:
    """Tokens declared next to ``tokenizer.json`` apply to a file of that name only."""
    model = tmp_path / "model"
    shutil.copytree(instruct, model)
    config = read_json(model / "tokenizer_config.json")
    config |= {"additional_special_tokens": ["<|user|>", "how"], "unk_token": "<|none|>"}
    write_json(model / "tokenizer_config.json", config)
    write_json(model / "added_tokens.json", {"fine": 303})
    copy_file(model / "tokenizer.json", model / "plain.json")
    overrides = [override.replace("tokenizer.json", name) for override in chat_overrides(model)]
    trained_run = train_run(compose, tmp_path / "run", *hf(model), *overrides)
    splits = trained_run.load_splits()
    save_tokenizer(splits, trained_run.folder)
    hf_export.write_export(trained_run, tmp_path / "out", AdapterExport.merged)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    ids_S = splits.train.gather([0])[0][: len(expected)]
    assert [int(max(token, ~token)) for token in ids_S] == expected
    assert (tokenizer.vocab.keys() >= {"how", "fine"}) == (name == "tokenizer.json")


def without_template(model: Path, to: Path) -> Path:
    shutil.copytree(model, to)
    (to / "chat_template.jinja").unlink()
    return to


def test_export_adds_the_trained_end_token(
    instruct: Path, compose: Compose, tmp_path: Path
) -> None:
    """Without a template, answers end with ``data.end_of_text``."""
    model = without_template(instruct, tmp_path / "model")
    config = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}
    for name in ("config.json", "generation_config.json"):
        write_json(model / name, read_json(model / name) | config)
    trained_run = train_run(compose, tmp_path / "run", *hf(model), *chat_overrides(model))
    hf_export.write_export(trained_run, tmp_path / "out", AdapterExport.merged)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end_of_text|>", "<|pad|>")
    assert tokenizer.chat_template == chat_templates.PLAIN_TEMPLATE
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert peer.generation_config.eos_token_id == [2, 1]
    assert peer.config.eos_token_id == [2, 1]


def test_export_adds_the_end_token_of_the_template(
    instruct: Path, compose: Compose, tmp_path: Path
) -> None:
    model = shutil.copytree(instruct, tmp_path / "model")
    write_json(model / "generation_config.json", {"eos_token_id": 1})
    overrides = (*hf(model), *chat_overrides(model), "data.end_of_text='<|eot|>'")
    trained_run = train_run(compose, tmp_path / "run", *overrides)
    hf_export.write_export(trained_run, tmp_path / "out", AdapterExport.merged)
    assert read_json(tmp_path / "out" / "generation_config.json") == {"eos_token_id": [1, 2]}


def test_export_without_end_tokens_stops_at_end_of_text(
    instruct: Path, compose: Compose, tmp_path: Path
) -> None:
    tokenizer_folder = tmp_path / "tokenizer"
    tokenizer_folder.mkdir()
    shutil.copyfile(instruct / "tokenizer.json", tokenizer_folder / "tokenizer.json")
    trained_run = train_run(compose, tmp_path / "run", *DECODER, *text_overrides(tokenizer_folder))
    hf_export.write_export(trained_run, tmp_path / "out", AdapterExport.merged)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == "<|end_of_text|>"
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert peer.generation_config.eos_token_id == 1


def test_export_of_token_id_data_keeps_the_tokenizer(
    instruct: Path, compose: Compose, tmp_path: Path
) -> None:
    trained_run = train_run(compose, tmp_path / "run", *hf(instruct), "data=synthetic")
    assert hf_export.write_export(trained_run, tmp_path / "out", AdapterExport.merged) == []
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize("padded", [True, False], ids=["pad_token", "no_pad_token"])
def test_export_of_a_classifier_accepts_batches(
    padded: bool, instruct: Path, compose: Compose, tmp_path: Path
) -> None:
    model = tmp_path / "tokenizer"
    shutil.copytree(instruct, model, ignore=shutil.ignore_patterns("*.safetensors"))
    if not padded:
        tokenizer_config = read_json(model / "tokenizer_config.json")
        del tokenizer_config["pad_token"]
        write_json(model / "tokenizer_config.json", tokenizer_config)
    rows = [{"text": f"hello {n}", "label": ("no", "yes")[n % 2]} for n in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "texts.jsonl").write_text(lines, "utf-8")
    data = ("data=labelled", f"data.paths=[{tmp_path}/texts.jsonl]", "data.classes=[no,yes]")
    tokenizer_overrides = (
        f"data.tokenizer={model}/tokenizer.json",
        "data.end_of_text='<|end_of_text|>'",
    )
    overrides = (
        *DECODER,
        "model.classes=2",
        "objective=classification",
        *data,
        *tokenizer_overrides,
    )
    trained_run = train_run(compose, tmp_path / "run", *overrides)
    hf_export.write_export(trained_run, tmp_path / "out", AdapterExport.merged)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token == ("<|pad|>" if padded else "<|end_of_text|>")
    peer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert peer.config.pad_token_id == (3 if padded else 1)
    texts = ["hello", "how are you fine thanks"]
    with torch.no_grad():
        tokenizer.padding_side = "right"
        batch_logits = peer(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        single_logits = torch.cat(
            [peer(**tokenizer(text, return_tensors="pt")).logits for text in texts]
        )
    torch.testing.assert_close(batch_logits, single_logits, rtol=1e-5, atol=1e-5)


def test_export_respects_the_umask(instruct: Path, compose: Compose, tmp_path: Path) -> None:
    trained_run = train_run(
        compose, tmp_path / "run", *hf(instruct), *text_overrides(instruct), "adapter=lora"
    )
    before = os.umask(0o027)
    try:
        for form in AdapterExport:
            hf_export.write_export(trained_run, tmp_path / form, form)
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.is_relative_to(tmp_path / "merged"):
            assert path.stat().st_mode & 0o777 == 0o640, path
    assert (tmp_path / "alone" / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "merged").stat().st_mode & 0o777 == 0o750


def test_export_copy_replaces_links(tmp_path: Path) -> None:
    link_target, run = tmp_path / "victim", tmp_path / "run"
    link_target.write_text("precious", "utf-8")
    run.mkdir()
    source = tmp_path / "tokenizer.json"
    source.write_text("{}", "utf-8")
    for name in ("tokenizer.json", "status.json"):
        (run / name).symlink_to(link_target)
    save_tokenizer(DataSplits(None, None, source), run)  # type: ignore[arg-type]  # rows are not asked for
    write_json(run / "status.json", {"state": "ok"})
    assert link_target.read_text("utf-8") == "precious"
    assert (run / "tokenizer.json").read_text("utf-8") == "{}"
    assert not any(path.is_symlink() for path in run.iterdir())
    copy_file(source, run / "again.json")
    assert (run / "again.json").read_text("utf-8") == "{}"


def test_export_reads_schedule_free_averages(compose: Compose, tmp_path: Path) -> None:
    assert train_run(compose, tmp_path).tensor_folders == ("model", "average")
    schedule_free = ("optimizer=schedule_free", "schedule=constant")
    assert train_run(compose, tmp_path, *schedule_free).tensor_folders == (
        "model",
        "average",
        "optimizer",
    )
