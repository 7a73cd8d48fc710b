"""Documentation of config groups, options and fields; source of the reference pages.

A field is documented by the string literal below it, a class by its docstring, an option by the
comment at the head of its YAML file. ``ast`` reads them from the source, so that PyTorch is not
imported. The unit of a field is part of its text: "Memory of one device, in GiB."
"""

import ast
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from scalewise import callback_config, registry
from scalewise.bounded_yaml import load_yaml
from scalewise.config import paths
from scalewise.config.schemas import entry_class, group_types
from scalewise.hpo.config import SearchConfig
from scalewise.hpo.screen import ScreeningDesign
from scalewise.run_config import RunConfig
from scalewise.typed_override import override

PRESET_SUMMARIES = {
    "experiment": "Question and the overrides that answer it.",
    "sweep": "Axes of a multirun.",
}
"""Summaries of the groups that are not fields of a run."""
HYDRA_SUMMARIES = {
    "hydra/sweeper": "Choice of the jobs of a multirun.",
    "hydra/launcher": "Execution of the jobs of a multirun.",
}
"""Summaries of the groups of Hydra plugins."""
GROUP_NAMES = (*paths.GROUPS, *PRESET_SUMMARIES, *HYDRA_SUMMARIES)
"""Groups of the command line, in the order of the defaults list."""
UNITS = (
    "GiB",
    "MiB",
    "MB",
    "GB/s",
    "TFLOP/s",
    "microseconds",
    "seconds",
    "optimizer steps",
    "micro-batches",
    "epochs",
    "tokens/s",
    "tokens",
    "samples",
    "pixels",
    "features",
    "elements",
    "ranks",
    "blocks",
    "US dollars per hour",
    "watts",
)
"""Units in field texts, after ", in"."""
REQUIRED = dataclasses.MISSING
"""Marker of a field without a default."""
_UNIT = re.compile(rf", in ({'|'.join(UNITS)})(?=[\s.,;:])")
_SCHEMA = re.compile(r"/schema/(\w+)/(\w+)@")
_TYPE_NAMES = {type(None): "null", Any: "any value", object: "any value"}


@dataclasses.dataclass(frozen=True)
class AxisOptions:
    """Axes in the file of a sweep."""

    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values by key, such as ``a,b,c`` or ``range(1,9)``."""


@dataclasses.dataclass(frozen=True)
class GridOptions(AxisOptions):
    """Options of ``hydra/sweeper=basic``, which runs all combinations of ``params``."""

    zip: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values by key, of the same number; they vary together."""


@dataclasses.dataclass(frozen=True)
class CasesOptions:
    """Options of ``hydra/sweeper=cases``, which runs named cases and checks their outcomes."""

    cases: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """``overrides``, as on a command line, and ``expect``, the expected outcome, of each case."""
    only: Sequence[str] | None = None
    """Names of the cases to run; null: all."""
    hypothesis: str = ""
    """Expected answer to the question of the sweep."""
    answer: str = ""
    """Template of the answer in the report, in which ``{CASE.memory}``, ``{CASE.time}``,
    ``{CASE.loss}`` and ``{CASE.status}`` are measured values, and ``{CASE.time / OTHER}`` is
    relative to another case. ``{exponent: CASE, CASE, CASE}`` is that of the loss as a power of the
    number of parameters."""


@dataclasses.dataclass(frozen=True)
class PackedOptions:
    """Options of ``hydra/launcher=packed``."""

    slots: int | None = None
    """Number of slots that divide the cores of a CPU; null: one per two cores."""


HYDRA_OPTIONS: Mapping[str, Mapping[str, tuple[str, Sequence[type]]]] = {
    "hydra/sweeper": {
        "basic": ("Grid: all combinations of the values on the command line.", [GridOptions]),
        "cases": ("Named cases with overrides and expected outcomes.", [CasesOptions]),
        "optuna": ("Hyperparameter search with Optuna.", [AxisOptions, SearchConfig]),
        "screen": ("Fractional factorial of factors with two levels.", [ScreeningDesign]),
    },
    "hydra/launcher": {
        "packed": ("Run several jobs at once, as memory and devices allow.", [PackedOptions]),
        "scalewise": ("Run one job after the other.", []),
        "slurm": (
            "Submit the jobs to Slurm; takes the options of hydra-submitit-launcher, such as "
            "`hydra.launcher.partition=gpu`.",
            [],
        ),
    },
}
"""Summary and option classes of Hydra plugins, by group and option."""


