"""Pretrained weights require their own tokenizer: none is trained for them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fixtures.hf_checkpoints import LLAMA_CONFIG_DIR
from fixtures.rejections import assert_rejected
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from scalewise.config.compose import compose
from scalewise.data.encoding import train_tokenizer
from scalewise.data.prepare import prepare_splits
from scalewise.data.stdlib_corpus import StdlibCorpus, StdlibCorpusPairs
from scalewise.data.tokenizer import TokenizerSource

pytestmark = pytest.mark.usefixtures("cpu_machine")

END = "</s>"
LINES = {
    "corpus": ["data=corpus"],
    "corpus_classes": ["data=corpus_classes", "objective=classification", "model.classes=2"],
    "corpus_pairs": ["data=corpus_pairs", "objective=dpo"],
    "hf": ["data=hf", "data.path=a/b"],
    "text": ["data=text", f"data.paths=[{__file__}]"],
    "chat": ["data=chat", "data.paths=[RECORDS]"],
    "labelled": ["data=labelled", "data.paths=[RECORDS]", "data.classes=[no,yes]",
                 "objective=classification", "model.classes=2"],
    "preference": ["data=preference", "data.paths=[RECORDS]", "objective=dpo"],
}  # fmt: skip
READY = {
    "synthetic": ["data=synthetic"],
    "tokens": ["data=tokens", "data.paths=[IDS]"],
    "reversal": ["data=reversal", "objective=grpo"],
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of the model that ``DESCRIBED`` has the config of."""
    folder = tmp_path_factory.mktemp("weights")
    config = AutoConfig.from_pretrained(LLAMA_CONFIG_DIR)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder / "model.safetensors"


@pytest.fixture
def files(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights, with a tokenizer beside them, and data; relative paths begin there."""
    folder = tmp_path / "weights"
    folder.mkdir()
    shutil.copy(LLAMA_CONFIG_DIR / "config.json", folder)
    shutil.copy(weights, folder)
    train_tokenizer(TokenizerSource(300, end_of_text=END), lambda: iter(["some text"])).save(
        str(folder / "tokenizer.json")
    )
    end = {"__type": "AddedToken", "content": END}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (tmp_path / "RECORDS.jsonl").touch()
    np.zeros(99, dtype="<u2").tofile(tmp_path / "IDS.bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(parts: list[str]) -> list[str]:
    found = [part.replace("RECORDS", "RECORDS.jsonl").replace("IDS", "IDS.bin") for part in parts]
    return [*found, *(["model.tied=false"] if "model.classes=2" in parts else [])]


OF_WEIGHTS = [
    "model.width=32",
    "model.kv_heads=2",
    "model.norm_epsilon=1e-6",
    "model.feedforward=64",
]
DECODER = ["model=decoder_nano", "model.vocabulary=4096", *OF_WEIGHTS]
BEGUN = [*DECODER, "model.weights=weights"]
OF_TRANSFORMERS = ["model=hf", "model.path=weights", "data.sequence=32", "data.vocabulary=257"]
GIVEN = ["data.tokenizer=weights/tokenizer.json", f"data.end_of_text='{END}'"]
REASON = "trains a new tokenizer, which does not match the weights of weights"


@pytest.mark.parametrize("data", LINES)
def test_pretrained_weights_reject_a_trained_tokenizer(data: str, files: Path) -> None:
    line = named(LINES[data])
    assert_rejected([*BEGUN, *line], "data.tokenizer", REASON, f'set {GIVEN[0]} "{GIVEN[1]}"')
    compose([*BEGUN, *line, *GIVEN])
    compose([*DECODER, *line])


@pytest.mark.parametrize("data", READY)
def test_pretrained_weights_accept_token_ids(data: str, files: Path) -> None:
    compose([*BEGUN, *named(READY[data])])


@pytest.mark.parametrize("data", ["corpus", "hf", "text", "chat"])
def test_hf_model_keeps_its_tokenizer(data: str, files: Path) -> None:
    overrides = [*OF_TRANSFORMERS, *named(LINES[data])]
    assert_rejected(overrides, "data.tokenizer", REASON, f'set {GIVEN[0]} "{GIVEN[1]}"')
    compose([*overrides, "model.init=random"])


@pytest.mark.parametrize(
    ("gone", "fix"),
    [
        (["tokenizer_config.json"], "set data.tokenizer=weights/tokenizer.json"),
        (["tokenizer.json"], "set data.tokenizer=PATH to the tokenizer.json"),
    ],
)
@pytest.mark.parametrize(
    "begun", [BEGUN, [*DECODER, "model.weights=weights/model.safetensors"], OF_TRANSFORMERS]
)
def test_tokenizer_fix_names_the_files_of_the_weights(
    begun: list[str], gone: list[str], fix: str, files: Path
) -> None:
    for name in gone:
        (files / "weights" / name).unlink()
    assert_rejected([*begun, "data=corpus"], "data.tokenizer", "trains a new tokenizer", fix)


def test_tokenizer_fix_of_a_hub_name_is_its_cache(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = files / "models--somebody--taught"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    snapshot = kept / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir()
    snapshot.symlink_to(files / "weights")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(files))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    overrides = [*OF_TRANSFORMERS, "model.path=somebody/taught", "data=corpus"]
    found = f'set data.tokenizer={snapshot}/tokenizer.json "data.end_of_text='
    assert_rejected(overrides, "data.tokenizer", "trains a new tokenizer", found)
    (files / "weights" / "tokenizer.json").unlink()
    assert_rejected(
        overrides, "data.tokenizer", "trains a new tokenizer", "set data.tokenizer=PATH"
    )


@pytest.mark.parametrize("kind", [StdlibCorpus, StdlibCorpusPairs])
def test_embedded_text_uses_a_given_tokenizer(kind: type[StdlibCorpus], files: Path) -> None:
    path = files / "weights" / "tokenizer.json"
    spec = kind(megabytes=0.3, sequence=512, tokenizer=str(path), end_of_text=END)
    assert spec.required_vocabulary is None
    splits = prepare_splits(spec, 300, 0)
    assert splits.tokenizer is not None
    kept = Tokenizer.from_file(str(splits.tokenizer))
    assert kept.get_vocab() == Tokenizer.from_file(str(path)).get_vocab()
    assert len(splits.train) > 0
