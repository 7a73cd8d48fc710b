"""Declared types of the JSON and YAML files in a run or sweep folder, and their validation.

Readers rely on these types after validation. Undeclared keys are allowed, because later versions
add keys. Integers fit into 64 bits, numbers are below 1e100; integers are non-negative.
"""

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from scalewise.errors import format_value

Group = Mapping[str, object]
"""The fields of a config in ``resolved.yaml``."""


class SettingRecord(TypedDict):
    """A setting that differs from the default."""

    key: str
    default: object
    value: object


class SuggestionRecord(TypedDict):
    """An override that may fix a failure, and the reason."""

    override: str
    why: str


class WandbRecord(TypedDict, total=False):
    """A W&B run, or the report of a sweep."""

    mode: str
    id: str | None
    entity: str | None
    project: str | None
    group: str | None
    url: str | None
    folder: str | None
    resumed_from: str | None
    report: str | None


class MachineRecord(TypedDict, total=False):
    """The machine of a run."""

    device: str
    devices: int
    processor: str
    cores: int
    memory_bytes: int
    system: str


class MicroBatchRecord(TypedDict, total=False):
    """Resolved value of ``trainer.micro_batch=auto``; empty for a fixed number."""

    rows: int
    how: str


class StatusRecord(TypedDict, total=False):
    """``status.json``, as ``scalewise.launch.status_file.Status`` writes it."""

    verb: str
    name: str
    question: str
    command: str
    choices: Mapping[str, str]
    overrides: list[str]
    varied: Mapping[str, str]
    changed: list[SettingRecord]
    world_size: int
    config_hash: str | None
    started: str
    status: str
    reason: str
    exit_code: int | None
    ended: str | None
    seconds: float
    attempts: int
    rank: int | None
    log_tail: list[str]
    cures: list[SuggestionRecord]
    resumed_from: str | None
    micro_batch: MicroBatchRecord
    process: int
    host: str
    machine: MachineRecord
    versions: Mapping[str, str]
    git_commit: str | None
    git_dirty: bool | None
    wandb: WandbRecord


class ProcessRecord(TypedDict, total=False):
    """The process that drives a sweep; ``started`` in seconds since 1970, or as ISO 8601."""

    pid: int
    host: str
    started: float | str


class Subfolder(str):
    """A relative path that stays inside of its folder."""

    __slots__ = ()


class JobRecord(TypedDict):
    """A job in ``sweep.json``."""

    number: int
    folder: Subfolder
    status: str
    varied: Mapping[str, str]
    planned_folder: NotRequired[Subfolder]
    config_hash: NotRequired[str]
    overrides: NotRequired[list[str]]
    reason: NotRequired[str]


class CaseRecord(TypedDict):
    """A case of a sweep of cases in ``sweep.json``."""

    expect: Mapping[str, object]
    plan: str


class _Jobs(TypedDict):
    jobs: list[JobRecord]


class SweepRecord(_Jobs, total=False):
    """``sweep.json``."""

    name: str
    question: str
    hypothesis: str
    answer: str
    command: str
    verb: str
    started: str
    ended: str | None
    reference: int | None
    process: ProcessRecord
    varying: Mapping[str, list[str]]
    wandb: WandbRecord
    cases: Mapping[str, CaseRecord]


class CollectiveRecord(TypedDict):
    """A collective that the parallelism strategy declares for a step."""

    kind: str
    axes: list[str]
    what: str
    bytes: float
    count: float


_PlanMetrics = TypedDict(
    "_PlanMetrics", {"plan/peak_bytes": float | None, "plan/step_s": float | None}, total=False
)


class PlanRecord(_PlanMetrics, total=False):
    """``plan.json``: predicted bytes of the device with the highest peak, and seconds of a step."""

    steps: int
    fullest: str
    ledger: Mapping[str, float]
    phases: Mapping[str, float]
    step_parts: Mapping[str, float | None]
    collectives: list[CollectiveRecord]
    limit_bytes: float | None


class SummaryRecord(TypedDict, total=False):
    """``summary.json``."""

    parameters: int | None
    steps: int | None
    tokens: int | None
    flops_per_token: float | None
    global_batch: int | None
    sequence: int | None
    window: str
    notes: list[str]
    goodput: Mapping[str, float | None]
    metrics: Mapping[str, float | None]


class InputsRecord(TypedDict, total=False):
    """``inputs.json``."""

    launch_folder: str
    run_folder: str
    digests: Mapping[str, str]


class FileRecord(TypedDict):
    """Size and checksum of a file of a checkpoint."""

    bytes: int
    crc32: int


class ManifestRecord(TypedDict, total=False):
    """``manifest.json`` of a checkpoint."""

    format: str
    version: int
    step: int
    files: Mapping[str, FileRecord]


