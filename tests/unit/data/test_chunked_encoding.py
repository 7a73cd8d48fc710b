"""Long documents encoded in windows have the token ids of one encoding of the full document."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from scalewise.data import chunked_encoding
from scalewise.data.chunked_encoding import encode_documents
from scalewise.data.encoding import train_tokenizer
from scalewise.data.text_files import Document
from scalewise.data.tokenizer import END_OF_TEXT, TokenizerSource

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
    return train_tokenizer(TokenizerSource(400), lambda: iter([text(2000, 0)]))


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
    monkeypatch.setattr(chunked_encoding, "PART_TOKENS", 100)


DOCUMENTS = {
    "words": [text(6_000, 1), "", text(10, 2), text(700, 3), text(1_000, 4)],
    "one letter": ["a" * 9_000 + text(3_000, 5), text(900, 6)],
    "spaces": [text(900, 7) + " " * 5_001 + text(900, 8), "hello " * 3_000],
    "no spaces": ["".join(text(6_000, 9).split(" "))],
}


@pytest.mark.usefixtures("_small_windows")
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("make", [byte_level, llama2, llama3, metaspace, unigram])
def test_windows_have_the_ids_of_the_full_document(
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
    assert (
        np.concatenate(list(encode_documents(tokenizer, TokenizerSource(0), documents))).tolist()
        == expected
    )


LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
THREE_DIGITS = pre_tokenizers.Split(Regex(r"\d{3}"), "isolated")
PRE_TOKENIZERS = {
    "gpt2": [GPT2],
    "prefix_space": [pre_tokenizers.ByteLevel()],
    "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTE_LEVEL],
    "digits_individual": [pre_tokenizers.Digits(individual_digits=True), GPT2],
    "digits_grouped": [pre_tokenizers.Digits(), GPT2],
    "falcon": [pre_tokenizers.Punctuation(), GPT2, THREE_DIGITS],
    "fixed_7": [pre_tokenizers.FixedLength(7), BYTE_LEVEL],
    "fixed_7_of_words": [pre_tokenizers.FixedLength(7), GPT2],
    "words_of_fixed_7": [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.FixedLength(7)],
    "anchored": [pre_tokenizers.Split(Regex("^.{0,10}|.{4}"), "isolated"), BYTE_LEVEL],
    "scripts": [pre_tokenizers.UnicodeScripts(), pre_tokenizers.Whitespace()],
    "bert": [pre_tokenizers.BertPreTokenizer()],
    "delimiter": [pre_tokenizers.CharDelimiterSplit("7")],
    "metaspace": [pre_tokenizers.Metaspace()],
    "whole": [pre_tokenizers.Metaspace(split=False)],
    "none": [],
} | {
    f"three_{behavior}": [pre_tokenizers.Split(Regex(r"\d{3}"), behavior), BYTE_LEVEL]
    for behavior in (
        "removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"
    )
}  # fmt: skip
MODELS = {
    "bpe": (partial(models.BPE, unk_token="<unk>"), trainers.BpeTrainer),
    "unigram": (models.Unigram, trainers.UnigramTrainer),
    "wordpiece": (partial(models.WordPiece, unk_token="<unk>"), trainers.WordPieceTrainer),
}


def random_mixture(fragments: list[str], characters: int, seed: int) -> str:
    generator = random.Random(seed)
    mixture = ""
    while len(mixture) < characters:
        mixture += generator.choice(fragments)
    return mixture


DIGITS = [*"0123456789"]
LONG_DOCUMENTS = {
    "digits": random_mixture(DIGITS, 9_000, 1),
    "lines_of_digits": random_mixture([f"{10**n}\n" for n in range(2, 40)], 9_000, 2),
    "periods_of_7": "123456\n" * 700 + random_mixture(["12 ", "x\n", "345"], 4_000, 3),
    "one_digit": "1" * 5_000 + random_mixture(["1", "1 "], 4_000, 4),
    "spaces": random_mixture([" ", "  ", "\n", "\t", "word", "7"], 9_000, 5),
    "newlines": "\n" * 3_000 + random_mixture(["\n", "a\n\n", "!\n"], 6_000, 6),
    "emoji": random_mixture(["🙂", "👩‍👩‍👧", "é", "e\u0301", "日本語", "1"], 9_000, 7),
    "long_words": random_mixture(["ab" * 600, "z" * 1_100, "12" * 450, " ", "\n"], 12_000, 8),
    "everything": random_mixture([*DIGITS, *WORDS, "</s>", "hello", "!!!", "<unk>"], 9_000, 9),
}


@pytest.mark.usefixtures("_small_windows")
@pytest.mark.parametrize("stages", PRE_TOKENIZERS.values(), ids=PRE_TOKENIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_windows_align_with_pre_tokenization(
    model: str, stages: list[pre_tokenizers.PreTokenizer]
) -> None:
    make_tokenizer, trainer = MODELS[model]
    tokenizer = Tokenizer(make_tokenizer())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    special = ["<unk>", END_OF_TEXT, "</s>"]
    more = {"unk_token": "<unk>"} if model == "unigram" else {}
    corpus = [
        LONG_DOCUMENTS["everything"][:3_000],
        LONG_DOCUMENTS["digits"][:2_000],
        "123456\n" * 50,
        LONG_DOCUMENTS["emoji"][:900],
    ]
    tokenizer.train_from_iterator(
        corpus, trainer(vocab_size=400, special_tokens=special, show_progress=False, **more)
    )
    for name, document in LONG_DOCUMENTS.items():
        document_ids = tokenizer.encode(document, add_special_tokens=False).ids
        window_ids = [
            token
            for ids, _ in chunked_encoding.encode_windows(tokenizer, [document])
            for token in ids
        ]
        assert window_ids == document_ids, name


@pytest.mark.usefixtures("_small_windows")
@pytest.mark.parametrize(
    ("make", "document", "max_windows"),
    [
        *((make, text(6_000, 1), 1.3) for make in (byte_level, llama2, llama3, metaspace, unigram)),
        (llama3, random_mixture(DIGITS, 30_000, 1), 2.5),
    ],
)
def test_windows_join_without_a_second_encoding(
    make: Callable[[], Tokenizer],
    document: str,
    max_windows: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only windows of grouped digits are encoded twice."""
    tokenizer_of = tokenizer = make()
    calls: list[int] = []
    encode_batch = chunked_encoding._encode_batch

    def count_windows(
        tokenizer: Tokenizer, batch: list[chunked_encoding.Window], path: str | None
    ) -> list[Encoding]:
        calls.append(sum(len(window.text) for window in batch) * (tokenizer is tokenizer_of))
        return encode_batch(tokenizer, batch, path)

    monkeypatch.setattr(chunked_encoding, "_encode_batch", count_windows)
    list(encode_documents(tokenizer, TokenizerSource(0), [document]))
    assert len(document) > 10 * chunked_encoding.WINDOW_CHARACTERS
    assert sum(calls) < max_windows * len(document)


