"""Special tokens, documents that cannot be encoded, and tokenizer training in chunks."""

import itertools
import random

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from scalewise.data import chunked_encoding as chunked
from scalewise.data import encoding
from scalewise.data.chunked_encoding import encode_documents
from scalewise.data.encoding import iter_training_text, special_ids, train_tokenizer
from scalewise.data.text_files import Document
from scalewise.data.tokenizer import TokenizerSource
from scalewise.errors import DataError

WORDS = ["<s>", "</s>", "<unk>", "[CLS]", "[SEP]", *"abcdefgh"]
ID = {word: index for index, word in enumerate(WORDS)}


def words(post_processor=None, *, unknown="<unk>"):
    tokenizer = Tokenizer(models.WordLevel(ID, unk_token=unknown))
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


def template(single):
    special_tokens = [(word, ID[word]) for word in WORDS[:5] if word in single]
    return processors.TemplateProcessing(single=single, special_tokens=special_tokens)


def ids(tokenizer, documents, end="</s>", **options):
    encoded = encode_documents(tokenizer, TokenizerSource(0, "own.json", end, **options), documents)
    return [WORDS[token] for token_ids in encoded for token in token_ids]


@pytest.mark.parametrize(
    ("post_processor", "end", "expected"),
    [
        (None, "</s>", "a b </s> c </s>"),
        (template("<s> $A"), "</s>", "<s> a b </s> <s> c </s>"),
        (template("<s> $A </s>"), "</s>", "<s> a b </s> <s> c </s>"),
        (template("$A </s>"), "</s>", "a b </s> c </s>"),
        (template("[CLS] $A [SEP]"), "</s>", "[CLS] a b [SEP] </s> [CLS] c [SEP] </s>"),
        (
            processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3)),
            "[SEP]",
            "[CLS] a b [SEP] [CLS] c [SEP]",
        ),
        (
            processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
            "</s>",
            "<s> a b </s> <s> c </s>",
        ),
    ],
)
def test_encoding_adds_special_tokens_of_the_post_processor(post_processor, end, expected):
    tokenizer = words(post_processor)
    assert ids(tokenizer, ["a b", "", "c"], end) == expected.split()
    unmarked_ids = f"a b {end} c {end}".split()
    assert ids(tokenizer, ["a b", "", "c"], end, special_tokens=False) == unmarked_ids


def test_encoding_does_not_repeat_end_of_text():
    expected = "a </s> b </s> </s> c </s>"
    assert " ".join(ids(words(), ["a </s>", "b", "</s>", "c"])) == expected


def test_encoding_finds_special_tokens_with_unencodable_words():
    assert special_ids(words(template("<s> $A </s>"), unknown="none")) == ([0], [1])


def test_encoding_adds_special_tokens_once_per_document(monkeypatch):
    for name, value in (("WINDOW", 60), ("OVERLAP", 30), ("BATCH", 200)):
        monkeypatch.setattr(chunked, f"{name}_CHARACTERS", value)
    monkeypatch.setattr(chunked, "SHARED_TOKENS", 2)
    document = " ".join(random.Random(0).choices("abcdefgh", k=500))
    expected = ["<s>", *document.split(), "</s>"]
    assert ids(words(template("<s> $A")), [document, document]) == expected * 2


def test_encoding_equals_tokenizers_library():
    tokenizer = words(template("<s> $A [SEP]"))
    expected = [*tokenizer.encode("a b c").tokens, "</s>"]
    assert ids(tokenizer, ["a b c"]) == expected


def bad_regex():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a|aa)+c"), "isolated")
    return tokenizer, "a" * 60, "retry-limit-in-match over"


def no_unknown():
    return words(unknown="none"), "a z", r"Missing \[UNK\] token"


def no_unknown_unigram():
    tokenizer = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0), ("</s>", -3.0)], None))
    return tokenizer, "ac", "unknown token"


@pytest.mark.parametrize("make", [bad_regex, no_unknown, no_unknown_unigram])
@pytest.mark.parametrize("num_others", [0, 5])
def test_encoding_names_an_unencodable_document(make, num_others, capfd):
    tokenizer, text, reason = make()
    documents = [Document(("a",), f"a.jsonl line {index}") for index in range(num_others)]
    documents.append(Document((text,), "b.jsonl line 7"))
    match = f"data.tokenizer=own.json: cannot encode b.jsonl line 7: .*{reason}"
    with pytest.raises(DataError, match=match):
        list(encode_documents(tokenizer, TokenizerSource(0, "own.json", "</s>"), documents))
    assert capfd.readouterr().err == ""


def random_text(seed, words=4000):
    rng = random.Random(seed)
    separators = [" ", "  ", "\n", "\n\n", " \n", "\t", "   "]
    strings = ["the", "it isn", "naïve", "123", "--", "日本", "end."]
    return "".join(rng.choice(strings) + rng.choice(separators) for _ in range(words))


@pytest.mark.parametrize("chunk", [7, 1000, 10**9])
def test_tokenizer_training_in_chunks_gives_the_same_tokenizer(monkeypatch, chunk):
    whole_tokenizer = train_tokenizer(
        TokenizerSource(400), lambda: iter([random_text(1), random_text(2)])
    )
    monkeypatch.setattr(encoding, "TRAINING_CHUNK_CHARACTERS", 50)

    def documents():
        for text in (random_text(1), random_text(2)):
            yield Document((text[at : at + chunk] for at in range(0, len(text), chunk)), "a.txt")

    assert train_tokenizer(TokenizerSource(400), documents).to_str() == whole_tokenizer.to_str()


def test_tokenizer_training_chunks_are_bounded(monkeypatch):
    monkeypatch.setattr(encoding, "TRAINING_CHUNK_CHARACTERS", 50)
    monkeypatch.setattr(encoding, "MAX_WORD_CHARACTERS", 200)
    text = random_text(1) + "x" * 1000 + random_text(2)
    chunks = [*iter_training_text([text, text], len(text) + 77)]
    assert "".join(chunks) == text + text[:77]
    assert max(map(len, chunks)) <= 300
    assert [*itertools.islice(iter_training_text(["ab", "cd", "ef"], 3), 9)] == ["ab", "c"]


def test_encoding_batches_are_bounded(monkeypatch):
    monkeypatch.setattr(chunked, "PART_TOKENS", 10)
    encoded = [*encode_documents(words(), TokenizerSource(0, None, "</s>"), ["a b c d"] * 20)]
    assert len(encoded) == 10
    assert np.concatenate(encoded).size == 100
