"""Input files on remote storage: in-memory file systems, and an HTTP server of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fixtures.http_files import FolderServer, serve_folder

from scalewise import inputs
from scalewise.data import remote_files
from scalewise.data.input_files import match_paths, path_issues
from scalewise.data.mixture import MixtureData, MixtureSource
from scalewise.data.prepare import prepare_splits
from scalewise.data.remote_files import copy_inputs, is_remote, remote_name, url_issues
from scalewise.data.text import PretokenizedData, TextData
from scalewise.errors import ConfigError, DataError
from scalewise.launch.config_hash import config_hash
from scalewise.run_config import RunConfig

Compose = Callable[..., RunConfig]
RECORDS = '{"text": "one line of text"}\n' * 400


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory() -> Iterator[Any]:
    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    yield file_system
    file_system.store.clear()


@pytest.fixture
def http(tmp_path: Path) -> Iterator[tuple[FolderServer, Path]]:
    """Server of this machine, and its folder."""
    folder = tmp_path / "served"
    folder.mkdir()
    with serve_folder(folder) as server:
        yield server, folder


def put(memory: Any, **files: str | bytes) -> None:
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        memory.pipe_file(f"/bucket/{name.replace('__', '.')}", data)


def contents(patterns: list[str]) -> list[str]:
    return [path.read_text("utf-8") for path in match_paths(patterns)]


def test_files_of_a_pattern_are_copied_in_order_of_their_urls(memory: Any) -> None:
    put(memory, b__txt="two", a__txt="one", c__jsonl="three")
    config = TextData(paths=("memory://bucket/*.txt",))
    assert match_paths(config.paths) == []
    copy_inputs(config)
    assert contents([*config.paths]) == ["one", "two"]
    assert [path.name for path in match_paths(config.paths)] == ["a.txt", "b.txt"]


def test_changed_file_is_copied_again_and_an_equal_one_is_not(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, a__txt="one")
    config = TextData(paths=("memory://bucket/a.txt",))
    copies: list[str] = []
    get_file = type(memory).get_file

    def count_copies(self: Any, path: str, *arguments: Any, **options: Any) -> None:
        copies.append(path)
        get_file(self, path, *arguments, **options)

    monkeypatch.setattr(type(memory), "get_file", count_copies)
    copy_inputs(config)
    copy_inputs(config)
    assert len(copies) == 1
    put(memory, a__txt="two")
    copy_inputs(config)
    assert len(copies) == 2
    assert contents([*config.paths]) == ["two"]


def test_http_files_and_patterns_are_copied_once(http: tuple[FolderServer, Path]) -> None:
    server, folder = http
    url, requested = server.url, server.requested
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (folder / name).write_text(f"{name}\n")
    config = TextData(paths=(f"{url}/*.jsonl", f"{url}/c.txt?version=2"), field="text")
    copy_inputs(config)
    assert contents([*config.paths]) == ["a.jsonl\n", "b.jsonl\n", "c.txt\n"]
    files = [path for path in requested if not path.endswith("/")]
    copy_inputs(config)
    assert sorted(files) == ["/a.jsonl", "/b.jsonl", "/c.txt?version=2"]
    assert [path for path in requested if not path.endswith("/")] == files


def test_text_is_tokenized_as_that_of_a_local_file(memory: Any, tmp_path: Path) -> None:
    put(memory, a__jsonl=RECORDS)
    (tmp_path / "a.jsonl").write_text(RECORDS)
    splits = []
    for path in ("memory://bucket/a.jsonl", str(tmp_path / "a.jsonl")):
        config = TextData(paths=(path,), field="text", sequence=16, vocabulary=300)
        copy_inputs(config)
        splits.append(prepare_splits(config, 300, 1))
    remote, local = (it.train.gather(range(len(it.train))) for it in splits)
    np.testing.assert_array_equal(remote, local)


def test_shards_keep_the_order_of_their_urls(memory: Any) -> None:
    for number in range(4):
        put(memory, **{f"{number}__bin": np.full(17, number, np.uint16).tobytes()})
    config = PretokenizedData(paths=("memory://bucket/*.bin",), sequence=16)
    copy_inputs(config)
    train = prepare_splits(config, 8, 1).train
    assert train.gather(range(4))[:, 0].tolist() == [0, 1, 2, 3]


def test_sources_of_a_mixture_are_copied(memory: Any) -> None:
    put(memory, a__txt="one")
    source = MixtureSource(TextData(paths=("memory://bucket/a.txt",)))
    copy_inputs(MixtureData(sources={"web": source}))
    assert contents(["memory://bucket/a.txt"]) == ["one"]


@pytest.mark.parametrize(
    ("path", "reason", "fix"),
    [
        ("memory://bucket/missing.txt", "cannot be read", "check the URL"),
        ("memory://bucket/*.txt", "matches no file", "correct the pattern"),
        ("memory://bucket/folder.txt", "is a folder", "folder.txt/*.jsonl"),
    ],
)
def test_absent_files_are_rejected(memory: Any, path: str, reason: str, fix: str) -> None:
    memory.pipe_file("/bucket/folder.txt/a.jsonl", b"")
    with pytest.raises(DataError, match=f"data.paths=.*{reason}") as caught:
        copy_inputs(TextData(paths=(path,)))
    assert fix in str(caught.value)


def test_unreachable_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1/a\.txt.*cannot be read"):
        copy_inputs(TextData(paths=("http://127.0.0.1:1/a.txt",)))


def test_incomplete_copy_is_rejected(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(memory, a__txt="content")

    def write_half(self: Any, path: str, local: str, **options: Any) -> None:
        Path(local).write_bytes(b"con")

    monkeypatch.setattr(type(memory), "get_file", write_half)
    with pytest.raises(DataError, match="ended after 3 of 7 bytes"):
        copy_inputs(TextData(paths=("memory://bucket/a.txt",)))
    assert match_paths(["memory://bucket/a.txt"]) == []


@pytest.mark.parametrize(
    ("url", "reason", "fix"),
    [
        ("ssh://host/a.txt", "the unknown protocol ssh://", "copy the files"),
        ("zip://a.txt::https://host/a.zip", "a chain of protocols", "use one of https://"),
        ("https://host/a.zip::memory://a.txt", "a chain of protocols", "copy the files"),
        ("file:///etc/passwd", "the unknown protocol file://", "use one of"),
        ("S3://bucket/a.txt", "the unknown protocol S3://", "s3://"),
        ("s3://bucket/a.txt", "requires the package s3fs", "pip install s3fs"),
        ("gs://bucket/a.txt", "requires the package gcsfs", "pip install gcsfs"),
    ],
)
def test_protocols_are_checked_without_network(
    url: str, reason: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"fsspec", "aiohttp"}
    monkeypatch.setattr(remote_files, "find_spec", lambda name: name if name in installed else None)
    (issue,) = url_issues("data.paths", url)
    assert reason in issue.reason
    assert fix in issue.fix
    with pytest.raises(DataError, match=r"data\.paths"):
        copy_inputs(TextData(paths=(url,)))


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/x/a.jsonl.zst", "a.jsonl.zst"),
        ("https://host/x/a.txt?token=1", "a.txt"),
        ("hf://datasets/user/name/data/*.parquet", "*.parquet"),
    ],
)
def test_names_are_those_of_the_last_component(url: str, name: str) -> None:
    assert is_remote(url)
    assert str(remote_name(url)) == name
    assert not is_remote(url.replace("://", ":/"))


def test_suffix_of_a_url_is_checked() -> None:
    suffixes = frozenset({".txt", ".jsonl"})
    assert not [*path_issues("data.paths", ["memory://b/a.jsonl.gz"], suffixes, "my/*.txt")]
    (issue,) = path_issues("data.paths", ["memory://b/a.csv"], suffixes, "my/*.txt")
    assert "unknown suffix '.csv'" in issue.reason


def test_records_of_a_url_require_a_field() -> None:
    (issue,) = TextData(paths=("memory://bucket/a.jsonl",)).validate()
    assert issue.key == "data.field"


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter22secret@host/a.txt",
        "https://host/a.txt?X-Amz-Signature=0123456789abcdef",
        "https://host/a.txt?sig=0123456789abcdef",
    ],
)
def test_credentials_in_urls_are_rejected_and_not_printed(url: str, compose: Compose) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("data=text", f"data.paths=['{url}']")
    assert "secret" in str(caught.value)
    assert "hunter22secret" not in str(caught.value)
    assert "0123456789abcdef" not in str(caught.value)
    (issue,) = url_issues("data.paths", url.replace("https", "ssh"))
    assert "hunter22secret" not in str(issue)
    assert "0123456789abcdef" not in str(issue)


def test_composition_and_hash_use_no_network(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    put(memory, a__txt="one")
    url = "memory://bucket/a.txt"

    def fail(*arguments: object, **options: object) -> None:
        pytest.fail("uses the network")

    with monkeypatch.context() as patch:
        patch.setattr(fsspec, "filesystem", fail)
        run = compose("data=text", f"data.paths=[{url}]")
        first = config_hash(run)
    copy_inputs(run.data)
    with monkeypatch.context() as patch:
        patch.setattr(fsspec, "filesystem", fail)
        assert config_hash(run) == first


def test_digests_are_those_of_the_copies(memory: Any) -> None:
    put(memory, a__txt="one")
    config = TextData(paths=("memory://bucket/a.txt",))
    values = {"data": {"paths": [*config.paths]}}
    assert inputs.content_digests(values) == {}
    copy_inputs(config)
    first = inputs.content_digests(values)
    assert set(first) == {"data.paths"}
    put(memory, a__txt="two")
    copy_inputs(config)
    assert inputs.content_digests(values) != first
    assert inputs.content_digests(values, remote=False) == {}


def test_captions_are_local(compose: Compose) -> None:
    with pytest.raises(ConfigError, match="images are files next to the file"):
        compose("data=captions", "data.paths=[memory://bucket/a.jsonl]")
