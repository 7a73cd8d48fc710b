"""Input files of data: those that match paths and glob patterns, and digests of their content."""

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from itertools import islice
from pathlib import Path

from scalewise import regular_files
from scalewise.data.build_cache import build_cached
from scalewise.data.compressed_files import COMPRESSED_SUFFIXES
from scalewise.data.remote_files import copied_files, is_remote, remote_name, url_issues
from scalewise.data.text_files import PLAIN_SUFFIXES
from scalewise.errors import ConfigIssue, DataError
from scalewise.typed_override import format_override

COMPRESSIBLE_SUFFIXES = PLAIN_SUFFIXES | {".json", ".jsonl"}
"""Suffixes of files that may be compressed; others are mapped to memory, or compress themselves."""
MAX_LISTED_FILES = 10_000
"""Maximum number of files of a folder that are listed to suggest a pattern."""
SAMPLED_BYTES = 64 * 2**20
"""Size above which only samples of a weight file are hashed."""
SAMPLES, SAMPLE_BYTES = 64, 2**18
"""Number and size of the samples of a large file, evenly spread from its first to its last byte."""


def file_suffix(path: Path) -> str:
    """Return the suffix of a file name in lower case; of compressed text, that of its content."""
    suffix = path.suffix.lower()
    content_suffix = Path(path.stem).suffix.lower()
    is_text = suffix in COMPRESSED_SUFFIXES and content_suffix in COMPRESSIBLE_SUFFIXES
    return content_suffix if is_text else suffix


def match_paths(patterns: Sequence[str]) -> list[Path]:
    """Return the files that match paths and glob patterns, each file once, sorted by path.

    Files of URLs come last, as the copies that ``remote_files.copy_inputs`` has made.
    An existing path component is taken literally before it is tried as a pattern. Symbolic links
    are followed; a file with several names is listed under the first of them.
    """
    files: dict[str, Path] = {}
    local_patterns = [pattern for pattern in patterns if not is_remote(pattern)]
    for name in sorted({name for pattern in local_patterns for name in _expand_pattern(pattern)}):
        if os.path.isfile(name):
            files.setdefault(os.path.realpath(name), Path(name))
    urls = (pattern for pattern in patterns if is_remote(pattern))
    copies = [copy for url in urls for copy in copied_files(url)]
    return list(dict.fromkeys([*sorted(files.values(), key=str), *copies]))


def match_names(patterns: Sequence[str]) -> list[Path]:
    """Return the files that match local patterns, and the file names in URLs, without network."""
    local_patterns = [pattern for pattern in patterns if not is_remote(pattern)]
    return match_paths(local_patterns) + [remote_name(it) for it in patterns if is_remote(it)]


def _expand_pattern(pattern: str) -> Iterator[str]:
    """Yield the file system entries that match a pattern, dangling links included."""
    path = regular_files.expand_home(pattern)
    if os.path.lexists(path):
        yield str(path)
        return
    folders = [path.anchor]
    for part in path.parts[bool(path.anchor) :]:
        if part == "**":
            folders = list(_iter_folders(folders))
        else:
            folders = [
                os.path.join(folder, name)
                for folder in folders
                for name in _match_entries(folder, part)
            ]
    if path.name == "**":
        folders += [
            os.path.join(folder, name) for folder in folders for name in _match_entries(folder, "*")
        ]
    yield from folders


def _match_entries(folder: str, part: str) -> Iterator[str]:
    """Yield the entries of a folder that match one component of a pattern."""
    if not has_magic(part) or os.path.lexists(os.path.join(folder, part)):
        if os.path.lexists(os.path.join(folder, part)):
            yield part
        return
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return
    hidden = part.startswith(".")
    yield from (n for n in names if fnmatchcase(n, part) and n.startswith(".") == hidden)


def _iter_folders(folders: Iterable[str]) -> Iterator[str]:
    """Yield folders and all non-hidden folders below them, each once, links last.

    A link to a folder that contains the link is not followed.
    """
    seen: set[str] = set()
    pending, links = deque(folders), deque[str]()
    while pending or links:
        folder = (pending or links).popleft()
        real_path = _real_path(folder or ".")
        if real_path is None or real_path in seen:
            continue
        seen.add(real_path)
        yield folder
        for path in (os.path.join(folder, name) for name in sorted(_match_entries(folder, "*"))):
            if not os.path.islink(path):
                pending += [path] * os.path.isdir(path)
            elif os.path.isdir(path) and not _is_within(_real_path(path) or path, real_path):
                links.append(path)


def _real_path(path: str) -> str | None:
    """Return the path without links; None for a dangling or inaccessible link."""
    try:
        return os.path.realpath(path)
    except OSError:
        return None


def _is_within(folder: str, path: str) -> bool:
    return os.path.commonpath([folder, path]) == folder


