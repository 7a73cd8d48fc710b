"""Tokenized text: the embedded corpus and user files."""

import json
import os

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, processors

from scalewise.data import encoding
from scalewise.data.chunked_encoding import encode_documents
from scalewise.data.encoding import train_tokenizer
from scalewise.data.prepare import prepare_splits
from scalewise.data.record_files import iter_documents
from scalewise.data.stdlib_corpus import StdlibCorpus
from scalewise.data.text import TextData
from scalewise.data.tokenizer import END_OF_TEXT, TokenizerSource
from scalewise.errors import DataError

STORY = "".join(f"{index} sheep jumped over the fence.\n" for index in range(400))
DATA_OPTIONS = {"vocabulary": 300, "sequence": 8}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def read(splits, dataset):
    """Concatenated text of all sequences."""
    tokens = dataset.gather(range(len(dataset)))
    ids = [*tokens[:, :-1].ravel(), tokens[-1, -1]]
    return Tokenizer.from_file(str(splits.tokenizer)).decode(ids, skip_special_tokens=False)


def write_parquet(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)


def test_corpus_is_python_source_with_validation_files():
    splits = prepare_splits(StdlibCorpus(vocabulary=400, megabytes=0.4, sequence=16), 400, 0)
    train, validation = read(splits, splits.train), read(splits, splits.validation)
    assert "def " in train
    assert END_OF_TEXT in train
    assert 0 < len(validation) < len(train) / 3
    assert all(
        document not in train for document in validation.split(END_OF_TEXT) if len(document) > 400
    )


def test_corpus_is_truncated_to_its_size():
    sizes = [
        len(prepare_splits(StdlibCorpus(megabytes=mb, **DATA_OPTIONS), 300, 0).train)
        for mb in (0.1, 0.3)
    ]
    assert 2 < sizes[1] / sizes[0] < 4.5


def test_corpus_without_files_is_rejected():
    with pytest.raises(
        DataError, match=r"data\.megabytes=1e-06: .* has fewer than two Python sources"
    ):
        prepare_splits(StdlibCorpus(megabytes=1e-6), 4096, 0)


def test_text_sequences_are_contiguous(tmp_path):
    (tmp_path / "a.txt").write_text(STORY)
    splits = prepare_splits(
        TextData(paths=(f"{tmp_path}/*.txt",), validation_fraction=0, **DATA_OPTIONS), 300, 0
    )
    assert splits.validation is None
    assert (STORY + END_OF_TEXT).startswith(read(splits, splits.train))
    dataset = splits.train.gather([0, 1])
    assert dataset[0, -1] == dataset[1, 0]


def test_text_single_file_validates_on_its_end(tmp_path):
    (tmp_path / "a.md").write_text(STORY)
    splits = prepare_splits(
        TextData(paths=(f"{tmp_path}/a.md",), validation_fraction=0.25, **DATA_OPTIONS), 300, 0
    )
    train, validation = read(splits, splits.train), read(splits, splits.validation)
    assert STORY.startswith(train[:9000])
    start = STORY.index(validation[:60])
    assert start == pytest.approx(0.75 * len(STORY), abs=60)
    assert STORY[start - 1] == "\n"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_text_single_record_file_validates_on_records(tmp_path, suffix):
    texts = [f"record {index:03d} says nothing at all" for index in range(100)]
    if suffix == "jsonl":
        lines = "\n\n".join(json.dumps({"body": text}) for text in texts)
        (tmp_path / "a.jsonl").write_text(lines)
    else:
        write_parquet(tmp_path / "a.parquet", body=texts, id=list(range(100)))
    data = TextData(
        paths=(f"{tmp_path}/a.*",), field="body", validation_fraction=0.2, **DATA_OPTIONS
    )
    splits = prepare_splits(data, 300, 0)
    validation_texts = read(splits, splits.validation).split(END_OF_TEXT)
    assert validation_texts[:3] == [texts[4], texts[9], texts[14]]
    assert texts[4] not in read(splits, splits.train)


def test_text_files_are_held_out_entirely(tmp_path):
    for index in range(30):
        (tmp_path / f"{index}.py").write_text(f"# file {index:02d}\n" * 30)
    data = TextData(paths=(f"{tmp_path}/*.py",), validation_fraction=0.3, **DATA_OPTIONS)
    splits = prepare_splits(data, 300, 0)
    train, validation_text = read(splits, splits.train), read(splits, splits.validation)
    for index in range(30):
        line = f"# file {index:02d}\n# file {index:02d}"
        assert (line in train) != (line in validation_text), index


