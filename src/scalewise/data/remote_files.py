"""Input files on remote storage, copied into the cache before they are read.

A URL such as ``s3://bucket/texts/*.jsonl.zst`` is read by the file system that fsspec has for its
protocol. Only ``copy_inputs`` uses the network; everything else reads the copies of its last call.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from scalewise.atomic import disk_full_reason
from scalewise.console import ProgressLine
from scalewise.data.base import DataConfig
from scalewise.data.build_cache import build_cached, cache_folder
from scalewise.errors import ConfigIssue, DataError
from scalewise.failures import exception_message
from scalewise.redaction import redact
from scalewise.run_files import read_json, write_json
from scalewise.units import format_bytes

PROTOCOLS: Mapping[str, tuple[str, str]] = {
    "https": ("aiohttp", "aiohttp"),
    "http": ("aiohttp", "aiohttp"),
    "s3": ("s3fs", "s3fs"),
    "gs": ("gcsfs", "gcsfs"),
    "gcs": ("gcsfs", "gcsfs"),
    "az": ("adlfs", "adlfs"),
    "abfs": ("adlfs", "adlfs"),
    "hf": ("huggingface_hub", "huggingface_hub"),
    "memory": ("fsspec", "fsspec"),
}
"""Module and package that fsspec needs for each protocol. Others are rejected: they open archives,
hosts by SSH, or local files by another name."""
IDENTITY_FIELDS = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "blob_id", "generation"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)
"""Fields that identify the content of a file, by the names that file systems give them."""
PATH_FIELDS = ("paths", "validation_paths")
"""Options of data with paths and patterns that may be URLs."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FOLDER = "remote"


def is_remote(pattern: str) -> bool:
    """Whether a path or pattern is a URL."""
    return _URL.match(pattern) is not None


def remote_name(url: str) -> Path:
    """File name of a URL or of a pattern of URLs, without its query."""
    path = urlsplit(url).path if url.partition("://")[0].lower().startswith("http") else url
    return Path(PurePosixPath(path).name)


def url_issues(key: str, url: str) -> Iterator[ConfigIssue]:
    """Yield an issue for an unknown protocol, or one that needs a package; uses no network."""
    protocol = url.partition("://")[0]
    if protocol not in PROTOCOLS or "::" in url:
        known = " ".join(f"{name}://" for name in PROTOCOLS)
        kind = "a chain of protocols" if "::" in url else f"the unknown protocol {protocol}://"
        fix = f"use one of {known}, or copy the files"
        yield ConfigIssue(key, redact(url), f"has {kind}", fix)
        return
    module, package = PROTOCOLS[protocol]
    for name, needed in (("fsspec", "fsspec"), (module, package)):
        if find_spec(name) is None:
            reason = f"{protocol}:// requires the package {needed}"
            yield ConfigIssue(key, redact(url), reason, f"pip install {needed}")
            return


def copied_files(url: str) -> list[Path]:
    """Copies of the files that a URL or pattern had at the last ``copy_inputs``, by their URLs."""
    files = [Path(str(it)) for it in read_json(_index_path(url)).get("files", [])]
    return files if all(file.is_file() for file in files) else []


def copy_inputs(config: DataConfig) -> None:
    """Copy the remote files of a data config into the cache, unless an equal copy is there.

    Equal are files of the same URL, size and ETag, checksum or modification time. Several processes
    may call it at the same time.

    Raises:
        DataError: A file is absent, or cannot be read.
    """
    sources: Mapping[str, DataConfig] = getattr(config, "source_configs", dict)()
    parts = {f"data.sources.{name}.data": source for name, source in sources.items()}
    for key, source in {"data": config, **parts}.items():
        for name in PATH_FIELDS:
            patterns = getattr(source, name, ())
            for url in patterns if isinstance(patterns, Sequence) else ():
                if is_remote(url):
                    _copy_matches(f"{key}.{name}", url)


def _copy_matches(key: str, url: str) -> None:
    if issues := [*url_issues(key, url)]:
        raise DataError(issues)
    import fsspec

    protocol = url.partition("://")[0]
    try:
        file_system = fsspec.filesystem(protocol)
        names = [url]
        if _has_magic(url):
            names = sorted(map(str, file_system.glob(url)))
        infos = [(name, file_system.info(name)) for name in names]
    except Exception as error:  # each file system raises errors of its own
        raise _read_error(key, url, error) from error
    files = [(name, info) for name, info in infos if info.get("type") != "directory"]
    if not files:
        reason = "matches no file" if _has_magic(url) else "is a folder"
        pattern = f"{url.rstrip('/')}/*.jsonl"
        fix = "correct the pattern" if _has_magic(url) else f"set '{key}=[{pattern}]'"
        raise DataError.for_key(key, redact(url), reason, fix)
    copies = [_copy_file(key, file_system, protocol, name, info) for name, info in files]
    index = _index_path(url)
    index.parent.mkdir(parents=True, exist_ok=True)
    write_json(index, {"files": [str(path) for path in copies]})


def _copy_file(
    key: str, file_system: Any, protocol: str, name: str, info: Mapping[str, Any]
) -> Path:
    """Copy one file into a folder of the cache; return its path there."""
    size = info.get("size")
    identity = {it: str(info[it]) for it in IDENTITY_FIELDS if info.get(it) is not None}
    url = name if is_remote(name) else f"{protocol}://{name.lstrip('/')}"
    file_name = remote_name(url).name

    def copy(folder: Path) -> None:
        from fsspec.callbacks import Callback

        text = "" if size is None else f" ({format_bytes(size)})"
        line = ProgressLine(f"copying {redact(url)}{text} into the cache ...")

        class Progress(Callback):  # type: ignore[misc]  # fsspec has no types
            def relative_update(self, inc: int = 1) -> None:
                super().relative_update(inc)
                line.show(format_bytes(self.value))

        try:
            file_system.get_file(name, str(folder / file_name), callback=Progress())
        except Exception as error:
            if disk_full_reason(error) is not None:
                raise
            raise _read_error(key, url, error) from error
        copied = os.path.getsize(folder / file_name)
        if size is not None and copied != size:
            reason = f"ended after {copied:,} of {size:,} bytes"
            raise DataError.for_key(key, redact(url), reason, "start again")
        line.close("")

    cache_key = {"url": url, "size": size, "identity": identity}
    return build_cached("file", cache_key, copy, _FOLDER) / file_name


def _has_magic(url: str) -> bool:
    """Whether a URL is a pattern; a question mark of HTTP begins a query."""
    return any(it in url for it in ("*[" if url.startswith("http") else "*[?"))


def _index_path(url: str) -> Path:
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return cache_folder() / _FOLDER / f"index-{digest}.json"


def _read_error(key: str, url: str, error: Exception) -> DataError:
    detail = redact(exception_message(error))
    fix = "check the URL, the network and the credentials in the environment"
    return DataError.for_key(key, redact(url), f"cannot be read: {detail}", fix)