BestRecord = TypedDict("BestRecord", {"step": int, "val/loss": float})
"""``best.json``: the checkpoint of the lowest validation loss."""


class TrialRecord(TypedDict):
    """``trial.json``, as ``scalewise.hpo.storage.TrialLink`` writes it."""

    storage: str
    study: str
    trial: int
    pruner: str
    metric: str


class PublishedRecord(TypedDict, total=False):
    """``wandb/published.json``: the W&B run and digests of the uploaded files."""

    path: str
    files: Mapping[str, str]


class ResolvedRecord(TypedDict, total=False):
    """``resolved.yaml``: a config per group, which validates its own fields when it is built."""

    model: Group
    data: Group
    objective: Group
    parallelism: Group
    precision: Group
    quantization: Group
    optimizer: Group
    schedule: Group
    adapter: Group
    memory: Group
    compile: Group
    trainer: Group
    checkpoint: Group
    tracking: Group
    launch: Group
    hardware: Group
    plan: Group
    callbacks: Group
    name: str
    question: str
    seed: int
    resume: str | None
    trusted_packages: list[str]
    choices: Mapping[str, str]
    overrides: list[str]


RECORDS: Mapping[str, Any] = {
    "status.json": StatusRecord,
    "sweep.json": SweepRecord,
    "plan.json": PlanRecord,
    "summary.json": SummaryRecord,
    "inputs.json": InputsRecord,
    "manifest.json": ManifestRecord,
    "best.json": BestRecord,
    "facts.json": WandbRecord,
    "trial.json": TrialRecord,
    "published.json": PublishedRecord,
    "jobs.json": Mapping[str, str],
    "resolved.yaml": ResolvedRecord,
}
"""Declared type by file name."""

_TYPE_NAMES: Mapping[object, str] = {
    str: "text",
    Subfolder: "a folder in this folder",
    int: "an integer of 0 or more",
    float: "a number below 1e100",
    bool: "true or false",
    NoneType: "null",
    list: "a list",
}
_MAX_INTEGER = 2**63
_MAX_NAME = 255
"""Maximum length of a file name on common file systems."""
_MAX_NUMBER = 1e100
"""Bound of numbers, so that sums, products and percentages of them are finite."""


def type_mismatches(value: object, declared: Any, key: str = "") -> Iterator[str]:
    """Yield a description of each value that does not have its declared type.

    Args:
        value: Plain content: mappings, lists, text, numbers, booleans, None.
        declared: A ``TypedDict``, ``Mapping[str, T]``, ``list[T]``, ``object``, a scalar type, or
            a union of scalar types.
        key: The dotted key of ``value`` in its file.
    """
    origin, arguments = get_origin(declared), get_args(declared)
    prefix = f"{key}." if key else ""
    if is_typeddict(declared) and isinstance(value, dict):
        for name in sorted(declared.__required_keys__ - value.keys()):
            yield f"{prefix}{name} is missing"
        for name, kind in _field_types(declared).items():
            if name in value:
                yield from type_mismatches(value[name], kind, f"{prefix}{name}")
    elif origin is Mapping and isinstance(value, dict):
        for name, entry in value.items():
            yield from type_mismatches(name, arguments[0], f"a key of {key}")
            yield from type_mismatches(entry, arguments[1], f"{prefix}{name}")
    elif origin is list and isinstance(value, list):
        for index, entry in enumerate(value):
            yield from type_mismatches(entry, arguments[0], f"{key}[{index}]")
    else:
        kinds = arguments if origin is UnionType else (declared,)
        if not any(_is_scalar(value, kind) for kind in kinds):
            names = " or ".join(_TYPE_NAMES.get(get_origin(it) or it, "a mapping") for it in kinds)
            yield f"{key} is {format_value(value)}, not {names}"


@cache
def _field_types(declared: Any) -> Mapping[str, Any]:
    return get_type_hints(declared)


def _is_scalar(value: object, kind: Any) -> bool:
    """Whether a value has a scalar type of JSON, in which an integer is also a number."""
    if kind is object:
        return True
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int):
        minimum = -_MAX_INTEGER if kind is float else 0
        return kind in (int, float) and minimum <= value < _MAX_INTEGER
    if isinstance(value, float):
        return kind is float and abs(value) < _MAX_NUMBER
    if kind is Subfolder:
        return isinstance(value, str) and _is_subfolder(value)
    return isinstance(kind, type) and not is_typeddict(kind) and isinstance(value, kind)


def _is_subfolder(path: str) -> bool:
    parts = PurePath(os.path.normpath(path)).parts
    is_inside = not os.path.isabs(path) and parts[:1] not in ((), ("..",))
    return is_inside and all("\0" not in part and len(part) <= _MAX_NAME for part in parts)