@dataclasses.dataclass(frozen=True)
class FieldDoc:
    """One field of a config group or of the run."""

    key: str
    """Override key: ``optimizer.lr``."""
    type: str
    """Type in words: ``int or null``, ``list of str``."""
    text: str
    """Documentation, as one paragraph."""
    default: object
    """Default value; ``REQUIRED`` if there is none."""
    choices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Allowed values with the documentation of each; empty if the type says it all."""

    @property
    def unit(self) -> str:
        """Unit of the value; empty for a number without one."""
        match = _UNIT.search(self.text)
        return match[1] if match else ""

    @property
    def default_text(self) -> str:
        """Default in override syntax; an interpolation as in the config file."""
        if self.default is REQUIRED:
            return "required"
        text = str(self.default)
        return text if "${" in text else override("", self.default)[1:]


@dataclasses.dataclass(frozen=True)
class OptionDoc:
    """One option of a config group: one YAML file."""

    group: str
    """Config group."""
    name: str
    """Option, as in ``GROUP=NAME``."""
    summary: str
    """Comment at the head of the file, as one paragraph."""
    details: str
    """Docstring of the option's class; empty for a file without one."""
    schema: str
    """Name of the option's class in the registry; empty for a file without one."""
    sets: Mapping[str, object]
    """Values that the file sets, by key within the group."""
    fields: tuple[FieldDoc, ...]
    """Every field, with this option's default."""


@dataclasses.dataclass(frozen=True)
class GroupDoc:
    """One config group."""

    name: str
    """Config group, as in ``NAME=OPTION``."""
    summary: str
    """Purpose of the group, in one line."""
    options: tuple[OptionDoc, ...]
    """Options in alphabetical order."""


@cache
def group_summaries() -> Mapping[str, str]:
    """Summary of each group, in the order of the defaults list."""
    texts = {name: field_texts(RunConfig).get(name, "") for name in paths.GROUPS}
    return texts | PRESET_SUMMARIES | HYDRA_SUMMARIES


@cache
def group_doc(name: str) -> GroupDoc:
    """Documentation of a config group."""
    if name in HYDRA_OPTIONS:
        plugins = HYDRA_OPTIONS[name]
        options = tuple(_plugin_doc(name, option, *plugins[option]) for option in plugins)
        return GroupDoc(name, HYDRA_SUMMARIES[name], options)
    registry.import_options()
    options = tuple(_option_doc(name, option) for option in paths.option_names(name))
    return GroupDoc(name, group_summaries()[name], options)


def group_of_key(key: str) -> str:
    """Group of a key: ``hydra/sweeper`` of ``hydra.sweeper.trials``; empty without a group."""
    for name in GROUP_NAMES:
        if key.startswith(f"{name.replace('/', '.')}."):
            return name
    return ""


@cache
def run_fields() -> tuple[FieldDoc, ...]:
    """Fields of a run that belong to no group and that an override can set."""
    sets = load_yaml((paths.project_root() / "conf" / "config.yaml").read_text("utf-8"))
    fields = class_fields(RunConfig, "", sets)
    return tuple(entry for entry in fields if entry.key not in (*paths.GROUPS, *_RECORDED))


_RECORDED = ("choices", "overrides")
"""Fields of a run that scalewise fills in from the command line."""


def default_options() -> Mapping[str, str]:
    """Default option of each group in the files of conf/; the first one for callbacks."""
    folder = paths.project_root() / "conf"
    chosen = {
        key: value
        for name in ("config.yaml", "hydra_options.yaml")
        for entry in load_yaml((folder / name).read_text("utf-8"))["defaults"]
        if isinstance(entry, dict)
        for key, value in entry.items()
    }
    options = {
        group: name[0] if isinstance(name, list) else name
        for group, name in chosen.items()
        if group in paths.GROUPS
    }
    launcher = chosen["override /hydra/launcher"]
    return options | {"hydra/sweeper": "basic", "hydra/launcher": launcher}


def schema_fields(group: str, schema: str) -> tuple[FieldDoc, ...]:
    """Fields of a registered class, with the defaults of the class."""
    return class_fields(registry.OPTIONS[group][schema], f"{group}.", {})


def class_fields(cls: type, prefix: str, sets: Mapping[str, object]) -> tuple[FieldDoc, ...]:
    """Fields of a config class; values in ``sets`` replace the defaults of the class.

    Fields of the entries of a mapping follow it, with ``NAME`` in their keys.
    """
    return tuple(_iter_fields(cls, prefix, sets))


