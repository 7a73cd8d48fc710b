"""Paths, encodings and records of text files."""

import bz2
import codecs
import gzip
import json
import lzma
import os
import shutil
import subprocess
import zipfile

import pyarrow
import pytest
from pyarrow import parquet

from scalewise.data import text_files
from scalewise.data.input_files import match_paths, path_issues
from scalewise.data.record_files import RECORD_SUFFIXES, iter_documents
from scalewise.data.text_files import PLAIN_SUFFIXES, iter_json_lines, parse_json, text_chunks
from scalewise.errors import DataError

TEXT = "naïve café\nzwei Zeilen €\n"
BYTE_ORDER_MARKS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}


@pytest.fixture(autouse=True)
def _notes():
    text_files.warn_once.cache_clear()


def texts(path, field=None):
    return ["".join(document.chunks) for document in iter_documents(path, field)]


def write_files(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def names(folder, pattern):
    return [str(path.relative_to(folder)) for path in match_paths([f"{folder}/{pattern}"])]


@pytest.mark.parametrize("encoding", BYTE_ORDER_MARKS)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_byte_order_mark_decides_the_encoding(tmp_path, monkeypatch, encoding, chunk):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    (tmp_path / "a.txt").write_bytes(BYTE_ORDER_MARKS[encoding] + TEXT.encode(encoding))
    assert texts(tmp_path / "a.txt") == [TEXT]
    lines = "".join(json.dumps({"x": line}, ensure_ascii=False) + "\n" for line in TEXT.split())
    (tmp_path / "a.jsonl").write_bytes(BYTE_ORDER_MARKS[encoding] + lines.encode(encoding))
    assert texts(tmp_path / "a.jsonl", "x") == TEXT.split()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_line_ends_are_normalized(tmp_path, monkeypatch, end, chunk):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    (tmp_path / "a.txt").write_bytes(f"one{end}{end}two{end}".encode())
    assert texts(tmp_path / "a.txt") == ["one\n\ntwo\n"]
    (tmp_path / "a.jsonl").write_bytes(f'{{"x": "one"}}{end}{end} {end}{{"x": "two"}}'.encode())
    assert [number for number, _ in iter_json_lines(tmp_path / "a.jsonl")] == [1, 4]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"one\r\ntwo\ncaf\xe9 three\n", "line 3 is not UTF-8 (byte 0xe9)"),
        (b"one\ntwo\n\x93three\x94", "line 3 is not UTF-8 (byte 0x93)"),
        ("one\ntwo".encode("utf-16-le"), "line 1 has a NUL character, which is not text"),
        (
            codecs.BOM_UTF16_BE + "a\nà\n".encode("utf-16-be") + b"\xd8\x00",
            "line 3 is not UTF-16 (byte 0xd8)",
        ),
        (b"one\n\xe2\x82", "line 2 is not UTF-8 (byte 0xe2)"),
    ],
)
def test_undecodable_text_is_rejected_with_its_line(tmp_path, monkeypatch, content, reason, chunk):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    path = tmp_path / "a b.txt"
    path.write_bytes(content)
    with pytest.raises(DataError) as excinfo:
        texts(path)
    assert excinfo.value.issues[0].reason == reason
    assert excinfo.value.issues[0].value == path


