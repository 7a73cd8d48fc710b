"""MkDocs hook that generates the reference pages from the source: nothing of them is committed.

One page per config group, one of the run's own keys, one of the command line and one of the Python
API. ``on_config`` adds them to the section Reference of the navigation.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import scalewise
from scalewise import errors
from scalewise.commands import usage
from scalewise.config import option_docs
from scalewise.config.option_docs import FieldDoc, GroupDoc, OptionDoc
from scalewise.typed_override import override

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

SECTION = "Reference"
_PROPERTY_TYPES = (property, cached_property)
_CODE = re.compile(r"(`+)(.+?)\1")
_SPECIAL = re.compile(r"[|*_\[\]<>&`\\{}]")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation."""
    section = next(it[SECTION] for it in config.nav if isinstance(it, dict) and SECTION in it)
    groups = [{name: group_path(name)} for name in option_docs.GROUP_NAMES]
    section += [
        {"Command line": "reference/cli.md"},
        {"Python API": "reference/api.md"},
        {"Keys of a run": "reference/run.md"},
        {"Config groups": groups},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the content of the generated pages."""
    from mkdocs.structure.files import File

    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def pages() -> dict[str, str]:
    """Markdown of every reference page by its path."""
    content = {
        "reference/cli.md": _cli_page(),
        "reference/api.md": _api_page(),
        "reference/run.md": _run_page(),
    }
    for name in option_docs.GROUP_NAMES:
        content[group_path(name)] = _group_page(option_docs.group_doc(name))
    return {path: "\n".join(lines) + "\n" for path, lines in content.items()}


def group_path(group: str) -> str:
    """Path of the page of a config group."""
    return f"reference/{group.replace('/', '-')}.md"


def escape(text: str) -> str:
    """Escape the characters of Markdown and HTML in ``text``, and join its lines."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", " ".join(text.split()))


def code(text: str) -> str:
    """Inline code that is valid in a cell of a table."""
    return f"<code>{escape(text)}</code>"


def prose(text: str) -> str:
    """One line of Markdown: ``text`` escaped, except for its inline code."""
    parts, end = [], 0
    for match in _CODE.finditer(text):
        parts += [escape_keeping_spaces(text[end : match.start()]), code(match[2])]
        end = match.end()
    return "".join([*parts, escape_keeping_spaces(text[end:])])


def escape_keeping_spaces(text: str) -> str:
    """Escape ``text``; white space at its start or end becomes one space."""
    inner = escape(text)
    before, after = text[:1].isspace(), text[-1:].isspace() and bool(inner)
    return f"{' ' * before}{inner}{' ' * after}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table and an empty line."""
    head = list(head)
    yield _row(head)
    yield _row("---" for _ in head)
    yield from map(_row, rows)
    yield ""


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell or ' ' for cell in cells)} |"


def _group_page(group: GroupDoc) -> Iterator[str]:
    name = option_docs.default_options().get(group.name)
    default = f" The default is {code(f'{group.name}={name}')}." if name else ""
    yield from (f"# {group.name}", "", prose(group.summary) + default, "")
    yield from (f"Choose an option by {code(f'{group.name}=OPTION')}.", "", "## Options", "")
    head, rows = ["Option", "Description"], [_option_row(it) for it in group.options]
    if group.name in option_docs.PRESET_SUMMARIES | option_docs.HYDRA_SUMMARIES:
        rows = [row[:2] for row in rows]
    else:
        head.append("Sets")
    yield from table(head, rows)
    by_schema: dict[str, list[OptionDoc]] = {}
    for option in group.options:
        by_schema.setdefault(option.schema or option.name, []).append(option)
    for options in by_schema.values():
        if not options[0].fields:
            continue
        names = ", ".join(option.name for option in options)
        yield from (f"## Keys of {escape(names)}", "", *_paragraphs(options[0].details))
        if len(options) == 1:
            yield from _field_table(options[0].fields)
        else:
            yield from _field_table(option_docs.schema_fields(group.name, options[0].schema))


