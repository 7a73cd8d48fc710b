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
TEXT_COLUMNS = (
    "model",
    "params_B",
    "zero_stage",
    "offload",
    "compile",
    "precision",
    "quant",
    "peft",
    "optimizer",
    "act_ckpt",
    "notes",
)
AXES = ("dp", "fsdp", "tp", "pp", "cp")
OPTIMIZERS = ("adam", "sgd")
"""Prefixes of the optimizers whose state size is known."""
CHECKPOINTING_MODES = ("none", "full", "selective", "selective-op")
FP8_NAMES = ("fp8", "float8")
QUANTIZATIONS = ("bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8")
ADAPTERS = ("", "lora", "qlora", "ia3")
ZERO_STAGES = ("", "0", "1", "2", "3")
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
    optimizer, checkpointing = row["optimizer"].lower(), row["act_ckpt"].lower()
    if optimizer and (not optimizer.startswith(OPTIMIZERS) or "8bit" in optimizer):
        yield f"optimizer={row['optimizer']} is not supported: its state size is unknown"
    if checkpointing and checkpointing not in CHECKPOINTING_MODES:
        yield f"act_ckpt={row['act_ckpt']} is not one of {', '.join(CHECKPOINTING_MODES)}"
    if row["quant"] and not row["quant"].startswith((*FP8_NAMES, *QUANTIZATIONS)):
        yield f"quant={row['quant']} is not one of {', '.join((*FP8_NAMES, *QUANTIZATIONS))}"
    if row["peft"].lower() not in ADAPTERS:
        yield f"peft={row['peft']} is not one of {', '.join(filter(None, ADAPTERS))}"
    if row["zero_stage"] not in ZERO_STAGES:
        yield f"zero_stage={row['zero_stage']} is not one of {', '.join(filter(None, ZERO_STAGES))}"
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
