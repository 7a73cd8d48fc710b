"""Files that paths and glob patterns name, each once, and what is wrong with such names."""

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from itertools import islice
from pathlib import Path

from scalewise.errors import ConfigIssue
from scalewise.typed_override import format_override

MOST_LISTED = 10_000
"""Files of a folder that are looked at to suggest a pattern for it."""


def file_suffix(path: Path) -> str:
    """Returns the suffix of a file name in lower case."""
    return path.suffix.lower()


def match_paths(patterns: Sequence[str]) -> list[Path]:
    """Returns the files that paths and glob patterns name, each file once, sorted by path.

    A path component that exists is taken literally before it is tried as a pattern. Symbolic
    links are followed; a file that is reached by several names is listed by the first of them.
    """
    found: dict[str, Path] = {}
    for name in sorted({name for pattern in patterns for name in _expand_pattern(pattern)}):
        if os.path.isfile(name):
            found.setdefault(os.path.realpath(name), Path(name))
    return sorted(found.values(), key=str)


def _expand_pattern(pattern: str) -> Iterator[str]:
    """Yields the entries of the file system that a pattern names, dangling links included."""
    path = Path(pattern).expanduser()
    if os.path.lexists(path):
        yield str(path)
        return
    places = [path.anchor]
    for part in path.parts[bool(path.anchor) :]:
        if part == "**":
            places = list(_iter_folders(places))
        else:
            places = [
                os.path.join(place, name)
                for place in places
                for name in _match_entries(place, part)
            ]
    if path.name == "**":
        places += [
            os.path.join(place, name) for place in places for name in _match_entries(place, "*")
        ]
    yield from places


def _match_entries(folder: str, part: str) -> Iterator[str]:
    """Yields the entries of a folder that one component of a pattern names."""
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
    """Yields folders and all below them that are not hidden, each once, links after the others.

    A link to a folder that contains it is not followed.
    """
    seen: set[str] = set()
    left, links = deque(folders), deque[str]()
    while left or links:
        folder = (left or links).popleft()
        real = _real_path(folder or ".")
        if real is None or real in seen:
            continue
        seen.add(real)
        yield folder
        for path in (os.path.join(folder, name) for name in sorted(_match_entries(folder, "*"))):
            if not os.path.islink(path):
                left += [path] * os.path.isdir(path)
            elif os.path.isdir(path) and not _is_within(_real_path(path) or path, real):
                links.append(path)


def _real_path(path: str) -> str | None:
    """Path without links; None for a link that is gone or hidden, such as ``/proc/PID/cwd``."""
    try:
        return os.path.realpath(path)
    except OSError:
        return None


def _is_within(folder: str, path: str) -> bool:
    return os.path.commonpath([folder, path]) == folder


def path_issues(
    key: str, patterns: Sequence[str], suffixes: frozenset[str], example: str
) -> Iterator[ConfigIssue]:
    """Yields a complaint for each pattern without a file and each file of an unknown suffix."""
    for pattern in patterns:
        files = match_paths([pattern])
        if not files:
            reason, given = _missing_reason(Path(pattern).expanduser(), suffixes, example)
            yield ConfigIssue(key, pattern, reason, f"give {_paths_override(key, given)}")
        for suffix in sorted({file_suffix(file) for file in files} - suffixes):
            known = " ".join(sorted(suffixes))
            unknown = f"unknown suffix {suffix!r}" if suffix else "a file name without a suffix"
            yield ConfigIssue(key, pattern, unknown, f"use one of {known}")


def _missing_reason(path: Path, suffixes: frozenset[str], example: str) -> tuple[str, str]:
    """Returns why a path names no file, and a pattern to give instead."""
    if path.is_dir():
        files = (file_suffix(Path(name)) for _, _, names in os.walk(path) for name in names)
        below = islice(files, MOST_LISTED)
        known = Counter(suffix for suffix in below if suffix in suffixes).most_common(1)
        name = f"**/*{known[0][0]}" if known else Path(example).name
        return "is a folder", str(path / name)
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}, which does not exist", example
    return ("is no regular file" if path.exists() else "no such file"), example


def _paths_override(key: str, path: str) -> str:
    """Returns an override of a list of one path, as typed in a POSIX shell."""
    return format_override(key, [path])