def test_text_cache_detects_changed_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(STORY)
    data = TextData(paths=(str(path),), **DATA_OPTIONS)
    first = prepare_splits(data, 300, 0).tokenizer
    assert prepare_splits(data, 300, 1).tokenizer == first
    path.write_text(STORY.replace("sheep", "goats"))
    assert prepare_splits(data, 300, 0).tokenizer != first


def test_text_uses_a_given_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text(STORY)
    tokenizer = train_tokenizer(TokenizerSource(320), lambda: iter([STORY]))
    tokenizer.save(str(tmp_path / "own.json"))
    data = TextData(paths=(f"{tmp_path}/a.txt",), tokenizer=str(tmp_path / "own.json"), sequence=8)
    splits = prepare_splits(data, 400, 0)
    assert splits.train.gather([0])[0].tolist() == tokenizer.encode(STORY).ids[:9]


@pytest.mark.parametrize("kind", ["text", "corpus"])
def test_text_notes_special_tokens_of_a_given_tokenizer(tmp_path, kind):
    (tmp_path / "a.txt").write_text(STORY)
    tokenizer = train_tokenizer(TokenizerSource(300, end_of_text="<bos>"), lambda: iter([STORY]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    tokenizer.save(str(tmp_path / "own.json"))
    tokenizer_options = {
        "tokenizer": str(tmp_path / "own.json"),
        "end_of_text": "</s>",
        "sequence": 8,
    }
    note = "documents begin with <bos>, as the tokenizer adds it"
    if kind == "corpus":
        assert prepare_splits(StdlibCorpus(megabytes=0.3, **tokenizer_options), 400, 0).note == note
        return
    splits = prepare_splits(TextData(paths=(f"{tmp_path}/a.txt",), **tokenizer_options), 400, 0)
    assert splits.note == f"{note}; set data.special_tokens=false to omit it"
    assert splits.train.gather([0])[0].tolist() == tokenizer.encode(STORY).ids[:9]
    splits_without_special_tokens = prepare_splits(
        TextData(paths=(f"{tmp_path}/a.txt",), special_tokens=False, **tokenizer_options), 400, 0
    )
    assert splits_without_special_tokens.note == ""
    assert (
        splits_without_special_tokens.train.gather([0])[0].tolist()
        == tokenizer.encode(STORY).ids[1:10]
    )


def test_text_stores_large_vocabularies_in_four_bytes(tmp_path):
    (tmp_path / "a.txt").write_text(STORY + "rare")
    tokenizer = train_tokenizer(TokenizerSource(300), lambda: iter([STORY]))
    tokenizer.add_tokens([f"unused{index}" for index in range(2**16)] + ["rare"])
    tokenizer.save(str(tmp_path / "own.json"))
    tokenizer_options = {"tokenizer": str(tmp_path / "own.json"), "validation_fraction": 0.0}
    dataset = prepare_splits(
        TextData(paths=(f"{tmp_path}/a.txt",), sequence=1, **tokenizer_options), 2**17, 0
    ).train
    assert dataset.gather([len(dataset) - 1])[0, 0] == tokenizer.token_to_id("rare") >= 2**16


def test_text_trained_tokenizer_ends_texts_as_configured():
    tokenizer = train_tokenizer(TokenizerSource(300, end_of_text="</s>"), lambda: iter([STORY]))
    assert tokenizer.encode(f"{STORY}</s>").ids[-1] == tokenizer.token_to_id("</s>") is not None
    assert tokenizer.token_to_id(END_OF_TEXT) is None


def test_tokenizer_training_reads_a_bounded_part(monkeypatch):
    monkeypatch.setattr(encoding, "TRAINING_CHARACTERS", 100)
    read_sizes = []

    def documents():
        for index in range(9):
            read_sizes.append(index)
            yield "a" * 60

    train_tokenizer(TokenizerSource(300), documents)
    assert read_sizes == [0, 1]


def test_fork_after_tokenization_prints_no_warning(capfd):
    tokenizer = train_tokenizer(TokenizerSource(300), lambda: iter([STORY]))
    list(encode_documents(tokenizer, TokenizerSource(300), [STORY, STORY]))
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert capfd.readouterr().err == ""


def rejection_message(tmp_path, match, content=STORY, name="a.txt", **options):
    (tmp_path / name).write_text(content)
    data = TextData(paths=(f"{tmp_path}/a.*",), **{**DATA_OPTIONS, **options})
    with pytest.raises(DataError, match=match):
        prepare_splits(data, 300, 0)
    assert not list((tmp_path / "cache" / "data").glob(".*"))


def test_tokenizer_larger_than_the_model_is_rejected(tmp_path):
    match = r"data\.vocabulary=301: has ids up to 300, but the model's vocabulary is 300; set "
    rejection_message(tmp_path, match + r"model\.vocabulary=301", vocabulary=301)


def test_given_tokenizer_larger_than_the_model_is_rejected(tmp_path):
    tokenizer_path = tmp_path / "own.json"
    train_tokenizer(TokenizerSource(320), lambda: iter([STORY])).save(str(tokenizer_path))
    rejection_message(
        tmp_path, r"data\.tokenizer=.*: has ids up to 319, but", tokenizer=str(tokenizer_path)
    )


def test_file_that_is_no_tokenizer_is_rejected(tmp_path):
    tokenizer_path = tmp_path / "own.json"
    tokenizer_path.write_text("{}")
    rejection_message(
        tmp_path, r"data\.tokenizer=.* is not a tokenizer\.json", tokenizer=str(tokenizer_path)
    )


def test_unknown_end_of_text_is_rejected(tmp_path):
    tokenizer_path = tmp_path / "own.json"
    train_tokenizer(TokenizerSource(300), lambda: iter([STORY])).save(str(tokenizer_path))
    match = (
        r"data\.end_of_text=</s>: is not a token of .*, which has to separate documents; set \"data"
    )
    rejection_message(tmp_path, match, tokenizer=str(tokenizer_path), end_of_text="</s>")


def test_empty_text_is_rejected(tmp_path):
    rejection_message(
        tmp_path, r"data\.paths=.*: the train split has no text; add files", content=""
    )


def test_text_shorter_than_a_sequence_is_rejected(tmp_path):
    match = (
        r"data\.sequence=99: the train split has 2 tokens, fewer than the 100 of one sequence; add"
    )
    rejection_message(tmp_path, match, content="ab", sequence=99, validation_fraction=0)


def test_missing_text_file_is_rejected(tmp_path):
    with pytest.raises(DataError, match=r"data\.paths=nowhere\.txt: no such file"):
        prepare_splits(TextData(paths=("nowhere.txt",)), 300, 0)


def test_unknown_suffix_is_rejected(tmp_path):
    rejection_message(
        tmp_path, r"data\.paths=.*: unknown suffix '\.zip'; use one of \.c ", name="a.zip"
    )


def test_text_records_require_a_field(tmp_path):
    match = r"data\.field=null: .* contains records, whose text field .*; set data\.field=text"
    rejection_message(tmp_path, match, name="a.jsonl")


def test_text_record_without_the_field_is_rejected(tmp_path):
    match = r"data\.field=text: line 2 of .* has no text in this field; its fields: body"
    lines = '{"text": "one"}\n{"body": "two"}'
    rejection_message(
        tmp_path, match, content=lines, name="a.jsonl", field="text", validation_fraction=0
    )


def test_text_line_that_is_not_json_is_rejected(tmp_path):
    match = r"data\.paths=.*a\.jsonl: line 2 is not JSON"
    lines = '{"text": "one"}\n{"text": "tw'
    rejection_message(
        tmp_path, match, content=lines, name="a.jsonl", field="text", validation_fraction=0
    )


def test_text_column_without_text_is_rejected(tmp_path):
    write_parquet(tmp_path / "a.parquet", body=["one"], id=[1])
    for field in ("text", "id"):
        data = TextData(paths=(f"{tmp_path}/a.parquet",), field=field)
        with pytest.raises(DataError, match=f"data.field={field}: .* text columns: body; set"):
            prepare_splits(data, 4096, 0)


def test_truncated_parquet_is_rejected(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, text=[STORY])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"data\.paths=.*: is not a complete parquet file .*; copy"):
        prepare_splits(TextData(paths=(str(path),), field="text"), 4096, 0)


def test_text_file_that_disappears_is_rejected(tmp_path):
    with pytest.raises(DataError, match=r"data\.paths=.*gone\.txt: cannot be read: No such file"):
        list(iter_documents(tmp_path / "gone.txt", None))
