"""The generated reference pages list every option and key."""

import html
import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hydra.core.config_store import ConfigStore

import scalewise
from scalewise.commands.usage import COMMANDS
from scalewise.config import option_docs, paths, schemas

HOOK = Path(__file__).parents[3] / "docs" / "hooks" / "reference.py"


def load_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_hook", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_hook()
PAGES: dict[str, str] = reference.pages()


def tables(page: str) -> list[list[list[str]]]:
    """Tables of a page as rows of cells, split as in Markdown."""
    rows_by_table: list[list[list[str]]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            rows_by_table[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows_by_table[-1]:
            rows_by_table.append([])
    return [table for table in rows_by_table if table]


def option_names(group: str) -> list[str]:
    """Options of a group: files, or entries of Hydra's ConfigStore."""
    if group not in option_docs.HYDRA_SUMMARIES:
        return paths.option_names(group)
    schemas.store_schemas()
    nodes = ConfigStore.instance().repo["hydra"][group.split("/")[1]].values()
    return sorted(it.name.removesuffix(".yaml") for it in nodes if it.provider == "scalewise")


def test_reference_has_a_page_per_group_run_cli_and_api() -> None:
    names = [*option_docs.GROUP_NAMES, "cli", "api", "run"]
    assert set(PAGES) == {reference.group_path(name) for name in names}


@pytest.mark.parametrize("path", PAGES)
def test_reference_cells_do_not_break_tables(path: str) -> None:
    page_tables = tables(PAGES[path])
    assert page_tables
    for table in page_tables:
        head, rule, *rows = table
        assert set(rule) == {"---"}, head
        assert rows, head
        for row in rows:
            assert len(row) == len(head), row
            assert not re.search(r"[`*_\[\]<>]", re.sub(r"</?code>|<br>", "", "".join(row))), row


@pytest.mark.parametrize("group", option_docs.GROUP_NAMES)
def test_reference_lists_every_option_and_key(group: str) -> None:
    page = html.unescape(PAGES[reference.group_path(group)])
    options, *fields = tables(PAGES[reference.group_path(group)])
    listed_options = [html.unescape(row[0]) for row in options[2:]]
    assert listed_options == [f"<code>{name}</code>" for name in option_names(group)]
    listed_keys = {html.unescape(row[0]) for table in fields for row in table[2:]}
    for option in option_docs.group_doc(group).options:
        assert {f"<code>{entry.key}</code>" for entry in option.fields} <= listed_keys, option
        for entry in option.fields:
            assert entry.text.split("``")[0] in page, entry.key


def test_reference_keys_have_type_default_and_unit() -> None:
    rows = [row for table in tables(PAGES["reference/trainer.md"])[1:] for row in table[2:]]
    row = next(row for row in rows if "max&#95;steps" in row[0])
    assert row[1:] == [
        "<code>1000</code><br>int or null<br>optimizer steps",
        "Training length, in optimizer steps.",
    ]


def test_reference_cli_page_lists_every_command() -> None:
    page = PAGES["reference/cli.md"]
    assert all(f"## scalewise {command}\n" in page for command in COMMANDS)
    assert page.count("```") == 2 * (1 + len(COMMANDS))


def test_reference_api_page_lists_every_name() -> None:
    page = PAGES["reference/api.md"]
    assert all(f"## scalewise.{name}\n" in page for name in scalewise.__all__)
    assert (
        "compose(overrides: Iterable[str] = (), *, check_machine: bool = True) -> RunConfig" in page
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a | b\nc", "a &#124; b c"),
        ("see ``a|b`` or `x_y`.", "see <code>a&#124;b</code> or <code>x&#95;y</code>."),
        ("<bos> *all* [1]", "&#60;bos&#62; &#42;all&#42; &#91;1&#93;"),
    ],
)
def test_reference_prose_keeps_inline_code_only(text: str, expected: str) -> None:
    assert reference.prose(text) == expected


def test_reference_navigation_has_every_page() -> None:
    config = SimpleNamespace(nav=[{"Home": "index.md"}, {"Reference": ["reference/index.md"]}])
    navigation = reference.on_config(config).nav
    assert set(re.findall(r"reference/[\w-]+\.md", str(navigation))) == {
        *PAGES,
        "reference/index.md",
    }
