"""Reading of a CSV file of published measurements, with the reasons why rows are skipped."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from scalewise import regular_files
from scalewise.errors import ConfigError

Row = Mapping[str, str]

REQUIRED_COLUMNS = ("source", "gpu")
REQUIRED_SHAPE_COLUMNS = ("hidden", "layers", "heads", "seq", "micro_bs")
"""Required columns of the model shape and the batch."""
MAX_COUNT = 10**7
"""Largest valid value of a count."""
COUNT_COLUMNS = (
    *("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq", "micro_bs", "grad_accum"),
    *("world", "dp", "fsdp", "tp", "pp", "cp"),
)
MEASUREMENT_COLUMNS = ("peak_mem_GiB", "tokens_per_s_per_gpu")
OPTION_COLUMNS = (
    *("zero_stage", "offload", "compile"),
    *("precision", "quant", "peft", "optimizer", "act_ckpt"),
)
"""Columns of options, in any case."""
TEXT_COLUMNS = (
    "model",
    "params_B",
    *OPTION_COLUMNS,
    "notes",
)
AXES = ("dp", "fsdp", "tp", "pp", "cp")
OPTIMIZERS = ("adam", "sgd")
"""Prefixes of the optimizers whose state size is known."""
CHECKPOINTING_MODES = ("none", "full", "selective", "selective-op")
FP8_NAMES = ("fp8", "float8")
_FOUR_BITS, _DOUBLE = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)
QUANTIZED = {
    "bnb.nf4": _FOUR_BITS,
    "bnb.nf4-dq": _DOUBLE,
    "bnb.fp4": _FOUR_BITS,
    "bnb.fp4-dq": _DOUBLE,
    "bnb.int8": 1.0,
}
"""Bytes per quantized weight: 4 bits and a scale per 64 weights, quantized in turn with "dq"
(Dettmers et al., 2023)."""
OPTION_VALUES = {
    "act_ckpt": CHECKPOINTING_MODES,
    "peft": ("lora", "qlora", "ia3"),
    "zero_stage": ("0", "1", "2", "3"),
    "compile": ("0", "1"),
}
"""Values of columns that can be planned."""
FLOAT_FORMATS = ("fp32", "fp16", "bf16", "fp8", "float32", "32-true")


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Read the rows of a CSV file, and the reasons why rows are skipped, with their lines.

    Raises:
        ConfigError: the file is not a CSV file with the required columns.
    """
    rows: list[Row] = []
    skipped: list[str] = []
    regular_files.check_regular(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            if missing := [key for key in REQUIRED_COLUMNS if key not in (table.fieldnames or ())]:
                reason = f"lacks the columns {', '.join(missing)}"
                fix = "add a first line with the names of the columns, separated by commas"
                raise ConfigError.for_key("data", path, reason, fix)
            for cells in table:
                row = {str(key): str(text or "").strip() for key, text in cells.items() if key}
                if not any(row.values()):
                    continue
                row = dict.fromkeys((*COUNT_COLUMNS, *MEASUREMENT_COLUMNS, *TEXT_COLUMNS), "") | row
                row |= {key: row[key].lower() for key in OPTION_COLUMNS}
                problems = list(_row_problems(row, has_extra_cells=None in cells))
                if problems:
                    skipped.append(f"line {table.line_num}: {'; '.join(problems)}")
                else:
                    rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        reason = f"is not a CSV file in UTF-8: {error}"
        raise ConfigError.for_key("data", path, reason, "save it as CSV in UTF-8") from error
    return rows, skipped


def _row_problems(row: Row, *, has_extra_cells: bool) -> Iterator[str]:
    if has_extra_cells:
        yield "has more cells than columns"
    for key in (*REQUIRED_COLUMNS, *REQUIRED_SHAPE_COLUMNS):
        if not row[key]:
            yield f"{key} is missing"
    for key in COUNT_COLUMNS:
        number = _parse_number(row[key])
        if row[key] and not (number and 1 <= number <= MAX_COUNT and number.is_integer()):
            yield f"{key}={row[key]} is not a count"
    for key in MEASUREMENT_COLUMNS:
        number = _parse_number(row[key])
        oom = key == MEASUREMENT_COLUMNS[0] and row[key].upper() == "OOM"
        if row[key] and not (number and number > 0) and not oom:
            yield f"{key}={row[key]} is not a measurement"
    world, ranks = (
        _parse_number(row["world"]),
        math.prod(_parse_number(row[axis]) or 1 for axis in AXES),
    )
    if world and ranks != world:
        yield f"world={row['world']} is not {' x '.join(AXES)}"
    parameters = _parse_number(row["params_B"])
    if row["params_B"] and not (parameters and parameters > 0):
        yield f"params_B={row['params_B']} is not a number of billions"
    optimizer = row["optimizer"]
    if optimizer and (not optimizer.startswith(OPTIMIZERS) or "8bit" in optimizer):
        yield f"optimizer={row['optimizer']} is not supported: its state size is unknown"
    for key, values in OPTION_VALUES.items():
        if row[key] and row[key] not in values:
            yield f"{key}={row[key]} is not one of {', '.join(values)}"
    if row["quant"] and not row["quant"].startswith(FP8_NAMES) and row["quant"] not in QUANTIZED:
        yield f"quant={row['quant']} is not one of {', '.join((*FP8_NAMES, *QUANTIZED))}"
    if row["offload"]:
        yield f"offload={row['offload']} is not supported"
    if row["precision"] and not any(name in row["precision"].lower() for name in FLOAT_FORMATS):
        yield f"precision={row['precision']} is not supported"


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