def _iter_fields(cls: type, prefix: str, sets: Mapping[str, object]) -> Iterator[FieldDoc]:
    texts, hints = field_texts(cls), typing.get_type_hints(cls)
    for entry in dataclasses.fields(cls):
        key, hint = f"{prefix}{entry.name}", hints[entry.name]
        text, default = texts.get(entry.name, ""), sets.get(entry.name, _default(entry))
        yield FieldDoc(key, type_text(hint), text, default, _choices(hint))
        if (entries := entry_class(hint)) is not None:
            yield from _iter_fields(entries, f"{key}.NAME.", {})


def field_texts(cls: type) -> dict[str, str]:
    """Documentation by field; a subclass overrides the texts of its base class."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ != "builtins":
            texts |= _literals(inspect.getsourcefile(base) or "").get(base.__qualname__, {})
    return texts


def type_text(hint: Any) -> str:
    """Describe a type in words: ``int or null``, ``list of str``, ``bool``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if set(arguments) == {int, str}:  # int | str fields accept this word only
        return "int or auto"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_text, arguments))
    if origin is tuple:
        return f"list of {type_text(arguments[0])}"
    if entry_class(hint) is not None:
        return "entries by name"
    if origin is Mapping:
        return "mapping of {} to {}".format(*map(type_text, arguments))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "choice"
    if group := group_types().get(hint):
        return f"option of {group}"
    return _TYPE_NAMES.get(hint) or str(hint.__name__)


def head_comment(text: str) -> list[str]:
    """Lines of the comment at the head of a YAML file, without ``@package``."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").strip())
    return lines


def _option_doc(group: str, name: str) -> OptionDoc:
    file = paths.option_folder(group) / f"{name}.yaml"
    lines = head_comment(file.read_text("utf-8"))
    lines = [f"`{line}`" if line.startswith("scalewise ") else line for line in lines]
    schema, sets = _file_values(file, group)
    cls = registry.OPTIONS.get(group, {}).get(schema)
    if cls is not None:
        fields = class_fields(cls, f"{group}.", sets)
    else:
        fields = tuple(_callback_fields(sets)) if group == "callbacks" else ()
    details = inspect.cleandoc(cls.__doc__ or "") if cls else ""
    return OptionDoc(group, name, " ".join(lines), details, schema, sets, fields)


def _plugin_doc(group: str, name: str, summary: str, classes: Sequence[type]) -> OptionDoc:
    prefix = f"{group.replace('/', '.')}."
    fields = tuple(entry for cls in classes for entry in class_fields(cls, prefix, {}))
    return OptionDoc(group, name, summary, "", "", {}, fields)


def _file_values(file: Path, group: str) -> tuple[str, dict[str, object]]:
    """Schema that a file extends, and the values that it sets."""
    content = load_yaml(file.read_text("utf-8")) or {}
    schema, sets = "", dict[str, object]()
    for entry in content.pop("defaults", []):
        if not isinstance(entry, str) or entry == "_self_":
            continue
        if match := _SCHEMA.match(entry):
            schema = match[2]
        elif "/" not in entry:  # another option of the group
            schema, sets = _file_values(file.with_name(f"{entry}.yaml"), group)
    return schema, sets | content


def _callback_fields(sets: Mapping[str, object]) -> Iterator[FieldDoc]:
    for name, arguments in sets.items():
        if not isinstance(arguments, dict):
            continue
        target = str(arguments["_target_"])
        if target in callback_config.BUILTIN_CALLBACKS:
            yield from class_fields(
                callback_config.BUILTIN_CALLBACKS[target], f"callbacks.{name}.", arguments
            )
            continue
        for key, value in arguments.items():
            if key != "_target_":
                text = f"Argument ``{key}`` of ``{target}``."
                yield FieldDoc(f"callbacks.{name}.{key}", type(value).__name__, text, value)


def _default(entry: "dataclasses.Field[Any]") -> object:
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return entry.default


def _choices(hint: Any) -> Mapping[str, str]:
    """Allowed values of an enum or a bool, with the documentation of each."""
    for kind in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if kind is bool:
            return {"true": "", "false": ""}
        if isinstance(kind, type) and issubclass(kind, Enum):
            texts = _literals(inspect.getsourcefile(kind) or "").get(kind.__qualname__, {})
            return {name: texts.get(name, "") for name in kind.__members__}
    return {}


@cache
def _literals(file: str) -> Mapping[str, Mapping[str, str]]:
    """String literals below the fields of each class of a file, each as one paragraph."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(file).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            texts[node.name] = dict(_field_literals(node.body))
    return texts


def _field_literals(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, literal in pairwise(body):
        if not isinstance(field, ast.Assign | ast.AnnAssign) or not isinstance(literal, ast.Expr):
            continue
        target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
        text = literal.value
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
            yield target.id, " ".join(str(text.value).split())
