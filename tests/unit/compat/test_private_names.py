"""Private names of libraries are used in scalewise.compat only, and each has a canary test."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src"
COMPAT = SOURCE / "scalewise/compat"
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if COMPAT not in path.parents]
LIBRARIES = {
    *("accelerate", "bitsandbytes", "datasets", "deepspeed", "huggingface_hub", "hydra"),
    *("lightning", "omegaconf", "optuna", "peft", "safetensors", "schedulefree", "submitit"),
    *("tokenizers", "torch", "torchao", "transformers", "triton", "wandb", "wandb_workspaces"),
}
STANDARD_LIBRARY = {"_exit", "_run_exitfuncs", "_open", "_actions"}
"""Private names of ``os``, ``atexit``, ``logging`` and ``argparse``."""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def defined_names(tree: ast.AST) -> set[str]:
    """Names of functions, classes, variables and attributes that a file defines."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            names.add(node.attr)
    return names


def library_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name and full path of each library import of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in LIBRARIES:
                    yield alias.asname or alias.name.split(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def private_uses(text: str, inherited_names: set[str]) -> list[str]:
    """Uses of private library names, with their lines.

    Attributes of ``self`` may be defined in another file of scalewise (``inherited_names``);
    other private attributes must be defined in the file itself.
    """
    tree = ast.parse(text)
    local_names, library_imports = defined_names(tree), dict(library_names(tree))
    uses = [f"import {path}" for path in library_imports.values() if is_private(path)]
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=base, attr=name):
                is_found = is_private(name) and is_foreign(
                    name, base, local_names, inherited_names, library_imports
                )
            case ast.Assign(targets=targets):
                is_found = any(
                    isinstance(it, ast.Attribute) and root(it) in library_imports for it in targets
                )
            case ast.Call(args=[owner, ast.Constant(value=str(name)), *_], func=function):
                is_attribute_lookup = ast.unparse(function) in ("getattr", "hasattr")
                is_found = (
                    is_private(name) if is_attribute_lookup else root(owner) in library_imports
                )
            case ast.Constant(value=str(value)):
                is_found = root_name(value) in LIBRARIES and " " not in value and is_private(value)
            case _:
                is_found = False
        if is_found:
            uses.append(f"line {node.lineno}: {ast.unparse(node)}")
    return sorted(set(uses))


def is_foreign(
    name: str,
    base: ast.expr,
    local_names: set[str],
    inherited_names: set[str],
    library_imports: dict[str, str],
) -> bool:
    """Whether a private attribute is defined by a library."""
    if ast.unparse(base) in library_imports:
        return True
    is_self = ast.unparse(base) in ("self", "cls", "super()")
    return name not in local_names | STANDARD_LIBRARY | (inherited_names if is_self else set())


def root(node: ast.expr) -> str:
    """First name of an expression such as ``torch.nn.Module``."""
    return root_name(ast.unparse(node))


def root_name(text: str) -> str:
    return re.split(r"[^\w]", text)[0]


INHERITED_NAMES = {
    name for path in FILES for name in defined_names(ast.parse(path.read_text("utf-8")))
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_private_names_are_used_in_compat_only(path: Path) -> None:
    assert private_uses(path.read_text("utf-8"), INHERITED_NAMES) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_leaves",
        "from hydra import _internal",
        "import torch\nx = torch._foreach_mul_",
        "def f(tensor): return tensor._version",
        "class A:\n    def f(self): return self._init_group",
        "class A:\n    def f(self): return super()._apply",
        "import torch\ntorch.compile = None",
        "from hydra.core import utils\nutils.Path = None",
        "from torch import nn\nsetattr(nn.Module, 'x', 1)",
        "from torch import nn\npatch.object(nn.Module, 'x', 1)",
        "def f(dataset): return getattr(dataset, '_distributed', None)",
        "import importlib\nimportlib.import_module('torch._dynamo')",
    ],
)
def test_private_uses_are_detected(text: str) -> None:
    assert private_uses(text, {"_own"}) != []


@pytest.mark.parametrize(
    "text",
    [
        "from torch import nn\nx = nn.Linear(1, 1).weight",
        "class A:\n    def __init__(self): self._x = 1\n    def f(self, other): return other._x",
        "class A:\n    def f(self): return self._own",
        "import os\nos._exit(1)",
        "x = object().__class__",
    ],
)
def test_own_private_names_are_accepted(text: str) -> None:
    assert private_uses(text, {"_own"}) == []


def test_every_name_of_compat_has_a_canary_test() -> None:
    tested = {
        node.attr
        for path in Path(__file__).parent.glob("test_compat*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
    }
    modules = [path for path in COMPAT.glob("*.py") if path.name != "__init__.py"]
    for path in modules:
        (exports,) = (
            set(ast.literal_eval(node.value))
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        assert exports <= tested, f"{path.name}: without a test: {exports - tested}"
    assert len(modules) > 5