def _option_row(option: OptionDoc) -> list[str]:
    """Cells of an option: its name, its summary, and the keys that it sets."""
    values = option.sets if option.schema else {}
    sets = " ".join(code(override(key, value)) for key, value in values.items())
    return [code(option.name), prose(option.summary), sets]


def _field_table(entries: Iterable[FieldDoc]) -> Iterator[str]:
    yield from table(
        ("Key", "Default, type, unit", "Description"),
        (
            (
                code(entry.key),
                "<br>".join(
                    filter(None, (code(entry.default_text), escape(entry.type), entry.unit))
                ),
                _description(entry),
            )
            for entry in entries
        ),
    )


def _description(entry: FieldDoc) -> str:
    choices = entry.choices if entry.type != "bool" else {}
    lines = [
        f"{code(name)}: {prose(text)}" if text else code(name) for name, text in choices.items()
    ]
    return "<br>".join([prose(entry.text), *lines])


def _run_page() -> Iterator[str]:
    yield from ("# Keys of a run", "", "Keys that belong to no config group.", "")
    yield from _field_table(option_docs.run_fields())


def _cli_page() -> Iterator[str]:
    yield from ("# Command line", "", *_text_block(usage.general_help()))
    for command in usage.COMMANDS:
        yield from (f"## scalewise {command}", "", *_text_block(usage.command_help(command)))
    yield from ("## Exit codes", "")
    codes: Mapping[str, int] = errors.EXIT_CODES
    rows = [(code(str(number)), code(outcome)) for outcome, number in codes.items()]
    found = f"a difference that {code('scalewise verify')} finds"
    rows.append((code(str(errors.DIFFERENT)), found))
    yield from table(("Exit code", "Outcome"), [*rows, (escape("128 + n"), "signal n")])


def _text_block(lines: Iterable[str]) -> Iterator[str]:
    yield from ("```text", *lines, "```", "")


def _api_page() -> Iterator[str]:
    yield from ("# Python API", "", "```python", "import scalewise", "```", "")
    for name in scalewise.__all__:
        entry = getattr(scalewise, name)
        yield from (f"## scalewise.{name}", "")
        if inspect.isclass(entry):
            yield from _paragraphs(inspect.getdoc(entry) or "")
            yield from _class_tables(entry)
        else:
            yield from ("```python", f"{name}{_signature(entry)}", "```", "")
            yield from _paragraphs(inspect.getdoc(entry) or "")


def _class_tables(cls: type) -> Iterator[str]:
    """Yield tables of the fields, and of the properties and methods, of a class."""
    if dataclasses.is_dataclass(cls):
        texts = option_docs.field_texts(cls)
        rows = ((entry.name, str(entry.type), texts.get(entry.name, "")) for entry in _fields(cls))
        yield from table(
            ("Field", "Type", "Description"),
            ((code(name), code(kind), prose(text)) for name, kind, text in rows),
        )
    members = [
        _member_row(name, member)
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (isinstance(member, _PROPERTY_TYPES) or inspect.isroutine(member))
    ]
    if members:
        yield from table(("Member", "Description"), members)


def _fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _member_row(name: str, member: object) -> tuple[str, str]:
    function = getattr(member, "__func__", member)
    signature = "" if isinstance(member, _PROPERTY_TYPES) else _signature(function)
    summary = (inspect.getdoc(function) or "").split("\n\n")[0]
    return code(f"{name}{signature}"), prose(" ".join(summary.split()))


class _Annotation(str):
    """Annotation that a signature prints without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(function: Any) -> str:
    """Signature without ``self`` and ``cls``, with the annotations of the source."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_as_written(parameter.annotation))
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    result = _as_written(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=result))


def _as_written(annotation: object) -> object:
    """Annotation without quotes and without module names."""
    if annotation is inspect.Parameter.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _Annotation(re.sub(r"(\w+\.)+", "", text))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in filter(None, text.split("\n\n")):
        yield from (prose(" ".join(paragraph.split())), "")
