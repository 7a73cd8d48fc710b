"""The compatibility matrix: each cell trains for two steps or is rejected."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from fixtures import compatibility_matrix
from fixtures.compatibility_matrix import Cell
from fixtures.job_runner import JobRunner

CELLS = [
    pytest.param(
        cell,
        id=f"{cell.strategy}-{cell.option}",
        marks=() if cell.runs_in_ci else pytest.mark.exhaustive,
    )
    for cell in compatibility_matrix.cells()
]


@pytest.fixture(scope="module")
def results() -> Iterator[dict[Cell, str]]:
    """Collect the cells; write record and page if ``SCALEWISE_RECORD`` is set.

    Cells that did not run (``-k`` with the name of a new option) keep their recorded result.
    """
    collected: dict[Cell, str] = {}
    yield collected
    if os.environ.get("SCALEWISE_RECORD"):
        known_results = compatibility_matrix.load_record() | collected
        ordered = {cell: known_results[cell] for cell in compatibility_matrix.cells()}
        head = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__}
        keys = {f"{c.strategy} | {c.group} | {c.option}": result for c, result in ordered.items()}
        record = {"command": compatibility_matrix.MAKE_COMMAND, **head, "cells": keys}
        compatibility_matrix.RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        compatibility_matrix.PAGE.write_text(
            compatibility_matrix.render_page(ordered, head), "utf-8"
        )


@pytest.mark.usefixtures("compiled_extensions")
@pytest.mark.parametrize("cell", CELLS)
def test_matrix_cell_runs_or_is_rejected(
    cell: Cell, results: dict[Cell, str], tmp_path: Path, shared_cache: Path
) -> None:
    rejection = cell.rejection()
    if rejection is None:
        JobRunner(tmp_path, shared_cache).without_defaults(*cell.overrides)
    results[cell] = rejection or compatibility_matrix.RUNS