def path_issues(
    key: str, patterns: Sequence[str], suffixes: frozenset[str], example: str
) -> Iterator[ConfigIssue]:
    """Yield an issue for each pattern without a file and each file with an unknown suffix."""
    for pattern in patterns:
        if is_remote(pattern) and (issues := [*url_issues(key, pattern)]):
            yield from issues
            continue
        files = match_names([pattern])
        if not files:
            reason, suggestion = _missing_reason(
                regular_files.expand_home(pattern), suffixes, example
            )
            yield ConfigIssue(key, pattern, reason, f"set {_paths_override(key, suggestion)}")
        unknown = {_full_suffix(file) for file in files if file_suffix(file) not in suffixes}
        for suffix in sorted(unknown):
            allowed = " ".join(sorted(suffixes))
            if suffix.endswith((*COMPRESSED_SUFFIXES,)) and suffixes & COMPRESSIBLE_SUFFIXES:
                allowed = f"{' '.join(sorted(suffixes & COMPRESSIBLE_SUFFIXES))} before it"
            description = f"unknown suffix {suffix!r}" if suffix else "a file name without a suffix"
            yield ConfigIssue(key, pattern, description, f"use one of {allowed}")


def _missing_reason(path: Path, suffixes: frozenset[str], example: str) -> tuple[str, str]:
    """Return the reason why a path matches no file, and a pattern to use instead."""
    if os.path.isdir(path):  # unlike the methods of Path, false for a name that is too long
        files = (Path(name) for _, _, names in os.walk(path) for name in names)
        listed = islice(files, MAX_LISTED_FILES)
        endings = Counter(_name_ending(file) for file in listed if file_suffix(file) in suffixes)
        most_common = endings.most_common(1)
        name = f"**/*{most_common[0][0]}" if most_common else Path(example).name
        return "is a folder", str(path / name)
    if os.path.islink(path):
        return f"is a link to {os.readlink(path)}, which does not exist", example
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return "no such file", example
    except OSError as error:  # such as a name that is too long
        return str(error.strerror), example
    return "is not a regular file", example


def _full_suffix(path: Path) -> str:
    """Return the suffix of a file name in lower case, with that before a compressed one."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() + suffix if suffix in COMPRESSED_SUFFIXES else suffix


def _name_ending(path: Path) -> str:
    """Return the suffix of a file name, and with it that of compressed text."""
    suffix = path.suffix.lower()
    return suffix if suffix == file_suffix(path) else file_suffix(path) + suffix


def _paths_override(key: str, path: str) -> str:
    """Return the override of a list with one path, quoted for a POSIX shell."""
    return format_override(key, [path])


def read_error(path: Path, error: OSError) -> DataError:
    """Return the error of a file that the operating system cannot read."""
    reason = f"cannot be read: {error.strerror or error}"
    return DataError.for_key("data.paths", path, reason, "repair the file, or omit it")


def file_digests(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file, cached while sizes and modification times stay the same.

    Raises ``DataError`` for a file that cannot be read.
    """
    if not files:
        return []
    try:
        stats = [(str(file.absolute()), file.stat()) for file in files]
    except OSError as error:
        raise read_error(Path(error.filename), error) from error
    key = {"files": [[name, it.st_size, it.st_mtime_ns, it.st_ino] for name, it in stats]}

    def write_digests(folder: Path) -> None:
        digests = [_file_digest(file) for file in files]
        (folder / "digests.json").write_text(json.dumps(digests), encoding="utf-8")

    folder = build_cached("files", key, write_digests, subfolder="digests")
    digests: list[str] = json.loads((folder / "digests.json").read_text(encoding="utf-8"))
    return digests


def digests_by_content(files: Sequence[Path]) -> dict[Path, str]:
    """Return the digest of each file, in an order that does not depend on folders."""
    digests = dict(zip(files, file_digests(files), strict=True))
    return dict(sorted(digests.items(), key=lambda item: (item[1], item[0].name)))


def combine_digests(parts: Iterable[str]) -> str:
    """Return the digest of several strings in order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def sampled_digests(files: Sequence[Path]) -> list[str]:
    """Return a digest of each file; for large files, of their size and samples of their bytes."""
    return [
        _file_digest(file) if file.stat().st_size <= SAMPLED_BYTES else _sample_digest(file)
        for file in files
    ]


def _file_digest(file: Path) -> str:
    try:
        with regular_files.open_binary(file) as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise read_error(file, error) from error


def _sample_digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with regular_files.open_binary(file) as content:
        for start in _sample_offsets(size):
            content.seek(start)
            digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(size: int) -> Iterator[int]:
    for sample in range(SAMPLES):
        yield (size - SAMPLE_BYTES) * sample // (SAMPLES - 1)