RUSSIAN = "Привет, мир. Как дела?\n" * 40
JAPANESE = "日本語の文章です。これは、ある日のことでございます。\n" * 40
CHINESE = "中文文本,没有空格。今天天气很好,我们去公园。\n" * 40
GERMAN = "Müßiggang füllt größere Räume: „schön“ — 5 € …\n" * 40
CODE = "x = 1  # a comment of a program\n" * 5_000
CONVERTED = {
    "cp1252": (TEXT, "cp1252"),
    "cp1252_german": (GERMAN, "cp1252"),
    "cp1252_short": ("für", "cp1252"),
    "cp1252_even": ("Größen", "cp1252"),
    "cp1252_late": (CODE + GERMAN, "cp1252"),
    "utf_16_le": (TEXT, "utf-16-le"),
    "utf_16_be": (TEXT, "utf-16-be"),
    "utf_16_le_russian": (RUSSIAN, "utf-16-le"),
    "utf_16_be_russian": (RUSSIAN, "utf-16-be"),
    "utf_16_be_one_word": ("привет" * 300, "utf-16-be"),
    "utf_16_le_one_word": ("привет" * 300, "utf-16-le"),
    "utf_16_le_chinese": (CHINESE, "utf-16-le"),
    "utf_16_be_japanese": (JAPANESE, "utf-16-be"),
    "utf_32_le": (RUSSIAN, "utf-32-le"),
    "utf_32_be": (TEXT, "utf-32-be"),
    "truncated_character": ("a\nb", "utf-16-be"),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_encoding_fix_works_as_printed(tmp_path, name):
    text, encoding = CONVERTED[name]
    path = tmp_path / "it's.txt"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(DataError) as excinfo:
        texts(path)
    command = excinfo.value.issues[0].fix.partition(" with: ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    assert texts(tmp_path / "it's-utf8.txt") == [text]


@pytest.mark.parametrize(
    ("text", "encoding", "suggested_encodings"),
    [
        (JAPANESE, "cp932", "Shift-JIS"),
        (CODE + JAPANESE, "cp932", "Shift-JIS"),
        (JAPANESE, "euc_jp", "EUC-JP"),
        (CHINESE, "gb18030", "GB18030"),
        (CHINESE.replace("气", ""), "gb18030", "GB18030"),
        (RUSSIAN, "cp1251", "Windows-1251"),
        (RUSSIAN, "koi8_r", "KOI8-R"),
    ],
)
def test_ambiguous_encoding_is_among_the_suggestions(tmp_path, text, encoding, suggested_encodings):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    with pytest.raises(DataError) as excinfo:
        texts(tmp_path / "a.txt")
    fix = excinfo.value.issues[0].fix
    assert suggested_encodings in fix.partition("may be ")[2].partition(", and convert")[0].split(
        " or "
    )
    assert "iconv -f ENCODING -t UTF-8 " in fix


@pytest.mark.parametrize(
    ("content", "reason", "fix"),
    [
        (
            RUSSIAN.encode("utf-16-le")[:-1],
            "line 1 has a control",
            "copy the file again, since",
        ),
        (
            codecs.BOM_UTF16_LE + "ab\n".encode("utf-16-le")[:-1],
            "line 1 is not UTF-16",
            "copy the f",
        ),
        ("naïve".encode()[:3], "line 1 is not UTF-8", "copy the file again: its end is missing"),
        (b"one\ntwo\x04\n", "line 2 has a control (0x04) character", "remove all control"),
        (bytes(range(128)), "line 1 has a NUL", "remove all control characters: tr -d "),
        (b"\xff\x81\x8d\x8f\x90", "line 1 is not UTF-8 (byte 0xff)", "KOI8-R, and"),
    ],
)
def test_binary_files_are_named_with_a_fix(tmp_path, content, reason, fix):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError) as excinfo:
        texts(tmp_path / "a.txt")
    assert excinfo.value.issues[0].reason.startswith(reason)
    assert fix in excinfo.value.issues[0].fix


def test_control_character_fix_works_as_printed(tmp_path):
    path = tmp_path / "a b.txt"
    path.write_bytes(bytes(range(128)))
    with pytest.raises(DataError) as excinfo:
        texts(path)
    subprocess.run(["sh", "-c", excinfo.value.issues[0].fix.partition(": ")[2]], check=True)
    allowed_characters = "\t\n\v\f\n\x1b" + "".join(map(chr, range(32, 128)))
    assert texts(tmp_path / "a b-utf8.txt") == [allowed_characters]


@pytest.mark.parametrize("text", [TEXT, RUSSIAN, CHINESE])
@pytest.mark.parametrize(("mark", "actual"), [("le", "be"), ("be", "le")])
def test_wrong_byte_order_mark_is_rejected(tmp_path, mark, actual, text):
    path = tmp_path / "it's.txt"
    path.write_bytes(BYTE_ORDER_MARKS[f"utf-16-{mark}"] + text.encode(f"utf-16-{actual}"))
    for read_file in (texts, lambda path: [*iter_json_lines(path)]):
        with pytest.raises(DataError, match="has the byte order mark of UTF-16") as excinfo:
            read_file(path)
    command = excinfo.value.issues[0].fix.partition(": ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    assert texts(tmp_path / "it's-utf8.txt") == [text]


@pytest.mark.parametrize(
    "text", [RUSSIAN, CHINESE, "привет" * 300, "中文文本没有空格" * 90, "a", "", "\n", "日"]
)
@pytest.mark.parametrize("encoding", BYTE_ORDER_MARKS)
def test_correct_byte_order_mark_is_accepted(tmp_path, encoding, text):
    (tmp_path / "a.txt").write_bytes(BYTE_ORDER_MARKS[encoding] + text.encode(encoding))
    assert texts(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize(
    ("pack", "name", "program"),
    [
        (gzip.compress, "gzip", "gzip"),
        (lzma.compress, "xz", "xz"),
        (bz2.compress, "bzip2", "bzip2"),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_compressed_file_fix_works_as_printed(tmp_path, pack, name, program, suffix):
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    path = tmp_path / f"it's{suffix}"
    path.write_bytes(pack(b'{"x": "one"}\n'))
    with pytest.raises(DataError, match=f"is {name} data") as excinfo:
        texts(path, "x")
    subprocess.run(["sh", "-c", excinfo.value.issues[0].fix.partition(": ")[2]], check=True)
    assert texts(tmp_path / f"it's-unpacked{suffix}", "x")


def test_other_archives_are_rejected(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.txt", "w") as file:
        file.writestr("b.txt", "one")
    with pytest.raises(DataError, match=r"is zip data; unpack it: unzip -p \S+a\.txt > "):
        texts(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_bytes(bytes.fromhex("28b52ffd2403190000"))
    with pytest.raises(DataError, match=r"is zstd data; unpack it: zstd -dc < \S+b\.txt > "):
        texts(tmp_path / "b.txt")


def test_many_replacement_characters_are_noted(tmp_path, capsys):
    for suffix, content in ((".txt", "na\ufffdve caf\ufffd"), (".jsonl", '{"x": "na\ufffdve"}')):
        (tmp_path / f"a{suffix}").write_text(content, encoding="utf-8")
        texts(tmp_path / f"a{suffix}", "x")
    (tmp_path / "few.txt").write_text("\ufffd" + "a" * 999, encoding="utf-8")
    texts(tmp_path / "few.txt")
    stderr = capsys.readouterr().err
    assert "a.txt has 2 replacement characters (U+FFFD) among 10" in stderr
    assert "a.jsonl has 1 replacement characters (U+FFFD) among 5" in stderr
    assert "few.txt" not in stderr


def test_nul_in_a_record_is_rejected(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": "one"}\n{"x": "t\\u0000wo"}\n')
    parquet.write_table(pyarrow.table({"x": ["one", "t\0wo"]}), tmp_path / "a.parquet")
    for name, location in (("a.jsonl", "line 2"), ("a.parquet", "row 2")):
        with pytest.raises(DataError, match=f"{name} {location} has a NUL character"):
            texts(tmp_path / name, "x")


def test_duplicate_columns_are_rejected(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["x", "x"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has more than one column x"):
        texts(tmp_path / "a.parquet", "x")


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
        texts(path, "x")
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
        assert texts(path, "x") == texts(path, "x") == ["one", "two"], suffix
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
    assert texts(tmp_path / "a.parquet", "x") == ["one", "two", "one"]


def test_column_of_another_type_is_rejected(tmp_path):
    table = {"id": [1], "parts": [["a"]], "raw": [b"a"], "body": ["a"]}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    for field, kind in (("id", "int64"), ("parts", r"list<.*>"), ("raw", "binary")):
        with pytest.raises(
            DataError, match=f"data.field={field}: is a column of type {kind} in .*body"
        ):
            texts(tmp_path / "a.parquet", field)


def test_existing_path_is_taken_literally(tmp_path):
    write_files(tmp_path, "part-[0].txt", "part-0.txt", "run [2024]/x.txt", "a*b.txt", "acb.txt")
    assert names(tmp_path, "part-[0].txt") == ["part-[0].txt"]
    assert names(tmp_path, "run [2024]/x.txt") == ["run [2024]/x.txt"]
    assert names(tmp_path, "run [2024]/*.txt") == ["run [2024]/x.txt"]
    assert names(tmp_path, "a*b.txt") == ["a*b.txt"]
    assert names(tmp_path, "part-[01].txt") == ["part-0.txt"]
    assert names(tmp_path, "**/x.txt") == ["run [2024]/x.txt"]


def test_patterns_match_as_in_glob(tmp_path, monkeypatch):
    import glob

    write_files(
        tmp_path, "a.txt", "b.md", ".h.txt", "d/a.txt", "d/e/a.txt", "d/.h/a.txt", "d/.b.md"
    )
    monkeypatch.chdir(tmp_path)
    patterns = (
        "*",
        "*.txt",
        "**/*.txt",
        "**",
        "d/**",
        "d/**/a.txt",
        "?.md",
        "[ab].*",
        ".*",
        "d/.h/*",
    )
    for pattern in (*patterns, "**/e/*", "d/*/a.txt", "none/*", "./d/*.txt", f"{tmp_path}/d/*.txt"):
        expected = {os.path.abspath(it) for it in glob.glob(pattern, recursive=True)}
        matches = {str(path.absolute()) for path in match_paths([pattern])}
        assert matches == {it for it in expected if os.path.isfile(it)}, pattern


def test_broken_links_are_skipped(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.txt").write_text("x", "utf-8")
    (tmp_path / "d" / "gone").symlink_to(tmp_path)
    real_path = os.path.realpath

    def without_gone(path):
        if path.endswith("gone"):
            raise FileNotFoundError(path)
        return real_path(path)

    monkeypatch.setattr(os.path, "realpath", without_gone)
    assert match_paths([f"{tmp_path}/d/**/*.txt"]) == [tmp_path / "d" / "x.txt"]


def test_linked_files_are_read_once(tmp_path):
    write_files(tmp_path, "d/real/x.txt", "outside/y.txt")
    (tmp_path / "d" / "a-link").symlink_to(tmp_path / "d" / "real")
    (tmp_path / "d" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "d" / "again.txt").symlink_to("real/x.txt")
    for number in range(3):
        (tmp_path / "d" / f"loop{number}").symlink_to(tmp_path / "d")
    (tmp_path / "d" / "real" / "up").symlink_to("..")
    (tmp_path / "d" / "root").symlink_to("/")
    matches = match_paths([f"{tmp_path}/d/**/*.txt"])
    assert len(matches) == 2
    assert {path.resolve() for path in matches} == {
        tmp_path / "d" / "real" / "x.txt",
        tmp_path / "outside" / "y.txt",
    }
    assert names(tmp_path, "d/a-link/x.txt") == ["d/a-link/x.txt"]
    assert len(match_paths([f"{tmp_path}/d/a-link/x.txt", f"{tmp_path}/d/real/x.txt"])) == 1


def rejection_lines(pattern):
    return [
        *path_issues("data.paths", [str(pattern)], PLAIN_SUFFIXES | RECORD_SUFFIXES, "my/*.txt")
    ]


def test_suffixes_are_case_insensitive(tmp_path):
    (tmp_path / "A.TXT").write_text("text")
    (tmp_path / "B.JSONL").write_text('{"x": "record"}')
    assert not rejection_lines(tmp_path / "A.TXT") + rejection_lines(tmp_path / "*.JSONL")
    assert texts(tmp_path / "A.TXT") == ["text"]
    assert texts(tmp_path / "B.JSONL", "x") == ["record"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x.txt.gz", "unknown suffix '.gz'"),
        ("x.log", "unknown suffix '.log'"),
        ("noext", "a file name without a suffix"),
        ("dangling.txt", "is a link to missing.txt, which does not exist"),
        ("pipe.txt", "is not a regular file"),
        ("absent.txt", "no such file"),
    ],
)
def test_unreadable_paths_are_rejected_with_a_reason(tmp_path, name, reason):
    write_files(tmp_path, "x.txt.gz", "x.log", "noext")
    (tmp_path / "dangling.txt").symlink_to("missing.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (issue,) = rejection_lines(tmp_path / name)
    assert issue.reason == reason


@pytest.mark.parametrize("folder", ["plain", "run [2024]", "it's"])
def test_folder_is_rejected_with_a_file_pattern(tmp_path, folder):
    write_files(tmp_path, f"{folder}/deep/a.jsonl", f"{folder}/deep/b.jsonl", f"{folder}/c.md")
    (issue,) = rejection_lines(tmp_path / folder)
    assert issue.reason == "is a folder"
    fix_override = issue.fix.removeprefix("set ")
    completed = subprocess.run(
        ["sh", "-c", f"printf %s {fix_override}"], check=True, capture_output=True
    )
    pattern = completed.stdout.decode().removeprefix("data.paths=[").removesuffix("]").strip("'")
    matches = match_paths([pattern.replace("\\'", "'")])
    assert [path.name for path in matches] == ["a.jsonl", "b.jsonl"]


def test_large_file_is_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 10)
    (tmp_path / "a.txt").write_text("ä" * 100)
    chunks = list(text_chunks(tmp_path / "a.txt"))
    assert max(map(len, chunks)) <= 10
    assert "".join(chunks) == "ä" * 100
