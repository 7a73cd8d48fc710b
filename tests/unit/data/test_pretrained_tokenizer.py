"""Pretrained weights require their own tokenizer: none is trained."""

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

END_TOKEN = "</s>"
TEXT_DATA = {
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
TOKEN_DATA = {
    "synthetic": ["data=synthetic"],
    "tokens": ["data=tokens", "data.paths=[IDS]"],
    "reversal": ["data=reversal", "objective=grpo"],
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with random weights of a small model."""
    folder = tmp_path_factory.mktemp("weights")
    config = AutoConfig.from_pretrained(LLAMA_CONFIG_DIR)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder / "model.safetensors"


@pytest.fixture
def files(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder with weights, their tokenizer and data."""
    folder = tmp_path / "weights"
    folder.mkdir()
    shutil.copy(LLAMA_CONFIG_DIR / "config.json", folder)
    shutil.copy(weights, folder)
    train_tokenizer(TokenizerSource(300, end_of_text=END_TOKEN), lambda: iter(["some text"])).save(
        str(folder / "tokenizer.json")
    )
    end = {"__type": "AddedToken", "content": END_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (tmp_path / "RECORDS.jsonl").touch()
    np.zeros(99, dtype="<u2").tofile(tmp_path / "IDS.bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_file_names(overrides: list[str]) -> list[str]:
    file_overrides = [
        override.replace("RECORDS", "RECORDS.jsonl").replace("IDS", "IDS.bin")
        for override in overrides
    ]
    return [*file_overrides, *(["model.tied=false"] if "model.classes=2" in overrides else [])]


WEIGHTS_SHAPE = [
    "model.width=32",
    "model.kv_heads=2",
    "model.norm_epsilon=1e-6",
    "model.feedforward=64",
]
DECODER = ["model=decoder_nano", "model.vocabulary=4096", *WEIGHTS_SHAPE]
PRETRAINED_DECODER = [*DECODER, "model.weights=weights"]
PRETRAINED_HF = ["model=hf", "model.path=weights", "data.sequence=32", "data.vocabulary=257"]
TOKENIZER_OVERRIDES = ["data.tokenizer=weights/tokenizer.json", f"data.end_of_text='{END_TOKEN}'"]
REASON = "trains a new tokenizer, which does not match the weights of weights"


@pytest.mark.parametrize("data", TEXT_DATA)
def test_pretrained_weights_reject_a_trained_tokenizer(data: str, files: Path) -> None:
    data_overrides = with_file_names(TEXT_DATA[data])
    assert_rejected(
        [*PRETRAINED_DECODER, *data_overrides],
        "data.tokenizer",
        REASON,
        f'set {TOKENIZER_OVERRIDES[0]} "{TOKENIZER_OVERRIDES[1]}"',
    )
    compose([*PRETRAINED_DECODER, *data_overrides, *TOKENIZER_OVERRIDES])
    compose([*DECODER, *data_overrides])


@pytest.mark.parametrize("data", TOKEN_DATA)
def test_pretrained_weights_accept_token_ids(data: str, files: Path) -> None:
    compose([*PRETRAINED_DECODER, *with_file_names(TOKEN_DATA[data])])


@pytest.mark.parametrize("data", ["corpus", "hf", "text", "chat"])
def test_hf_model_keeps_its_tokenizer(data: str, files: Path) -> None:
    overrides = [*PRETRAINED_HF, *with_file_names(TEXT_DATA[data])]
    assert_rejected(
        overrides,
        "data.tokenizer",
        REASON,
        f'set {TOKENIZER_OVERRIDES[0]} "{TOKENIZER_OVERRIDES[1]}"',
    )
    compose([*overrides, "model.init=random"])


@pytest.mark.parametrize(
    ("removed_files", "fix"),
    [
        (["tokenizer_config.json"], "set data.tokenizer=weights/tokenizer.json"),
        (["tokenizer.json"], "set data.tokenizer=PATH to the tokenizer.json"),
    ],
)
@pytest.mark.parametrize(
    "model_overrides",
    [PRETRAINED_DECODER, [*DECODER, "model.weights=weights/model.safetensors"], PRETRAINED_HF],
)
def test_tokenizer_fix_names_the_files_of_the_weights(
    model_overrides: list[str], removed_files: list[str], fix: str, files: Path
) -> None:
    for name in removed_files:
        (files / "weights" / name).unlink()
    assert_rejected(
        [*model_overrides, "data=corpus"], "data.tokenizer", "trains a new tokenizer", fix
    )


def test_tokenizer_fix_of_a_hub_name_is_its_cache(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder = files / "models--somebody--taught"
    (cache_folder / "refs").mkdir(parents=True)
    (cache_folder / "refs" / "main").write_text("0" * 40)
    snapshot = cache_folder / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir()
    snapshot.symlink_to(files / "weights")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(files))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    overrides = [*PRETRAINED_HF, "model.path=somebody/taught", "data=corpus"]
    fix_start = f'set data.tokenizer={snapshot}/tokenizer.json "data.end_of_text='
    assert_rejected(overrides, "data.tokenizer", "trains a new tokenizer", fix_start)
    (files / "weights" / "tokenizer.json").unlink()
    assert_rejected(
        overrides, "data.tokenizer", "trains a new tokenizer", "set data.tokenizer=PATH"
    )


@pytest.mark.parametrize("kind", [StdlibCorpus, StdlibCorpusPairs])
def test_embedded_text_uses_a_given_tokenizer(kind: type[StdlibCorpus], files: Path) -> None:
    path = files / "weights" / "tokenizer.json"
    spec = kind(megabytes=0.3, sequence=512, tokenizer=str(path), end_of_text=END_TOKEN)
    assert spec.required_vocabulary is None
    splits = prepare_splits(spec, 300, 0)
    assert splits.tokenizer is not None
    saved_tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    assert saved_tokenizer.get_vocab() == Tokenizer.from_file(str(path)).get_vocab()
    assert len(splits.train) > 0
