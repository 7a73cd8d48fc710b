"""The build cache: built once by one of several processes, never partially visible."""

import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scalewise.data.build_cache import build_cached, cache_folder
from scalewise.data.prepare import prepare_splits
from scalewise.data.stdlib_corpus import StdlibCorpus
from scalewise.errors import DataError

PREPARE = """
from scalewise.data.prepare import prepare_splits
from scalewise.data.stdlib_corpus import StdlibCorpus
corpus = StdlibCorpus(vocabulary=400, megabytes=0.3, sequence=16)
print(prepare_splits(corpus, 400, 0).tokenizer.parent)
"""

KILL_WHILE_ENCODING = """
import os, signal
import scalewise.data.tokenized_cache as tokenized

def encode(tokenizer, end_of_text, documents):
    for ids in original(tokenizer, end_of_text, documents):
        yield ids
        os.kill(os.getpid(), signal.SIGKILL)

original, tokenized.encode_documents = tokenized.encode_documents, encode
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def start(code):
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True)


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).iterdir()}


def test_cache_is_built_once_by_two_processes():
    processes = [start(PREPARE), start(PREPARE)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0][0] == answers[1][0]
    assert sorted(error for _, error in answers) == ["", "preparing corpus ...\n"]


def test_killed_cache_build_leaves_nothing_readable(cache, tmp_path, monkeypatch):
    killed_process = start(KILL_WHILE_ENCODING + PREPARE)
    killed_process.communicate(timeout=60)
    assert killed_process.returncode == -signal.SIGKILL
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [".partial"]
    second_process = start(PREPARE)
    (folder, _) = second_process.communicate(timeout=60)
    assert second_process.returncode == 0
    assert [path for path in cache.iterdir() if path.is_dir()] == [Path(folder.strip())]
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "elsewhere"))
    output, _ = start(PREPARE).communicate(timeout=60)
    assert digests(folder.strip()) == digests(output.strip())
    assert set(digests(output.strip())) == {
        "meta.json",
        "tokenizer.json",
        "train.bin",
        "validation.bin",
    }


def test_failed_cache_build_leaves_nothing(cache):
    def fails(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        build_cached("thing", {}, fails)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_cache_is_reused_for_the_same_key():
    build_calls = []
    for key in ({"a": 1}, {"a": 1}, {"a": 2}):
        build_cached("thing", key, build_calls.append)
    assert len(build_calls) == 2


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SCALEWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "scalewise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "scalewise"


def test_cache_that_cannot_be_written_is_rejected(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="the cache cannot be written: Not a directory"):
        build_cached("thing", {}, lambda folder: None)


def test_truncated_cache_is_rejected(capfd):
    corpus = StdlibCorpus(vocabulary=300, megabytes=0.1, sequence=8)
    folder = prepare_splits(corpus, 300, 0).tokenizer.parent
    os.truncate(folder / "train.bin", 100)
    with pytest.raises(DataError, match=r"has 100 bytes instead of \d+; delete .* and start again"):
        prepare_splits(corpus, 300, 0)
    assert capfd.readouterr().err == "preparing corpus ...\n"


def test_cache_progress_is_one_terminal_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    prepare_splits(StdlibCorpus(vocabulary=300, megabytes=0.1, sequence=8), 300, 0)
    stderr = capsys.readouterr().err
    assert re.fullmatch(r"(preparing corpus \.\.\.[^\n]*\r)+[^\n]* tokens in [^\n]*s\n", stderr)


def test_cache_reports_a_full_disk_of_a_rust_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path))

    def build(folder: Path) -> None:
        raise Exception("File too large (os error 27)")

    with pytest.raises(DataError, match=r"exceeds the file size limit .*text-.*ulimit -f"):
        build_cached("text", {}, build)
