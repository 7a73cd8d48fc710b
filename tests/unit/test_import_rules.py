"""Rules on imports that the contracts of import-linter in ``pyproject.toml`` cannot express."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import grimp
import networkx as nx
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGES = ("scalewise", "hydra_plugins")
OWN_PREFIXES = ("scalewise.", "hydra_plugins.scalewise_")
FILES = sorted(SOURCE.rglob("*.py"))
LOCAL_IMPORTS = (
    "scalewise/__init__.py",
    "scalewise/api.py",
    "scalewise/cli.py",
    "scalewise/commands/",
)
"""Modules with local imports of commands, of the API or of reports."""
PLUGINS = "hydra_plugins/"
"""Hydra imports all plugins in every command."""
CONFIGS = "Configs import no torch and no builder"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def local_imports(path: Path) -> list[str]:
    """Modules of scalewise that functions of a file import, with their lines."""
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    imports: set[str] = set()
    for node in (child for function in functions for child in ast.walk(function)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        own_imports = (name for name in names if f"{name}.".startswith(OWN_PREFIXES))
        imports |= {f"line {node.lineno}: {name}" for name in own_imports}
    return sorted(imports)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_of_scalewise_stand_at_the_top(path: Path) -> None:
    if not str(path.relative_to(SOURCE)).startswith((*LOCAL_IMPORTS, PLUGINS)):
        assert local_imports(path) == []


def test_local_imports_are_detected(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def f():\n    if True:\n        from scalewise.cli import main\n")
    assert local_imports(file) == ["line 3: scalewise.cli"]


def test_imports_have_no_cycles() -> None:
    """Includes local and ``TYPE_CHECKING`` imports."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = nx.DiGraph(
        (module, imported_module)
        for module in graph.modules
        for imported_module in graph.find_modules_directly_imported_by(module)
    )
    assert len(imports) > len(FILES) / 2
    cycles = [sorted(cycle) for cycle in nx.strongly_connected_components(imports)]
    assert [cycle for cycle in cycles if len(cycle) > 1] == []


def test_every_option_module_is_in_the_contract_of_configs() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (it for it in contracts["contracts"] if it["name"] == CONFIGS)
    graph = grimp.build_graph("scalewise", cache_dir=None)
    sources = {
        module
        for expression in contract["source_modules"]
        for module in graph.find_matching_modules(expression)
    }
    options = {
        module_name(path) for path in FILES if "\n@register_option(" in path.read_text("utf-8")
    }
    assert len(options) > 20
    modules_without_contract = {
        module
        for module in options
        if not any(module == source or module.startswith(f"{source}.") for source in sources)
    }
    assert modules_without_contract == set()


def test_test_files_have_different_names() -> None:
    """pytest imports test files of folders without ``__init__.py`` by their names alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
