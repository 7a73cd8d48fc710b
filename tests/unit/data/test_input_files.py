"""Paths and patterns of input files."""

import os
import subprocess

import pytest
from fixtures.text_documents import read_texts

from scalewise.data.input_files import match_paths, path_issues
from scalewise.data.record_files import RECORD_SUFFIXES
from scalewise.data.text_files import PLAIN_SUFFIXES


def write_files(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def names(folder, pattern):
    return [str(path.relative_to(folder)) for path in match_paths([f"{folder}/{pattern}"])]


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
    assert read_texts(tmp_path / "A.TXT") == ["text"]
    assert read_texts(tmp_path / "B.JSONL", "x") == ["record"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x.bin.gz", "unknown suffix '.bin.gz'"),
        ("x.log", "unknown suffix '.log'"),
        ("noext", "a file name without a suffix"),
        ("dangling.txt", "is a link to missing.txt, which does not exist"),
        ("pipe.txt", "is not a regular file"),
        ("absent.txt", "no such file"),
    ],
)
def test_unreadable_paths_are_rejected_with_a_reason(tmp_path, name, reason):
    write_files(tmp_path, "x.bin.gz", "x.log", "noext")
    (tmp_path / "dangling.txt").symlink_to("missing.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (issue,) = rejection_lines(tmp_path / name)
    assert issue.reason == reason


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("folder", ["plain", "run [2024]", "it's"])
def test_folder_is_rejected_with_a_file_pattern(tmp_path, folder, suffix):
    names = [f"a{suffix}", f"b{suffix}"]
    write_files(tmp_path, *(f"{folder}/deep/{name}" for name in names), f"{folder}/c.md")
    (issue,) = rejection_lines(tmp_path / folder)
    assert issue.reason == "is a folder"
    fix_override = issue.fix.removeprefix("set ")
    completed = subprocess.run(
        ["sh", "-c", f"printf %s {fix_override}"], check=True, capture_output=True
    )
    pattern = completed.stdout.decode().removeprefix("data.paths=[").removesuffix("]").strip("'")
    matches = match_paths([pattern.replace("\\'", "'")])
    assert [path.name for path in matches] == names