def test_long_document_is_encoded_in_full() -> None:
    tokenizer = llama2()
    document = text(90_000, 3)
    assert len(document) > 2 * chunked_encoding.WINDOW_CHARACTERS
    ids = np.concatenate(list(encode_documents(tokenizer, TokenizerSource(0), [document])))[:-1]
    assert ids.tolist() == tokenizer.encode(document, add_special_tokens=False).ids


@pytest.mark.usefixtures("_small_windows")
def test_document_too_long_to_encode_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level()
    monkeypatch.setattr(chunked_encoding, "MAX_WINDOW_CHARACTERS", 5_000)
    document = Document(iter(["1" * 9_000]), "digits.txt")
    ids = [
        token
        for window, _ in chunked_encoding.encode_windows(tokenizer, [document])
        for token in window
    ]
    assert tokenizer.decode(ids) == "1" * 9_000
    assert "digits.txt is encoded in parts of up to 5,000 characters" in capsys.readouterr().err


def test_tokenizer_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(tmp_path / "own.json"))
    loaded = TokenizerSource(400, str(tmp_path / "own.json")).load()
    assert loaded is not None
    (ids,) = encode_documents(loaded, TokenizerSource(0), ["hello " * 50])
    assert loaded.decode(ids.tolist()) == "hello " * 50
