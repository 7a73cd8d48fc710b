"""The rows of a file of published measurements, those that say enough; the others are told."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from scalewise import regular_files
from scalewise.errors import ConfigError

Row = Mapping[str, str]

NEEDED = ("source", "gpu")
SHAPE = ("hidden", "layers", "heads", "seq", "micro_bs")
"""What a row must say of its model and batch."""
LARGEST = 10**7
"""The largest count that is one."""
COUNTS = (
    *("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq", "micro_bs", "grad_accum"),
    *("world", "dp", "fsdp", "tp", "pp", "cp"),
)
MEASURED = ("peak_mem_GiB", "tokens_per_s_per_gpu")
WORDS = ("model", "zero_stage", "precision", "quant", "peft", "optimizer", "act_ckpt", "notes")
AXES = ("dp", "fsdp", "tp", "pp", "cp")
OPTIMIZERS = ("adam", "sgd")
"""What an optimizer's name begins with; of others the state is not known here."""
RECOMPUTED = ("none", "full", "selective")
NUMBERS = ("fp32", "fp16", "bf16", "fp8", "float32", "32-true")


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Returns the rows of a CSV file that can be predicted, and why the others cannot, by line.

    Raises ``ConfigError`` for a file that is no such table.
    """
    kept: list[Row] = []
    left: list[str] = []
    regular_files.check_regular(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            if lacking := [key for key in NEEDED if key not in (table.fieldnames or ())]:
                reason = f"has no column {' and none '.join(lacking)}"
                fix = "the first line of a CSV file names its columns, with commas between them"
                raise ConfigError.for_key("data", path, reason, fix)
            for cells in table:
                row = {str(key): str(text or "").strip() for key, text in cells.items() if key}
                if not any(row.values()):
                    continue
                row = dict.fromkeys((*COUNTS, *MEASURED, *WORDS), "") | row
                problems = list(_row_problems(row, has_extra_cells=None in cells))
                if problems:
                    left.append(f"line {table.line_num}: {'; '.join(problems)}")
                else:
                    kept.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        reason = f"is no text in UTF-8: {error}"
        raise ConfigError.for_key("data", path, reason, "save it as CSV in UTF-8") from error
    return kept, left


def _row_problems(row: Row, *, has_extra_cells: bool) -> Iterator[str]:
    if has_extra_cells:
        yield "more cells than columns"
    for key in (*NEEDED, *SHAPE):
        if not row[key]:
            yield f"{key} is missing"
    for key in COUNTS:
        number = _parse_number(row[key])
        if row[key] and not (number and 1 <= number <= LARGEST and number.is_integer()):
            yield f"{key}={row[key]} is no count"
    for key in MEASURED:
        number = _parse_number(row[key])
        oom = key == MEASURED[0] and row[key].upper() == "OOM"
        if row[key] and not (number and number > 0) and not oom:
            yield f"{key}={row[key]} is no measurement"
    world, ranks = (
        _parse_number(row["world"]),
        math.prod(_parse_number(row[axis]) or 1 for axis in AXES),
    )
    if world and ranks != world:
        yield f"world={row['world']} is not {' x '.join(AXES)}"
    optimizer, recomputed = row["optimizer"].lower(), row["act_ckpt"].lower()
    if optimizer and (not optimizer.startswith(OPTIMIZERS) or "8bit" in optimizer):
        yield f"optimizer={row['optimizer']}: its state is not known here"
    if recomputed and not recomputed.startswith(RECOMPUTED):
        yield f"act_ckpt={row['act_ckpt']} is none of {', '.join(RECOMPUTED)}"
    if row["precision"] and not any(name in row["precision"].lower() for name in NUMBERS):
        yield f"precision={row['precision']} is no format known here"


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
