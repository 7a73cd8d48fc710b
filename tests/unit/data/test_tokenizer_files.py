"""Tokenizer files: folders, and vocabularies that transformers converts."""

import builtins
import importlib.util
import io
import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from scalewise.data import tokenizer as tokenizer_files
from scalewise.data.chat_templates import load_template
from scalewise.data.encoding import train_tokenizer
from scalewise.data.tokenizer import TokenizerSource
from scalewise.errors import DataError

TEXT = "hello how are you, naïve café"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def train_tokenizer_model():
    return train_tokenizer(TokenizerSource(300, end_of_text="</s>"), lambda: iter([TEXT]))


def write_vocabulary(folder):
    """Write ``vocab.json`` and ``merges.txt`` of a byte-level BPE."""
    folder.mkdir()
    train_tokenizer_model().model.save(str(folder))


def load_vocabulary(path):
    return TokenizerSource(0, str(path), "</s>").load()


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_tokenizer_folder_is_read(tmp_path, name):
    train_tokenizer_model().save(str(tmp_path / "tokenizer.json"))
    assert not [*TokenizerSource(0, str(tmp_path / name)).validate()]
    assert load_vocabulary(tmp_path / name).to_str() == train_tokenizer_model().to_str()
    assert tokenizer_files.tokenizer_path(str(tmp_path / name)) == tmp_path / "tokenizer.json"


@pytest.mark.parametrize("name", ["", "vocab.json", "merges.txt"])
def test_tokenizer_vocabulary_and_merges_are_converted(tmp_path, name):
    from transformers import AutoTokenizer

    write_vocabulary(tmp_path / "bpe")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}
    (tmp_path / "bpe" / "tokenizer_config.json").write_text(json.dumps(config))
    assert not [*TokenizerSource(0, str(tmp_path / "bpe" / name)).validate()]
    expected = AutoTokenizer.from_pretrained(tmp_path / "bpe")(TEXT)["input_ids"]
    assert load_vocabulary(tmp_path / "bpe" / name).encode(TEXT).ids == expected


def test_tokenizer_conversion_is_cached_by_content(tmp_path, monkeypatch):
    for name in ("one", "two"):
        write_vocabulary(tmp_path / name)
        (tmp_path / name / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "GPT2Tokenizer"}'
        )
    first = load_vocabulary(tmp_path / "one").to_str()
    monkeypatch.setattr(tokenizer_files, "load_with_transformers", None)
    assert load_vocabulary(tmp_path / "two").to_str() == first
    digests = {tokenizer_files.content_digest(str(tmp_path / name)) for name in ("one", "two")}
    assert len(digests) == 1


def test_tokenizer_class_fix_works_as_printed(tmp_path):
    write_vocabulary(tmp_path / "it's")
    with pytest.raises(
        DataError, match=r"transformers cannot convert .* to a tokenizer\.json"
    ) as excinfo:
        load_vocabulary(tmp_path / "it's")
    command = excinfo.value.issues[0].fix.removeprefix("name its class: ")
    subprocess.run(["sh", "-c", command], check=True)
    assert (
        load_vocabulary(tmp_path / "it's").encode(TEXT).ids
        == train_tokenizer_model().encode(TEXT).ids
    )


def test_sentencepiece_model_requires_sentencepiece(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "sentencepiece" else find_spec(name, *more),
    )
    real_import = builtins.__import__

    def find_spec_without(name, *more, **kwargs):
        if name.partition(".")[0] == "sentencepiece":
            raise ImportError(name)
        return real_import(name, *more, **kwargs)

    monkeypatch.setattr(builtins, "__import__", find_spec_without)
    monkeypatch.delitem(sys.modules, "sentencepiece", raising=False)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(
            DataError, match=r"requires sentencepiece.*; pip install 'scalewise\[hf\]'"
        ):
            load_vocabulary(path)


