"""Files that paths and glob patterns name, each once, and what is wrong with such names."""

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from itertools import islice
from pathlib import Path

from scalewise.errors import Complaint
from scalewise.typed_override import typed

MOST_LISTED = 10_000
"""Files of a folder that are looked at to suggest a pattern for it."""


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file name in lower case."""
    return path.suffix.lower()


def matching(patterns: Sequence[str]) -> list[Path]:
    """Returns the files that paths and glob patterns name, each file once, sorted by path.

    A path component that exists is taken literally before it is tried as a pattern. Symbolic
    links are followed; a file that is reached by several names is listed by the first of them.
    """
    found: dict[str, Path] = {}
    for name in sorted({name for pattern in patterns for name in _expanded(pattern)}):
        if os.path.isfile(name):
            found.setdefault(os.path.realpath(name), Path(name))
    return sorted(found.values(), key=str)


def _expanded(pattern: str) -> Iterator[str]:
    """Yields the entries of the file system that a pattern names, dangling links included."""
    path = Path(pattern).expanduser()
    if os.path.lexists(path):
        yield str(path)
        return
    places = [path.anchor]
    for part in path.parts[bool(path.anchor) :]:
        if part == "**":
            places = list(_folders_below(places))
        else:
            places = [os.path.join(place, name) for place in places for name in _named(place, part)]
    if path.name == "**":
        places += [os.path.join(place, name) for place in places for name in _named(place, "*")]
    yield from places


def _named(folder: str, part: str) -> Iterator[str]:
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


def _folders_below(folders: Iterable[str]) -> Iterator[str]:
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
        for path in (os.path.join(folder, name) for name in sorted(_named(folder, "*"))):
            if not os.path.islink(path):
                left += [path] * os.path.isdir(path)
            elif os.path.isdir(path) and not _contains(_real_path(path) or path, real):
                links.append(path)


def _real_path(path: str) -> str | None:
    """Path without links; None for a link that is gone or hidden, such as ``/proc/PID/cwd``."""
    try:
        return os.path.realpath(path)
    except OSError:
        return None


def _contains(folder: str, path: str) -> bool:
    return os.path.commonpath([folder, path]) == folder


def path_complaints(
    key: str, patterns: Sequence[str], suffixes: frozenset[str], example: str
) -> Iterator[Complaint]:
    """Yields a complaint for each pattern without a file and each file of an unknown suffix."""
    for pattern in patterns:
        files = matching([pattern])
        if not files:
            reason, given = _absent(Path(pattern).expanduser(), suffixes, example)
            yield Complaint(key, pattern, reason, f"give {_override(key, given)}")
        for suffix in sorted({suffix_of(file) for file in files} - suffixes):
            known = " ".join(sorted(suffixes))
            unknown = f"unknown suffix {suffix!r}" if suffix else "a file name without a suffix"
            yield Complaint(key, pattern, unknown, f"use one of {known}")


def _absent(path: Path, suffixes: frozenset[str], example: str) -> tuple[str, str]:
    """Returns why a path names no file, and a pattern to give instead."""
    if path.is_dir():
        files = (suffix_of(Path(name)) for _, _, names in os.walk(path) for name in names)
        below = islice(files, MOST_LISTED)
        known = Counter(suffix for suffix in below if suffix in suffixes).most_common(1)
        name = f"**/*{known[0][0]}" if known else Path(example).name
        return "is a folder", str(path / name)
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}, which does not exist", example
    return ("is no regular file" if path.exists() else "no such file"), example


def _override(key: str, path: str) -> str:
    """Returns an override of a list of one path, as typed in a POSIX shell."""
    return typed(key, [path])
