"""Paths, encodings and records of text files."""

import codecs
import json
import subprocess

import pytest
from fixtures.text_documents import read_texts

from scalewise.data import text_files
from scalewise.data.text_files import iter_json_lines, text_chunks
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


@pytest.mark.parametrize("encoding", BYTE_ORDER_MARKS)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_byte_order_mark_decides_the_encoding(tmp_path, monkeypatch, encoding, chunk):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    (tmp_path / "a.txt").write_bytes(BYTE_ORDER_MARKS[encoding] + TEXT.encode(encoding))
    assert read_texts(tmp_path / "a.txt") == [TEXT]
    lines = "".join(json.dumps({"x": line}, ensure_ascii=False) + "\n" for line in TEXT.split())
    (tmp_path / "a.jsonl").write_bytes(BYTE_ORDER_MARKS[encoding] + lines.encode(encoding))
    assert read_texts(tmp_path / "a.jsonl", "x") == TEXT.split()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_line_ends_are_normalized(tmp_path, monkeypatch, end, chunk):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    (tmp_path / "a.txt").write_bytes(f"one{end}{end}two{end}".encode())
    assert read_texts(tmp_path / "a.txt") == ["one\n\ntwo\n"]
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
        read_texts(path)
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
        read_texts(path)
    command = excinfo.value.issues[0].fix.partition(" with: ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    assert read_texts(tmp_path / "it's-utf8.txt") == [text]


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
        read_texts(tmp_path / "a.txt")
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
        read_texts(tmp_path / "a.txt")
    assert excinfo.value.issues[0].reason.startswith(reason)
    assert fix in excinfo.value.issues[0].fix


def test_control_character_fix_works_as_printed(tmp_path):
    path = tmp_path / "a b.txt"
    path.write_bytes(bytes(range(128)))
    with pytest.raises(DataError) as excinfo:
        read_texts(path)
    subprocess.run(["sh", "-c", excinfo.value.issues[0].fix.partition(": ")[2]], check=True)
    allowed_characters = "\t\n\v\f\n\x1b" + "".join(map(chr, range(32, 128)))
    assert read_texts(tmp_path / "a b-utf8.txt") == [allowed_characters]


@pytest.mark.parametrize("text", [TEXT, RUSSIAN, CHINESE])
@pytest.mark.parametrize(("mark", "actual"), [("le", "be"), ("be", "le")])
def test_wrong_byte_order_mark_is_rejected(tmp_path, mark, actual, text):
    path = tmp_path / "it's.txt"
    path.write_bytes(BYTE_ORDER_MARKS[f"utf-16-{mark}"] + text.encode(f"utf-16-{actual}"))
    for read_file in (read_texts, lambda path: [*iter_json_lines(path)]):
        with pytest.raises(DataError, match="has the byte order mark of UTF-16") as excinfo:
            read_file(path)
    command = excinfo.value.issues[0].fix.partition(": ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    assert read_texts(tmp_path / "it's-utf8.txt") == [text]


@pytest.mark.parametrize(
    "text", [RUSSIAN, CHINESE, "привет" * 300, "中文文本没有空格" * 90, "a", "", "\n", "日"]
)
@pytest.mark.parametrize("encoding", BYTE_ORDER_MARKS)
def test_correct_byte_order_mark_is_accepted(tmp_path, encoding, text):
    (tmp_path / "a.txt").write_bytes(BYTE_ORDER_MARKS[encoding] + text.encode(encoding))
    assert read_texts(tmp_path / "a.txt") == [text]


def test_many_replacement_characters_are_noted(tmp_path, capsys):
    for suffix, content in ((".txt", "na\ufffdve caf\ufffd"), (".jsonl", '{"x": "na\ufffdve"}')):
        (tmp_path / f"a{suffix}").write_text(content, encoding="utf-8")
        read_texts(tmp_path / f"a{suffix}", "x")
    (tmp_path / "few.txt").write_text("\ufffd" + "a" * 999, encoding="utf-8")
    read_texts(tmp_path / "few.txt")
    stderr = capsys.readouterr().err
    assert "a.txt has 2 replacement characters (U+FFFD) among 10" in stderr
    assert "a.jsonl has 1 replacement characters (U+FFFD) among 5" in stderr
    assert "few.txt" not in stderr


def test_large_file_is_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 10)
    (tmp_path / "a.txt").write_text("ä" * 100)
    chunks = list(text_chunks(tmp_path / "a.txt"))
    assert max(map(len, chunks)) <= 10
    assert "".join(chunks) == "ä" * 100


def test_damage_of_an_earlier_conversion_is_noted(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("caf\xe9 \x93quoted\x94\n", "utf-8")
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8 + b"one\n" + codecs.BOM_UTF8 + b"two\n")
    (tmp_path / "c.txt").write_text("a line end\x85 of EBCDIC\n", "utf-8")
    for name in "abc":
        read_texts(tmp_path / f"{name}.txt")
    stderr = capsys.readouterr().err
    assert "a.txt has 2 control characters (U+0080 to U+009F)" in stderr
    assert "b.txt has 1 byte order marks (U+FEFF) within its text" in stderr
    assert "c.txt" not in stderr


def test_iso_2022_is_rejected_with_a_command_that_converts_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\n\u4e16\u754c\n".encode("iso2022_jp"))
    with pytest.raises(DataError, match="line 2 is ISO-2022") as excinfo:
        read_texts(path)
    command = excinfo.value.issues[0].fix.removeprefix("convert the file: ")
    subprocess.run(command, shell=True, check=True)
    assert read_texts(tmp_path / "a-utf8.txt") == ["one\n\u4e16\u754c\n"]


def test_repeated_key_is_rejected(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": {"y": 1, "y": 2}}\n{"x": "one"}\n')
    lines = [value for _, value in iter_json_lines(tmp_path / "a.jsonl")]
    assert str(lines[0]) == "is not JSON (the key 'y' is repeated)"
    assert lines[1] == {"x": "one"}