def test_extra_installs_sentencepiece_requirements():
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extra = " ".join(pyproject["project"]["optional-dependencies"]["hf"])
    for package in tokenizer_files.CONVERSION_PACKAGES:
        assert package.rpartition(".")[2] in extra, package


def test_sentencepiece_ids_equal_the_model(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 5),
        model_writer=model,
        vocab_size=40,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    expected = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode(TEXT)
    assert load_vocabulary(tmp_path).encode(TEXT).ids == expected


def test_broken_sentencepiece_model_is_rejected(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(DataError, match=r"data\.tokenizer="):
        load_vocabulary(tmp_path)


def test_tokenizer_special_tokens_equal_transformers(tmp_path):
    from transformers import AutoTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    expected = AutoTokenizer.from_pretrained(tmp_path)("a b")["input_ids"]
    assert expected == [2, 5, 6, 3]
    assert TokenizerSource(0, str(tmp_path), "[SEP]").load().encode("a b").ids == expected


def test_declared_tokens_are_added_to_the_tokenizer(tmp_path):
    tokenizer = train_tokenizer_model()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = str(tmp_path)
    assert tokenizer_files.declared_tokens(path) == set()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_files.declared_tokens(path) == {"<pad>"}
    size = tokenizer.get_vocab_size()
    assert load_vocabulary(tmp_path).encode("<pad>").ids == [0, size]
    TokenizerSource(0, path, "</s>").check_vocabulary(size + 1)
    with pytest.raises(DataError, match="beyond the model's embedding: <pad>") as excinfo:
        TokenizerSource(0, path, "</s>").check_vocabulary(size)
    command, _, override = excinfo.value.issues[0].fix.rpartition("; ")[2].partition(", then ")
    subprocess.run(["sh", "-c", command.partition(": ")[2]], check=True)
    TokenizerSource(0, shlex.split(override)[0].partition("=")[2], "</s>").check_vocabulary(size)


def test_split_special_tokens_is_rejected(tmp_path):
    train_tokenizer_model().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_vocabulary(tmp_path).encode("</s>").ids == [0]
    config["split_special_tokens"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"split_special_tokens=true in .*; remove it from"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("empty", "is a folder without a tokenizer"), ("none.json", "no such file")],
)
def test_path_without_a_tokenizer_is_rejected(tmp_path, name, reason):
    (tmp_path / "empty").mkdir()
    (issue,) = TokenizerSource(0, str(tmp_path / name)).validate()
    assert issue.reason == reason


def test_truncated_tokenizer_is_rejected(tmp_path):
    (tmp_path / "tokenizer.json").write_text(train_tokenizer_model().to_str()[:-9])
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": 5},
        {"tokenizer_class": "ByT5Tokenizer"},
    ],
    ids=["own_code", "wrong_setting", "no_backend"],
)
def test_unloadable_tokenizer_class_is_rejected(tmp_path, config):
    """``tokenizer.json`` may have other ids: it is used only if the user applies the fix."""
    folder = tmp_path / "it's"
    folder.mkdir()
    train_tokenizer_model().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"data\.tokenizer=.*tokenizer_config\.json") as excinfo:
        load_vocabulary(folder)
    command, _, override = excinfo.value.issues[0].fix.partition(": ")[2].partition(", then ")
    subprocess.run(["sh", "-c", command], check=True)
    (argument,) = shlex.split(override)
    assert OverridesParser.create().parse_override(argument).value() == str(folder / "plain.json")
    assert (
        load_vocabulary(folder / "plain.json").encode(TEXT).ids
        == train_tokenizer_model().encode(TEXT).ids
    )


def test_template_of_an_unloadable_tokenizer_class_is_rejected(tmp_path):
    train_tokenizer_model().save(str(tmp_path / "tokenizer.json"))
    config = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "chat_template": "{{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"cannot load the class that tokenizer_config\.json"):
        load_template(tmp_path / "tokenizer.json")
