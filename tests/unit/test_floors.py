"""The floors of the house: who may import whom, read off the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "scalewise"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "lightning", "hydra", "omegaconf", "wandb", "peft"}
FLOORS = {
    0: (
        "atomic",
        "bounded_yaml",
        "compat",
        "errors",
        "failures",
        "lazy_dispatch",
        "console",
        "plain_console",
        "redaction",
        "regular_files",
        "record_types",
        "run_files",
        "metric_names",
        "suggestions",
        "typed_override",
        "units",
    ),
    1: (
        "adapters",
        "quantization",
        "torch_compile",
        "activation_checkpointing",
        "registry",
        "renamed_targets",
        "callback_config",
        "checkpoint_config",
        "launch_config",
        "plan_config",
        "tracking_config",
        "hardware",
        "precision",
        "optimizers",
        "lr_schedules",
        "objectives",
        "parallelism",
        "trainer_config",
        "run_config",
        "validation",
        "inputs",
        "hpo.space",
        "models.build",
        "models.linear_ops",
        "models.op_graph",
        "models.decoder.adapter_ops",
        "models.decoder.attention_ops",
        "models.decoder.hf_config_check",
        "models.decoder.op_graph",
        "models.hf.hub",
        "models.hf.inspect",
    ),
    2: (
        "planner",
        "adapters.dora_modules",
        "adapters.peft_export",
        "adapters.peft_export_hf",
        "adapters.ia3_modules",
        "adapters.lora_modules",
        "adapters.virtual_tokens",
        "precision.fp8_linear",
        "quantization.fake",
        "quantization.packed_linear",
        "objectives.chunked_loss",
        "objectives.losses",
        "optimizers.low_bit_adam",
        "optimizers.cpu_offload_adam",
        "optimizers.paged",
        "optimizers.implementations",
        "checkpoints",
        "validation.adapter_resume",
        "measure",
        "tracking",
        "hpo",
        "models",
        "data.dataloader",
    ),
    3: ("strategies",),
    4: ("training", "tracing"),
    5: ("launch",),
    6: ("reports", "bench", "evaluation", "export"),
    7: ("commands", "api", "cli", "__main__", ""),
}


def name_of(path: Path) -> str:
    """Returns a module's name without the package's: ``models.decoder.spec``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def floor_of(module: str) -> int | None:
    """Returns the floor of a module; None for the config room, which stands aside."""
    leaf = module.rpartition(".")[2]
    room = module.split(".")[0]
    if (leaf in ("config", "base") and room != "strategies") or (
        room == "data" and leaf != "dataloader"
    ):
        return 1
    matches = [
        (len(prefix), floor)
        for floor, prefixes in FLOORS.items()
        for prefix in prefixes
        if module == prefix or (prefix and module.startswith(f"{prefix}."))
    ]
    if not matches and module.split(".")[0] == "config":
        return None
    return max(matches)[1]


def imports(path: Path, *, deep: bool) -> Iterator[str]:
    """Yields what a file imports at its head or, ``deep``, anywhere but for type checkers."""
    left = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if is_module(whole) else str(node.module)
        elif deep or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.AST)]


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def libraries(path: Path, *, deep: bool) -> set[str]:
    """Libraries that a file imports, also by ``scalewise.compat.LIBRARY``."""
    names = {name.removeprefix("scalewise.compat.") for name in imports(path, deep=deep)}
    return {name.split(".")[0].split("_")[0] for name in names}


def own(path: Path, *, deep: bool) -> list[str]:
    found = [name for name in imports(path, deep=deep) if name.split(".")[0] == "scalewise"]
    return sorted({name.removeprefix("scalewise").removeprefix(".") for name in found})


every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: name_of(path) or "scalewise")


@every_file
def test_imports_only_what_stands_below(path: Path) -> None:
    name = name_of(path)
    floor = floor_of(name)
    limit = 1 if floor is None else floor
    above = [other for other in own(path, deep=False) if (floor_of(other) or 0) > limit]
    assert above == []


@every_file
def test_only_the_doors_import_the_config_room(path: Path) -> None:
    if floor_of(name_of(path)) not in (None, 7):
        assert [other for other in own(path, deep=True) if floor_of(other) is None] == []


@every_file
def test_a_spec_is_light(path: Path) -> None:
    floor = floor_of(name_of(path))
    if floor in (0, 1) and not name_of(path).startswith("compat."):
        assert libraries(path, deep=False) & HEAVY == set()
    if floor == 0:
        assert [other for other in own(path, deep=True) if floor_of(other) != 0] == []


@every_file
def test_hydra_lives_in_one_room(path: Path) -> None:
    if floor_of(name_of(path)) is not None and not name_of(path).startswith("compat."):
        assert libraries(path, deep=True) & {"hydra", "omegaconf"} == set()


def test_reports_know_folders_and_not_the_code_that_wrote_them() -> None:
    known = {n for path in (PACKAGE / "reports").rglob("*.py") for n in own(path, deep=True)}
    console = {"errors", "failures", "console", "redaction", "typed_override", "units"}
    console |= {"regular_files", "metric_names", "record_types", "run_files"}
    assert {name.split(".")[0] for name in known} <= {"reports", "tracking"} | console


@pytest.mark.parametrize(
    ("module", "floor"),
    [
        ("errors", 0),
        ("models.decoder.config", 1),
        ("models.decoder.model", 2),
        ("validation.mesh_rules", 1),
        ("data.text", 1),
        ("data.dataloader", 2),
        ("launch_config", 1),
        ("strategies.base", 3),
        ("launch.job", 5),
        ("tracking.wandb_session", 2),
        ("registry", 1),
        ("config.app", None),
        ("", 7),
    ],
)
def test_the_floors_are_these(module: str, floor: int | None) -> None:
    assert floor_of(module) == floor
