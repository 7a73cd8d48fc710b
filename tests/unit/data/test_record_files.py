"""Records of JSON, JSON Lines and Parquet files."""

import pyarrow
import pytest
from fixtures.text_documents import read_texts
from pyarrow import parquet

from scalewise.data import text_files
from scalewise.data.record_files import iter_records
from scalewise.data.text_files import iter_json_lines, parse_json
from scalewise.errors import DataError


@pytest.fixture(autouse=True)
def _notes():
    text_files.warn_once.cache_clear()


def test_nul_in_a_record_is_rejected(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": "one"}\n{"x": "t\\u0000wo"}\n')
    parquet.write_table(pyarrow.table({"x": ["one", "t\0wo"]}), tmp_path / "a.parquet")
    for name, location in (("a.jsonl", "line 2"), ("a.parquet", "row 2")):
        with pytest.raises(DataError, match=f"{name} {location} has a NUL character"):
            read_texts(tmp_path / name, "x")


def test_duplicate_columns_are_rejected(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["x", "x"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has more than one column x"):
        read_texts(tmp_path / "a.parquet", "x")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (b'{"x": "caf\xe9"}', "is not UTF-8 (byte 0xe9)"),
        (b'{"x": "\\ud800"}', "has a lone surrogate (half a character)"),
        (b'{"x": "\\uDC00 "}', "has a lone surrogate (half a character)"),
        (b'{"\\ud800": "x"}', "has a lone surrogate (half a character)"),
        (b'{"x": "y", "n": %s}' % (b"1" * 4301), "is not valid JSON (Exceeds the limit"),
        (b'{"x": "y", "n": NaN}', "is not JSON (NaN is not a JSON value)"),
        (b'{"x": "y", "n": -Infinity}', "is not JSON (-Infinity is not a JSON value)"),
        (b"[" * 100_000, "is JSON that is nested too deeply"),
        (b'{"x": ' * 100_000, "is JSON that is nested too deeply"),
        (b'{"x": "y"', "is not JSON (Expecting ',' delimiter)"),
        (b'["x"]', "is not a JSON object but a list"),
        (b"null", "is not a JSON object but a NoneType"),
    ],
)
def test_bad_records_are_rejected_with_their_line(tmp_path, overrides, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": "one"}\n\n' + overrides + b'\n{"x": "two"}\n')
    with pytest.raises(DataError) as excinfo:
        read_texts(path, "x")
    assert excinfo.value.issues[0].reason.startswith(f"line 3 {reason}")
    valid_records = [record for number, record in iter_json_lines(path) if number != 3]
    assert valid_records == [{"x": "one"}, {"x": "two"}]


def test_surrogate_pair_is_one_character():
    assert parse_json('"\\ud83d\\ude00 \\\\ud800"') == "😀 \\ud800"


def test_null_record_is_skipped_with_a_note(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"x": "one"}\n{"x": null}\n{"x": "two"}\n{"x": null}\n')
    parquet.write_table(pyarrow.table({"x": ["one", None, "two"]}), tmp_path / "a.parquet")
    for suffix, count, first in (
        ("jsonl", "2 records", "line 2"),
        ("parquet", "1 record", "row 2"),
    ):
        path = tmp_path / f"a.{suffix}"
        assert read_texts(path, "x") == read_texts(path, "x") == ["one", "two"], suffix
        note = f"skipped {count} of {path} without x (null), first: a.{suffix} {first}\n"
        assert capsys.readouterr().err == note, suffix


ARROW_TYPES = {
    "string": pyarrow.string(),
    "large_string": pyarrow.large_string(),
    "string_view": pyarrow.string_view(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    "dictionary of large": pyarrow.dictionary(pyarrow.int8(), pyarrow.large_string()),
}


@pytest.mark.parametrize("kind", ARROW_TYPES)
def test_arrow_string_types_are_text(tmp_path, kind):
    column = pyarrow.array(["one", "two", None, "one"]).cast(ARROW_TYPES[kind])
    parquet.write_table(pyarrow.table({"x": column}), tmp_path / "a.parquet")
    assert read_texts(tmp_path / "a.parquet", "x") == ["one", "two", "one"]


def test_column_of_another_type_is_rejected(tmp_path):
    table = {"id": [1], "parts": [["a"]], "raw": [b"a"], "body": ["a"]}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    for field, kind in (("id", "int64"), ("parts", r"list<.*>"), ("raw", "binary")):
        with pytest.raises(
            DataError, match=f"data.field={field}: is a column of type {kind} in .*body"
        ):
            read_texts(tmp_path / "a.parquet", field)


def test_damaged_text_of_records_is_noted(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text('[{"messages": [{"content": "caf\ufffd"}]}, {"x": "plain"}]', "utf-8")
    assert len(list(iter_records(path, dict))) == 2
    assert "a.json has 1 replacement characters (U+FFFD) among 25" in capsys.readouterr().err
    path.write_text('[{"x": 1, "x": 2}]', "utf-8")
    with pytest.raises(DataError, match="the key 'x' is repeated"):
        list(iter_records(path, dict))
