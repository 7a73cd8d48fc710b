"""Long documents encoded in windows have the token ids of one encoding of the whole document."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from scalewise.data import chunked_encoding, encoding
from scalewise.data.encoding import encode
from scalewise.data.tokenizing import END_OF_TEXT, Tokenization

WORDS = [
    "def",
    "return",
    "  ",
    "\n",
    "\n\n    ",
    "naïve",
    "日本語",
    "🙂",
    "x1=42;",
    "hello",
    "-" * 30,
    "\t",
]


def text(words: int, seed: int) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(words))


def trained(tokenizer: Tokenizer) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", END_OF_TEXT], show_progress=False
    )
    tokenizer.train_from_iterator([text(2000, 0)], trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    return Tokenization(400).train(lambda: iter([text(2000, 0)]))


def llama2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return trained(tokenizer)


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return trained(tokenizer)


def llama3() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    pattern = (
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return trained(tokenizer)


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", END_OF_TEXT],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator([text(2000, 0)], trainer)
    return tokenizer


@pytest.fixture
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_encoding, "WINDOW_CHARACTERS", 2_000)
    monkeypatch.setattr(chunked_encoding, "OVERLAP_CHARACTERS", 400)
    monkeypatch.setattr(chunked_encoding, "SHARED_TOKENS", 8)
    monkeypatch.setattr(chunked_encoding, "BATCH_CHARACTERS", 7_000)
    monkeypatch.setattr(encoding, "PART_TOKENS", 100)


DOCUMENTS = {
    "words": [text(6_000, 1), "", text(10, 2), text(700, 3), text(1_000, 4)],
    "one letter": ["a" * 9_000 + text(3_000, 5), text(900, 6)],
    "spaces": [text(900, 7) + " " * 5_001 + text(900, 8), "hello " * 3_000],
    "no spaces": ["".join(text(6_000, 9).split(" "))],
}


@pytest.mark.usefixtures("_small_windows")
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("make", [byte_level, llama2, llama3, metaspace, unigram])
def test_windows_give_the_ids_of_the_whole_document(
    make: Callable[[], Tokenizer], documents: list[str]
) -> None:
    tokenizer = make()
    end = tokenizer.token_to_id(END_OF_TEXT)
    expected = [
        token
        for document in documents
        if document
        for token in [*tokenizer.encode(document, add_special_tokens=False).ids, end]
    ]
    assert np.concatenate(list(encode(tokenizer, Tokenization(0), documents))).tolist() == expected


@pytest.mark.usefixtures("_small_windows")
def test_windows_are_joined_without_encoding_the_document_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = llama2()
    calls: list[int] = []
    encode_batch = chunked_encoding._encode_batch

    def counted(
        tokenizer: Tokenizer, batch: list[chunked_encoding.Window], path: str | None
    ) -> list[Encoding]:
        calls.append(sum(len(window.text) for window in batch))
        return encode_batch(tokenizer, batch, path)

    monkeypatch.setattr(chunked_encoding, "_encode_batch", counted)
    document = text(6_000, 1)
    list(encode(tokenizer, Tokenization(0), [document]))
    assert len(document) > 10 * chunked_encoding.WINDOW_CHARACTERS
    assert sum(calls) < 1.3 * len(document)


def test_a_document_of_over_250000_characters_is_encoded_as_a_whole() -> None:
    tokenizer = llama2()
    document = text(90_000, 3)
    assert len(document) > 2 * chunked_encoding.WINDOW_CHARACTERS
    ids = np.concatenate(list(encode(tokenizer, Tokenization(0), [document])))[:-1]
    assert ids.tolist() == tokenizer.encode(document, add_special_tokens=False).ids


def test_truncation_and_padding_of_a_tokenizer_file_are_not_applied(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(tmp_path / "own.json"))
    loaded = Tokenization(400, str(tmp_path / "own.json")).load()
    assert loaded is not None
    (ids,) = encode(loaded, Tokenization(0), ["hello " * 50])
    assert loaded.decode(ids.tolist()) == "hello " * 50
